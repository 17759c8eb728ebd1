"""Candidates of AMD GPUs: few, and good.

Shapes are listed by the number of waves that they keep busy; which of them an arch has, with which matrix instruction
and how long along k, follows from its tables. Shapes without room are left out here, because the cost model would
rank them; everything else is the rules' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.config.fnuz import fnuz_codes, turns_codes
from tilewright_gemm.config.packing import VectorFormat
from tilewright_gemm.launch.splits import splits
from tilewright_gemm.problem.problem import GemmProblem
from tilewright_gemm.vocabulary import Epilogue
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.tiles.choices import table_key, warp_tile_for
from tilewright_kit.tiles.footprint.workgroup import (
    fits_registers,
    registers_of,
    shared_bytes,
    staging_bytes,
    staging_limit,
)
from tilewright_kit.types.dtypes import DType

__all__ = ["HIP_SHAPES", "HipShape", "hip_algorithms", "hip_config"]


class HipShape(NamedTuple):
    """Output tile of a workgroup, and how its waves stand."""

    tile: tuple[int, int]
    wave: tuple[int, int]


HIP_SHAPES = (
    HipShape((256, 256), (4, 4)),
    HipShape((256, 256), (2, 4)),
    HipShape((256, 224), (4, 1)),
    HipShape((256, 192), (4, 1)),
    HipShape((256, 128), (2, 2)),
    HipShape((128, 256), (2, 2)),
    HipShape((256, 128), (4, 2)),
    HipShape((128, 256), (2, 4)),
    HipShape((128, 128), (2, 2)),
    HipShape((128, 128), (2, 4)),
    HipShape((128, 128), (4, 2)),
    HipShape((128, 64), (2, 2)),
    HipShape((64, 128), (2, 2)),
    HipShape((128, 64), (4, 2)),
    HipShape((64, 128), (2, 4)),
    HipShape((64, 64), (2, 2)),
    HipShape((64, 64), (4, 2)),
    # Products of few rows or columns read one operand once: as many waves along the other as there are.
    HipShape((32, 128), (1, 4)),
    HipShape((32, 128), (1, 8)),
    HipShape((32, 64), (2, 4)),
    HipShape((32, 64), (1, 4)),
    HipShape((16, 128), (1, 8)),
    HipShape((16, 128), (1, 4)),
    HipShape((16, 64), (1, 4)),
    HipShape((16, 32), (1, 2)),
    HipShape((128, 32), (4, 1)),
    HipShape((128, 16), (8, 1)),
    HipShape((64, 16), (4, 1)),
    HipShape((32, 16), (2, 1)),
)
"""Shapes from many results of a workgroup to few, of all archs: those that an arch's table of waves lacks fall away."""
_PAIRED = (HipShape((128, 224), (4, 1)), HipShape((224, 128), (1, 4)))
"""Shapes, two of which share a unit where waves turn codes of 8-bit floats (``_shared``): 32 by 19 tiles of 4096 x 4096
are two for each of the 304 units of an MI300X, of which 256 tiles leave 48 idle.
"""
_GENERAL = (HipShape((64, 64), (2, 2)), HipShape((64, 64), (4, 2)))
"""For every problem, whatever its size."""

_FEW = 32
"""Rows or columns up to which memory decides, and the pipeline for that is considered."""
_LINE_BYTES, _MEMORY_LINE_BYTES = (64, 128), (128, 256)
"""Lengths of a tile along k."""


def hip_algorithms(problem: GemmProblem, device: DeviceInfo, few: bool) -> Iterator[GemmConfig]:  # noqa: ARG001
    """Configurations with the algorithm set, the signature not; the most general last."""
    arch = device.arch
    key = table_key(problem.dtype_a.value, problem.dtype_b.value)
    m, n = max(item.m for item in problem.products), max(item.n for item in problem.products)
    packed = problem.packing is not None
    # A tile twice as tall or as wide as the problem wastes half its work.
    shapes = (*HIP_SHAPES, *_PAIRED) if fnuz_codes(problem.dtype_a, arch) else HIP_SHAPES
    suited = [shape for shape in shapes if shape.tile[0] < 2 * max(m, 16) and shape.tile[1] < 2 * max(n, 16)]
    for shape in (*suited, *_GENERAL):
        if (*shape.wave, 1) not in arch.waves:
            continue
        for pipeline in _pipelines(arch, few=min(m, n) <= _FEW, packed=packed):
            tiles = arch.warp_tiles_for(key, pipeline)
            if isinstance(problem.packing, VectorFormat):
                tiles = tuple(tile for tile in tiles if tile[1] == problem.packing.columns)
            for nbytes in _MEMORY_LINE_BYTES if pipeline == "mem" else _LINE_BYTES:
                config = hip_config(arch, problem.dtype_a, key, shape, pipeline, nbytes, tiles)
                if config is None:
                    continue
                config = _with_room(config.replace(layout=problem.layout, dtype_b=problem.dtype_b.value), arch)
                if config is None:
                    continue
                for split in splits(problem, device, config.tile, 1):
                    chosen = config.replace(split_k=split) if split > 1 else config
                    if not _spills(chosen, arch):
                        yield chosen
                        yield from _shared(chosen, arch)


