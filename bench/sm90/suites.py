"""The experiments of check.py: ``correct`` exercises every feature, the others time candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from sm90.config import ELEMENT_BYTES, Config

__all__ = ["SUITES", "Experiment"]

Shape = tuple[int, int, int]
Tile = tuple[int, int, int]


@dataclass(frozen=True)
class Experiment:
    """One kernel on one problem: always checked, timed if ``time``."""

    config: Config
    shape: Shape
    batch: int = 1
    alpha: float = 1.0
    guard: bool = False
    time: bool = False
    dependent: bool = False


COOPERATIVE = Config()
PINGPONG = Config(scheduler="pingpong", wave=(1, 1), tile=(64, 256, 64))
DECODE = Config(tile=(16, 64, 128), wave=(1, 1), swap=True, persistent=False)
FP8 = Config(a="fp8", b="fp8", tile=(128, 128, 128))
INT8 = Config(a="int8", b="int8", c="int32", tile=(128, 128, 128))
SCALED = Config(a="fp8", b="fp8", tile=(128, 128, 128), scale_a="row", scale_b="column")

SMALL: Shape = (1024, 1024, 1024)
SQUARES: list[Shape] = [(2048, 2048, 2048), (4096, 4096, 4096), (8192, 8192, 8192)]
LARGE: list[Shape] = [(4096, 14336, 4096), (8192, 8192, 28672)]
DECODE_16: Shape = (16, 4096, 4096)
DECODE_64: Shape = (64, 8192, 8192)
DECODE_128: Shape = (128, 28672, 4096)


def schedules() -> list[Config]:
    """Schedules, tiles, clusters, split-K and Stream-K, ordinary and transposed."""
    return [
        COOPERATIVE, PINGPONG, DECODE, replace(COOPERATIVE, epilogue="default"),
        replace(PINGPONG, tile=(128, 128, 64), cluster=(2, 1)), replace(PINGPONG, tile=(128, 192, 64)),
        Config(tile=(256, 128, 64), cluster=(1, 2)), Config(tile=(128, 256, 64), cluster=(2, 1)),
        Config(tile=(128, 128, 64), cluster=(2, 2), persistent=False), Config(tile=(256, 192, 64)),
        Config(tile=(128, 224, 64), epilogue="default"), Config(tile=(64, 256, 64), wave=(1, 2)),
        Config(tile=(192, 128, 64), wave=(3, 1)), Config(tile=(256, 128, 64), wave=(4, 1)),
        Config(tile=(128, 128, 64), split_k=3), Config(tile=(128, 128, 64), split_k=2, cluster=(2, 1)),
        replace(PINGPONG, split_k=2, tile=(64, 128, 64)), replace(COOPERATIVE, stream=True),
        Config(tile=(128, 128, 64), stream=True, cluster=(2, 1)), replace(DECODE, split_k=4),
        replace(DECODE, tile=(24, 128, 64), wave=(1, 2)), replace(DECODE, epilogue="default"),
        replace(DECODE, tile=(64, 128, 64), wave=(1, 2), cluster=(1, 2)), replace(DECODE, tile=(40, 128, 128)),
        replace(DECODE, tile=(8, 64, 128), c="fp32"), replace(DECODE, split_k=2, cluster_k=2),
        replace(DECODE, tile=(48, 128, 64), wave=(1, 2), split_k=4, cluster_k=4),
        Config(tile=(128, 128, 64), split_k=2, cluster_k=2, persistent=False),
        replace(DECODE, tile=(64, 128, 64), c="fp32", epilogue="default"),
    ]  # fmt: skip


def layouts() -> list[Config]:
    """MN-major operands on either side, shared out over clusters too."""
    return [
        Config(layout="rrr"), Config(layout="crr"), Config(layout="ccr", cluster=(2, 1)),
        Config(layout="rrr", tile=(128, 128, 64), cluster=(2, 1)),
        Config(layout="crr", tile=(256, 128, 64), cluster=(1, 2)),
        replace(DECODE, layout="ccr", tile=(64, 64, 64)), replace(DECODE, layout="rrr", tile=(16, 128, 64)),
    ]  # fmt: skip


def types() -> list[Config]:
    """Element types, promotion, scales."""
    return [
        Config(a="fp16", b="fp16", c="fp16"), Config(a="fp16", b="fp16", c="fp32"), FP8, replace(FP8, b="bf8"),
        replace(FP8, a="bf8"), replace(FP8, a="bf8", b="bf8", c="fp16"), replace(FP8, promote=4),
        replace(FP8, promote=8, scheduler="pingpong", wave=(1, 1), tile=(64, 128, 128)), SCALED,
        replace(SCALED, scale_a="tensor", scale_b="tensor"),
        replace(SCALED, swap=True, tile=(16, 64, 128), wave=(1, 1), split_k=2, a="bf8"), INT8,
        replace(INT8, epilogue="default"), replace(INT8, c="bf16", scale_a="row", scale_b="column"),
        replace(INT8, split_k=2), replace(INT8, swap=True, tile=(16, 64, 128), wave=(1, 1)),
    ]  # fmt: skip


def epilogues() -> list[Config]:
    """Fused steps, groups."""
    return [
        Config(bias="bf16", unary="Gelu"), Config(bias="fp32", unary="FastGelu", epilogue="default"),
        Config(d=("bf16",), binary="Add"), Config(d=("fp16",), binary="Multiply", c="fp32", unary="Tanh"),
        replace(PINGPONG, d=("bf16",), binary="Add", bias="fp32", scale_a="row", scale_b="column", unary="Relu"),
        Config(d=("bf16", "fp32"), binary="Multiply", tile=(128, 128, 64)),
        replace(DECODE, bias="bf16", unary="Silu", d=("bf16",), binary="Add"), Config(grouped=True),
        replace(PINGPONG, grouped=True, cluster=(2, 1)), replace(DECODE, grouped=True, split_k=2),
    ]  # fmt: skip


def correct() -> list[Experiment]:
    """Every feature, small and odd sizes, poisoned outputs, gaps between rows."""
    out = []
    for config in schedules() + layouts() + types() + epilogues():
        shapes = [(512, 1024, 512), (333, 777, 200), (130, 24, 1040)]
        alpha = 1.0 if config.c == "int32" else 0.5
        out += [Experiment(config, shape, guard=True, alpha=alpha) for shape in shapes]
        out.append(Experiment(config, (77, 136, 8)))
        if not config.grouped:
            out.append(Experiment(config, (200, 264, 192), batch=3, guard=True))
    return out


def with_clusters(configs: Iterable[Config], clusters: Iterable[tuple[int, int]]) -> list[Config]:
    return [replace(config, cluster=cluster) for config, cluster in product(configs, clusters)]


def large_candidates(base: Config) -> list[Config]:
    """For problems of many tiles; ``base`` gives the types."""
    k = 128 // ELEMENT_BYTES[base.a]
    pairs = [(1, 1), (2, 1), (1, 2)]
    cooperative = [replace(base, tile=(m, n, k), wave=(2, 1)) for m, n in ((128, 256), (256, 128))]
    pingpong = [
        replace(base, tile=(m, n, k), wave=(1, 1), scheduler="pingpong") for m, n in ((64, 256), (128, 128), (128, 192))
    ]
    if base.c == "int32":
        pingpong.pop()  # does not fit the registers
    more = [
        replace(base, tile=(64, 256, k), wave=(1, 1), scheduler="pingpong", cluster=(4, 1)),
        replace(base, tile=(128, 256, k), cluster=(2, 2)),
    ]
    return with_clusters(cooperative + pingpong, pairs) + more


def small_candidates(base: Config) -> list[Config]:
    """For problems of fewer tiles than multiprocessors."""
    k = 128 // ELEMENT_BYTES[base.a]
    base = replace(base, persistent=False)
    clusters = [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4), (4, 1)]
    plain = [replace(base, tile=(128, 64, k)), replace(base, tile=(128, 64, 2 * k))]
    plain += [replace(base, tile=(64, 128, k), wave=(1, 2)), replace(base, tile=(64, 128, 2 * k), wave=(1, 2))]
    plain += [replace(base, tile=(128, 64, k), wave=(1, 1)), replace(base, tile=(64, 128, k), wave=(1, 1))]
    plain += [replace(base, tile=(64, 128, 2 * k), wave=(1, 1)), replace(base, tile=(128, 64, k), stages=4)]
    split = [replace(base, tile=(128, 128, t), split_k=2) for t in (k, 2 * k)]
    out = with_clusters(plain, clusters) + with_clusters(split, clusters[:4])
    out += [replace(config, cluster_k=2) for config in split]
    out += [replace(base, tile=(128, 64, k), epilogue="default", cluster=(2, 1))]
    out += [replace(base, tile=(64, 64, k), wave=(1, 1), stages=6, cluster=c) for c in clusters]
    out += with_clusters([replace(base, tile=(128, 256, k), split_k=4)], [(1, 1), (2, 1)])
    out += [replace(base, tile=(128, 128, k), stream=True, persistent=True)]
    return out


def timed(configs: Iterable[Config], *shapes: Shape) -> list[Experiment]:
    return [Experiment(config, shape, time=True) for shape in shapes for config in configs]


def wide() -> list[Experiment]:
    """bf16 on large problems."""
    return timed(large_candidates(Config()), *SQUARES, *LARGE)


def small() -> list[Experiment]:
    found = timed(small_candidates(Config()), SMALL)
    one = Config(tile=(128, 64, 128), persistent=False, cluster=(1, 2))
    return [*found, Experiment(one, SMALL, time=True, dependent=True)]


def decode_candidates(base: Config) -> list[Experiment]:
    """Few rows: the weights' bytes decide."""
    k = 128 // ELEMENT_BYTES[base.a]
    base = replace(base, swap=True, persistent=False, wave=(1, 1))
    tiles = [((16, 64, 2 * k), 2), ((16, 64, min(4 * k, 256)), 2), ((16, 64, 2 * k), 4), ((16, 128, 2 * k), 4)]
    out = timed([replace(base, tile=t, split_k=s) for t, s in tiles], DECODE_16)
    first = replace(base, tile=(16, 64, 2 * k), split_k=2)
    out += [Experiment(first, DECODE_16, time=True, dependent=True)]
    for dependent in (False, True):
        for tile, parts in (((16, 64, 2 * k), 2), ((16, 64, k), 2), ((16, 128, k), 4)):
            one = replace(base, tile=tile, split_k=parts, cluster_k=parts)
            out.append(Experiment(one, DECODE_16, time=True, dependent=dependent))
    two = replace(base, tile=(16, 128, k), wave=(1, 2), split_k=4, cluster_k=4)
    out += timed([two], DECODE_16)
    shared = replace(base, tile=(16, 64, 2 * k), stages=5)  # two workgroups of a launch share a multiprocessor
    out += timed([replace(shared, split_k=s) for s in (2, 3, 4)], DECODE_16)
    out += [Experiment(replace(shared, split_k=4), DECODE_16, time=True, dependent=True)]
    out += [Experiment(replace(shared, split_k=2), DECODE_16, time=True, dependent=True)]
    both = replace(base, tile=(64, 64, k), stages=6)
    out += timed([replace(both, split_k=2), replace(both, split_k=2, cluster=(1, 2)), both], DECODE_64)
    rows = replace(base, swap=False, epilogue="default")  # no split-K: 32 columns each
    out += timed([replace(rows, tile=(64, 32, k)), replace(rows, tile=(64, 32, 2 * k))], DECODE_16)
    out += [Experiment(replace(rows, tile=(64, 32, 2 * k)), DECODE_16, time=True, dependent=True)]
    for tile in ((64, 64, k), (64, 64, 2 * k)):
        out += timed(with_clusters([replace(base, tile=tile)], [(1, 1), (1, 2)]), DECODE_64)
    half = replace(base, tile=(64, 64, k), stages=6)  # two launches' workgroups share a multiprocessor
    out += [Experiment(half, DECODE_64, time=True, dependent=True)]
    out += [Experiment(replace(base, tile=(64, 64, 2 * k)), DECODE_64, time=True, dependent=True)]
    return out


