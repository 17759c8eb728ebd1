"""Problems and kernels for every type, matrix instruction, layout, pipeline, epilogue and variant of an AMD GPU.

Each case combines one choice of every kind; the kinds are dealt out at different paces, so that few cases hold many
pairs. What they hold together is asserted by a test.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tilewright_arch import ArchSpec
from tilewright_gemm.config.config import GemmConfig, Triple
from tilewright_gemm.pipelines.candidates import with_signature
from tilewright_gemm.pipelines.records import pipeline_of
from tilewright_gemm.plugin import GemmOperation
from tilewright_gemm.vocabulary import LAYOUTS, Epilogue
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.tiles.footprint.workgroup import size_of
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["Case", "cases", "pairs_of"]

GEMM = GemmOperation()
T = TypeVar("T")
VARIANTS = ("plain", "split_k", "batched", "persistent", "grouped", "plain")
STEPS = ("none", "bias", "multi_d", "scales", "clamp", "wide")
SIZES = ((45, 77, 51), (64, 128, 128), (33, 64, 200), (1, 100, 64), (70, 17, 33), (16, 128, 16), (128, 48, 96))
UNARIES = (
    "Relu", "Gelu", "FastGelu", "Silu", "Sigmoid", "Tanh", "HardSwish", "PassThrough", "LeakyRelu", "Elu", "Softplus",
    "Mish",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel and a problem that it computes. ``lead``: bytes by which operands miss their usual alignment."""

    config: GemmConfig
    request: OperationRequest
    lead: int = 0
    marks: dict[str, str] = field(default_factory=dict)


def pairs_of(arch: ArchSpec) -> list[tuple[str, str]]:
    """Types of A and B that the arch multiplies."""
    return [(a, b) for a, b, _ in (key.split("_") for key in arch.warp_tiles)]


def pipelines_of(arch: ArchSpec) -> list[str]:
    """The arch's pipelines of products; others are convolution's."""
    return [name for name in arch.pipelines if pipeline_of(GemmConfig(pipeline=name), arch)]