def _shared(config: GemmConfig, arch: ArchSpec) -> Iterator[GemmConfig]:
    """A kernel of which two share a unit, where the staged epilogue takes the LDS for that and waves have to turn codes
    of 8-bit floats, which another workgroup's products hide.
    """
    other = config.replace(epilogue=Epilogue.DEFAULT)
    if turns_codes(config, arch) and _resident(config, arch) < 2 <= _resident(other, arch):
        yield other


def _resident(config: GemmConfig, arch: ArchSpec) -> int:
    """Workgroups that LDS and registers of a unit have room for."""
    registers = registers_of(config, arch) * config.waves * arch.wave_size
    return min(arch.lds_bytes // max(shared_bytes(config, arch), 1), arch.register_file // max(registers, 1))


def _spills(config: GemmConfig, arch: ArchSpec) -> bool:
    """True where clang takes one register more than are counted, and all are. Measured with clang 22 for gfx1201, where
    256 registers and one spilled are too many: A is the larger tile, and turned on its way to the other of two, B is
    not, and the epilogue is the kernel's own. Wide tiles, ``compv3``, B in rows and slices of K fit.
    """
    full = registers_of(config, arch) >= arch.registers_per_thread(config.waves * arch.wave_size)
    tall = config.letters[:2] == "cc" and config.tile[0] > config.tile[1]
    return full and tall and arch.pipeline(config.pipeline).double_buffer and config.split_k <= 1


def _pipelines(arch: ArchSpec, *, few: bool, packed: bool) -> Iterable[str]:
    if packed:
        return [name for name in arch.preshuffle_pipelines if name in arch.pipelines]
    wanted = ("mem", "compv4", "compv3") if few else ("comp_async", "compv4", "compv3")
    return [name for name in wanted if name in arch.pipelines]


def hip_config(
    arch: ArchSpec,
    dtype: DType,
    key: str,
    shape: HipShape,
    pipeline: str,
    line_bytes: int,
    warp_tiles: Iterable[Triple] | None = None,
) -> GemmConfig | None:
    """The plain kernel of that shape whose tiles have lines of ``line_bytes`` along k; None if no matrix instruction
    (or none of ``warp_tiles``) suits it.
    """
    part = shape.tile[0] // shape.wave[0], shape.tile[1] // shape.wave[1]
    tiles = arch.warp_tiles_for(key, pipeline) if warp_tiles is None else warp_tiles
    warp = warp_tile_for(tiles, part, line_bytes // dtype.bytes)
    if warp is None:
        return None
    offer = arch.pipeline(pipeline)
    return GemmConfig(
        dtype_a=dtype,
        pipeline=pipeline,
        epilogue=Epilogue(offer.epilogues[0]),
        scheduler=offer.schedulers[0],
        tile=(*shape.tile, line_bytes // dtype.bytes),
        wave=(*shape.wave, 1),
        warp_tile=warp,
        preshuffle=pipeline in arch.preshuffle_pipelines,
    )


def _with_room(config: GemmConfig, arch: ArchSpec) -> GemmConfig | None:
    """With the first of the pipeline's epilogues for which there is room."""
    fitting = (config.replace(epilogue=Epilogue(name)) for name in arch.pipeline(config.pipeline).epilogues)
    return next((item for item in fitting if _has_room(item, arch)), None)


def _has_room(config: GemmConfig, arch: ArchSpec) -> bool:
    fits = staging_bytes(config, arch) <= staging_limit(config, arch) and shared_bytes(config, arch) <= arch.lds_bytes
    return fits and fits_registers(config, arch)