def panel_candidates(base: Config) -> list[Config]:
    """128 rows, many columns."""
    k = 128 // ELEMENT_BYTES[base.a]
    base = replace(base, persistent=False)
    tall = replace(base, swap=True, wave=(1, 2))
    found = [replace(base, tile=(128, n, k)) for n in (192, 256)] + [
        replace(base, tile=(128, 224, k), epilogue="default"),
        replace(base, tile=(128, 256, k), stream=True, persistent=True),
        replace(tall, tile=(128, 256, k)),
        replace(base, tile=(128, 128, k), scheduler="pingpong", wave=(1, 1), persistent=True),
    ]
    return with_clusters(found, [(1, 1), (1, 2), (1, 4)])


def decode() -> list[Experiment]:
    return decode_candidates(Config()) + timed(panel_candidates(Config()), DECODE_128)


def narrow() -> list[Experiment]:
    """8-bit operands."""
    out = []
    for base in (replace(FP8, scale_a="none"), INT8):
        out += timed(large_candidates(base), SQUARES[0], SQUARES[1], LARGE[0])
        out += timed([c for c in small_candidates(base) if c.tile[2] == 128], SMALL)
        out += decode_candidates(base)
        out += timed([c for c in panel_candidates(base) if not c.stream], DECODE_128)
    promoted = replace(FP8, promote=4)
    candidates = [promoted, replace(promoted, scheduler="pingpong", wave=(1, 1), tile=(64, 128, 128))]
    return out + timed(with_clusters(candidates, [(1, 1), (2, 1)]), SQUARES[1])