def cases(arch: ArchSpec, every: int = 1) -> Iterator[Case]:
    """One or more cases for every warp tile of every pair of types; every ``every``-th of them."""
    rng = random.Random(arch.name)
    tiles = [(a, b, tile) for a, b in pairs_of(arch) for tile in arch.warp_tiles[_key(arch, a, b)]]
    # Where there is one tile for every type, each type meets every layout and pipeline.
    rounds = max(4 * len(pairs_of(arch)) // len(tiles), 1)
    plain = [name for name in pipelines_of(arch) if name not in arch.preshuffle_pipelines]
    for number, ((a, b, tile), _) in enumerate(itertools.product(tiles, range(rounds))):
        pipeline = _deal(plain, number)
        offer = arch.pipeline(pipeline)
        marks = {
            "pair": f"{a}_{b}",
            "layout": _deal(LAYOUTS, number + number // 4),
            "pipeline": pipeline,
            "epilogue": _deal(offer.epilogues, number // len(plain)),
            "scheduler": _deal(offer.schedulers, number // len(plain) // 2),
            "variant": _deal(VARIANTS, number + number // len(VARIANTS)),
            "step": _deal(STEPS, number + number // len(STEPS) * 2),
            "unary": _deal(UNARIES, number),
            "warp_tile": "x".join(map(str, tile)),
        }
        sizes = _deal(SIZES, number + number // len(SIZES))
        lead, gap = rng.choice((0, 0, 1, 3)), rng.choice((0, 0, 3, 8))  # drawn for all, so that each stays what it is
        if number % every == 0:
            yield _case(arch, tile, marks, sizes, lead, gap)


def _key(arch: ArchSpec, a: str, b: str) -> str:
    return f"{a}_{b}_{arch.acc_dtype(a, b)}"


def _deal(values: Sequence[T], number: int) -> T:
    return values[number % len(values)]


def _case(arch: ArchSpec, warp: Triple, marks: dict[str, str], sizes: Triple, lead: int, gap: int) -> Case:
    a, b = marks["pair"].split("_")
    attributes, inputs = _request(marks, sizes, gap)
    plain = GEMM.parse(OperationRequest("gemm", inputs, {}, attributes))
    unit = max(item.desc.dtype.bytes for item in plain.operands)
    if lead:
        attributes["alignment"] = unit
    request = OperationRequest("gemm", inputs, {}, attributes)
    problem = GEMM.parse(request)
    config = GemmConfig(
        dtype_a=DType(a),
        dtype_b=b,
        pipeline=marks["pipeline"],
        epilogue=Epilogue(marks["epilogue"]),
        scheduler=marks["scheduler"],
        persistent=marks["variant"] == "persistent",
        warp_tile=warp,
        split_k=3 if marks["variant"] == "split_k" else 1,
        layout=problem.layout,
    )
    return Case(with_signature(problem, _shaped(config, arch, sizes)), request, lead * unit, marks)


def _shaped(config: GemmConfig, arch: ArchSpec, sizes: Triple) -> GemmConfig:
    """With waves and a tile: of those that are allowed the one that needs the fewest waves for the problem."""
    size = size_of(config.a)
    waves = [wave for wave in arch.waves if wave[2] == 1]
    found: list[tuple[int, GemmConfig]] = []
    for wave, repeat, lines in itertools.product(waves, (1, 2), (1, 2)):
        m, n = wave[0] * config.warp_tile[0], wave[1] * config.warp_tile[1] * repeat
        k = max(64 * lines // size // config.warp_tile[2], 1) * config.warp_tile[2]
        shaped = config.replace(tile=(-(-m // 16) * 16, -(-n // 16) * 16, k), wave=wave)
        count = -(-sizes[0] // shaped.tile[0]) * -(-sizes[1] // shaped.tile[1]) * shaped.waves
        found.append((count * 100 + shaped.tile[0] * shaped.tile[1] // shaped.waves // 64, shaped))
    # The rules are what takes time: the best is asked about first.
    found.sort(key=lambda item: item[0])
    best = next((shaped for _, shaped in found if GEMM.rules.allows(shaped, arch)), None)
    assert best, f"{arch.name}: no shape for {config.name}: {GEMM.rules.check(config, arch)}"
    return best


def _request(marks: dict[str, str], sizes: Triple, gap: int) -> tuple[dict[str, Any], dict[str, TensorDesc]]:
    a, b = marks["pair"].split("_")
    m, n, k = sizes
    out = "fp16" if a in ("fp8", "bf8") else a
    attributes: dict[str, Any] = {"alpha": 0.5} if a != "int8" else {}
    batch = (2,) if marks["variant"] == "batched" else ()
    inputs = {
        "a": _matrix(a, batch, m, k, marks["layout"][0], gap),
        "b": _matrix(b, batch, k, n, marks["layout"][1], gap),
    }
    step = marks["step"]
    if step != "none" and a == "int8":
        attributes["out_dtype"] = out = "fp32" if step == "wide" else "fp16"
    elif step == "wide":
        attributes["out_dtype"] = out = "fp32" if a != "fp32" else "bf16"
    if step in ("bias", "clamp"):
        inputs["bias"] = TensorDesc.of("fp32" if step == "bias" else out, (n,))
        attributes["unary"] = marks["unary"] if step == "bias" else "Clamp"
        if step == "clamp":
            attributes |= {"clamp_lo": -1.0, "clamp_hi": 2.0}
    elif step == "multi_d":
        inputs |= {"d[0]": TensorDesc.of(out, (*batch, m, n)), "d[1]": TensorDesc.of("fp32", (m, 1))}
        attributes["binary"] = "MultiDAdd" if len(marks["unary"]) % 2 else "MultiDMultiply"
        attributes["unary"] = marks["unary"]
    elif step == "scales":
        inputs |= {"scale_a": TensorDesc.of("fp32", (m,)), "scale_b": TensorDesc.of("fp32", (n,))}
    if marks["variant"] == "grouped":
        return attributes, _grouped(inputs, m)
    if marks["variant"] == "split_k":
        attributes["split_k"] = 3
    return attributes, inputs


def _matrix(dtype: str, batch: tuple[int, ...], rows: int, cols: int, letter: str, gap: int) -> TensorDesc:
    lines, length = (rows, cols + gap) if letter == "r" else (cols, rows + gap)
    strides = (length, 1) if letter == "r" else (1, length)
    return TensorDesc.of(dtype, (*batch, rows, cols), (*(lines * length for _ in batch), *strides))


def _grouped(inputs: dict[str, TensorDesc], m: int) -> dict[str, TensorDesc]:
    """Three products of different rows, one of them without any."""
    found = {}
    for group, rows in enumerate((m, 0, max(m // 3, 1))):
        for name, desc in inputs.items():
            kind, bracket, rest = name.partition("[")
            shape = (rows, *desc.shape[1:]) if desc.shape[0] == m else desc.shape
            named = f"{kind}[{group}]{bracket}{rest}"
            found[named] = desc if kind in ("b", "bias", "scale_b") else TensorDesc.of(desc.dtype, shape, desc.strides)
    return found
