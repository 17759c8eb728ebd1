"""How fast one compute unit of a GPU does what a main loop is made of: input of static analysis and of cost models."""

from __future__ import annotations

from dataclasses import dataclass

from .frozen import FrozenMap
from .reading import Fields


@dataclass(frozen=True, slots=True)
class MatrixRate:
    """One matrix instruction: ``blocks`` products of m x n x k, done by one wave in ``cycles`` of its SIMD; of two
    operands of fewer than 8 bits in ``narrow_cycles``.
    """

    m: int
    n: int
    k: int
    blocks: int
    cycles: int
    narrow_cycles: int

    @property
    def flops(self) -> int:
        """Operations of one instruction; a multiply-add counts as two."""
        return 2 * self.m * self.n * self.k * self.blocks


@dataclass(frozen=True, slots=True)
class Rates:
    """Cycles are those of the compute unit's clock; latencies are without any contention.

    A wave begins an instruction every ``issue_cycles`` at the most. ``vector_cycles`` are those for which an
    instruction of a wave occupies the vector unit of its SIMD, ``slow_vector_cycles`` the same for transcendental
    functions and 32-bit multiplications; the result can be used after ``vector_latency``. A matrix instruction
    occupies the matrix unit of its SIMD for its ``cycles``, and the vector unit too where ``matrix_on_vector_unit``;
    its result can be used ``matrix_latency`` later, and by the next one that adds to the same registers
    ``chain_latency`` later. Bytes per cycle are of the whole unit: ``lds_bytes_per_cycle`` with every bank in use,
    ``global_bytes_per_cycle`` from the L2 cache. Latencies of memory are until the first data are back.
    """

    simds: int
    waves_per_simd: int
    register_granule: int
    issue_cycles: int
    vector_cycles: int
    slow_vector_cycles: int
    vector_latency: int
    matrix: FrozenMap[str, MatrixRate]
    matrix_latency: int
    chain_latency: int
    matrix_on_vector_unit: bool
    lds_bytes_per_cycle: int
    lds_latency: int
    global_bytes_per_cycle: int
    global_latency: int


_BANK_BYTES = 4


def read_rates(fields: Fields, lds_banks: int) -> Rates:
    """The ``rates`` section of a spec, whose LDS has so many banks. Raises ``SpecError``."""
    vector, matrix = fields.fields("vector"), fields.fields("matrix")
    lds, memory = fields.fields("lds"), fields.fields("global")
    rates = Rates(
        simds=fields.integer("simds", minimum=1),
        waves_per_simd=fields.integer("waves_per_simd", minimum=1),
        register_granule=fields.integer("register_granule", minimum=1),
        issue_cycles=fields.integer("issue_cycles", minimum=1),
        vector_cycles=vector.integer("cycles", minimum=1),
        slow_vector_cycles=vector.integer("slow_cycles", minimum=1),
        vector_latency=vector.integer("latency", minimum=1),
        matrix=FrozenMap({name: _matrix(entry) for name, entry in fields.fields("instructions", {}).entries()}),
        matrix_latency=matrix.integer("latency"),
        chain_latency=matrix.integer("chain_latency"),
        matrix_on_vector_unit=matrix.boolean("on_vector_unit"),
        lds_bytes_per_cycle=lds_banks * _BANK_BYTES,
        lds_latency=lds.integer("latency", minimum=1),
        global_bytes_per_cycle=memory.integer("bytes_per_cycle", minimum=1),
        global_latency=memory.integer("latency", minimum=1),
    )
    for section in (vector, matrix, lds, memory, fields):
        section.finish()
    return rates


def _matrix(entry: Fields) -> MatrixRate:
    m, n, k = _triple(entry)
    cycles = entry.integer("cycles", minimum=1)
    narrow = entry.integer("narrow_cycles", cycles, minimum=1)
    rate = MatrixRate(m, n, k, entry.integer("blocks", 1, minimum=1), cycles, narrow)
    entry.finish()
    return rate


def _triple(entry: Fields) -> tuple[int, int, int]:
    values = entry.array("tile")
    if len(values) != 3:
        raise entry.fail("tile", "must be an array of 3 positive integers")
    m, n, k = (entry.positive(f"tile[{index}]", value) for index, value in enumerate(values))
    return m, n, k