def fused() -> list[Experiment]:
    """Bias and GELU beside cuBLAS and a separate kernel."""
    base = [COOPERATIVE, replace(COOPERATIVE, cluster=(2, 1)), PINGPONG, replace(PINGPONG, cluster=(2, 1))]
    return timed([replace(c, bias="bf16", unary="Gelu") for c in base], SQUARES[1], LARGE[0])


def turned() -> list[Experiment]:
    """The other layouts."""
    base = [COOPERATIVE, replace(COOPERATIVE, cluster=(2, 1)), PINGPONG, replace(PINGPONG, tile=(128, 128, 64))]
    return timed([replace(c, layout=layout) for layout in ("rrr", "crr", "ccr") for c in base], SQUARES[1])


def half() -> list[Experiment]:
    """fp16 on large problems."""
    return timed(large_candidates(Config(a="fp16", b="fp16", c="fp16"))[:15], *SQUARES)


def finalists(base: Config) -> list[Experiment]:
    """The best of each shape, with and without overlapping launches."""
    k = 128 // ELEMENT_BYTES[base.a]
    pingpong = replace(base, scheduler="pingpong", wave=(1, 1))
    once = replace(base, persistent=False)
    weights = replace(once, swap=True, wave=(1, 1))
    large = [
        replace(pingpong, tile=(128, 128, k)), replace(pingpong, tile=(128, 128, k), cluster=(1, 2)),
        replace(base, tile=(128, 256, k)), replace(pingpong, tile=(64, 256, k)),
    ]  # fmt: skip
    if base.c != "int32":
        large += with_clusters([replace(pingpong, tile=(128, 192, k))], [(1, 1), (2, 1)])
    tiny = [replace(once, tile=(128, 64, k)), replace(once, tile=(64, 128, k), wave=(1, 2))]
    few = [replace(weights, tile=(16, 64, 2 * k), split_k=2, cluster_k=2)]
    few += [replace(few[0], cluster_k=1)]
    some = [replace(weights, tile=(64, 64, 2 * k)), replace(weights, tile=(64, 64, k))]
    panel = [replace(once, tile=(128, 256, k)), replace(pingpong, tile=(128, 128, k), cluster=(1, 2))]
    out = timed(large, *SQUARES, *LARGE)
    both = [(tiny, SMALL), (few, DECODE_16), (some, DECODE_64), (panel, DECODE_128), (large[:3], SQUARES[0])]
    for configs, shape in both:
        out += [Experiment(c, shape, time=True, dependent=d) for c in configs for d in (False, True)]
    return out


def final() -> list[Experiment]:
    """All types, the first twice over: the clock of the GPU wanders with its temperature."""
    twice = finalists(Config()) + finalists(FP8) + finalists(INT8)
    return twice + finalists(Config(a="fp16", b="fp16", c="fp16")) + twice


def batched() -> list[Experiment]:
    """A batch of small products."""
    base = [COOPERATIVE, replace(PINGPONG, tile=(128, 128, 64)), PINGPONG]
    return [Experiment(config, SMALL, batch=16, time=True) for config in base]


def fuzz() -> list[Experiment]:
    """The kernels of ``correct`` on random sizes; the same ones every time."""
    random = Random(20)
    out = []
    for config in schedules() + layouts() + types() + epilogues():
        for _ in range(3):
            shape = (random.randint(1, 900), random.randint(1, 900), random.randint(1, 1200))
            batch = 1 if config.grouped else random.randint(1, 3)
            alpha = 1.0 if config.c == "int32" else random.choice([1.0, -0.75])
            out.append(Experiment(config, shape, batch=batch, alpha=alpha, guard=random.random() < 0.5))
    return out


def added() -> list[Experiment]:
    """A matrix D added on the way out, beside cuBLAS doing the same."""
    base = [COOPERATIVE, replace(COOPERATIVE, cluster=(2, 1)), PINGPONG, replace(PINGPONG, tile=(128, 128, 64))]
    return timed([replace(c, d=("bf16",), binary="Add") for c in base], SQUARES[1])


SUITES: dict[str, Callable[[], list[Experiment]]] = {
    "correct": correct, "wide": wide, "small": small, "decode": decode, "narrow": narrow, "fused": fused,
    "turned": turned, "half": half, "final": final, "added": added, "fuzz": fuzz, "batched": batched,
}  # fmt: skip
