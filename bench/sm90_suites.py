"""The experiments of sm90_check.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sm90_config import Config

__all__ = ["SUITES", "Experiment"]


@dataclass(frozen=True)
class Experiment:
    """One kernel on one problem: always checked, timed if ``time``."""

    config: Config
    shape: tuple[int, int, int]
    batch: int = 1
    alpha: float = 1.0
    guard: bool = False
    time: bool = False
    dependent: bool = False


COOPERATIVE = Config()
PINGPONG = Config(scheduler="pingpong", wave=(1, 1), tile=(64, 256, 64))
DECODE = Config(tile=(16, 64, 128), wave=(1, 1), swap=True, persistent=False)


def correct() -> list[Experiment]:
    """Every feature, small and odd sizes, poisoned outputs, gaps between rows."""
    eight = Config(a="fp8", b="fp8", tile=(128, 128, 128))
    integers = Config(a="int8", b="int8", c="int32", tile=(128, 128, 128))
    configs = [
        COOPERATIVE, PINGPONG, DECODE, replace(COOPERATIVE, epilogue="default"),
        Config(scheduler="pingpong", wave=(1, 1), tile=(128, 128, 64), cluster=(2, 1)),
        Config(tile=(256, 128, 64), cluster=(1, 2)), Config(tile=(128, 256, 64), cluster=(2, 1)),
        Config(tile=(128, 128, 64), cluster=(2, 2), persistent=False), Config(tile=(256, 192, 64)),
        Config(tile=(128, 224, 64), epilogue="default"), Config(tile=(64, 256, 64), wave=(1, 2)),
        Config(tile=(192, 128, 64), wave=(3, 1)), Config(tile=(256, 128, 64), wave=(4, 1)),
        Config(tile=(128, 128, 64), split_k=3), Config(tile=(128, 128, 64), split_k=2, cluster=(2, 1)),
        replace(PINGPONG, split_k=2, tile=(64, 128, 64)), replace(COOPERATIVE, stream=True),
        Config(tile=(128, 128, 64), stream=True, cluster=(2, 1)), replace(DECODE, split_k=4),
        replace(DECODE, tile=(24, 128, 64), wave=(1, 2)), replace(DECODE, epilogue="default"),
        replace(DECODE, tile=(64, 128, 64), wave=(1, 2), cluster=(1, 2)), replace(DECODE, tile=(40, 128, 128)),
        replace(DECODE, tile=(8, 64, 128), c="fp32"), replace(DECODE, tile=(64, 128, 64), c="fp32", epilogue="default"),
        Config(layout="rrr"), Config(layout="crr"), Config(layout="ccr", cluster=(2, 1)),
        Config(layout="rrr", tile=(128, 128, 64), cluster=(2, 1)), Config(layout="crr", tile=(256, 128, 64), cluster=(1, 2)),
        replace(DECODE, layout="ccr", tile=(64, 64, 64)), replace(DECODE, layout="rrr", tile=(16, 128, 64)),
        Config(a="fp16", b="fp16", c="fp16"), Config(a="fp16", b="fp16", c="fp32"),
        eight, replace(eight, b="bf8"), replace(eight, a="bf8"), replace(eight, a="bf8", b="bf8", c="fp16"),
        replace(eight, promote=4), replace(eight, promote=8, scheduler="pingpong", wave=(1, 1), tile=(64, 128, 128)),
        replace(eight, scale_a="row", scale_b="column"), replace(eight, scale_a="tensor", scale_b="tensor"),
        replace(eight, swap=True, tile=(16, 64, 128), wave=(1, 1), split_k=2, a="bf8", scale_a="row", scale_b="column"),
        integers, replace(integers, epilogue="default"), replace(integers, c="bf16", scale_a="row", scale_b="column"),
        replace(integers, split_k=2), replace(integers, swap=True, tile=(16, 64, 128), wave=(1, 1)),
        Config(bias="bf16", unary="Gelu"), Config(bias="fp32", unary="FastGelu", epilogue="default"),
        Config(d=("bf16",), binary="Add"), Config(d=("bf16", "fp32"), binary="Multiply", tile=(128, 128, 64)),
        replace(DECODE, bias="bf16", unary="Silu", d=("bf16",), binary="Add"), Config(grouped=True),
        replace(PINGPONG, grouped=True, cluster=(2, 1)), replace(DECODE, grouped=True, split_k=2),
    ]  # fmt: skip
    out = []
    for config in configs:
        for shape in ((512, 1024, 512), (333, 777, 200), (130, 24, 1040)):
            out.append(Experiment(config, shape, guard=True, alpha=1.0 if config.c == "int32" else 0.5))
        out.append(Experiment(config, (77, 136, 0)))
        if not config.grouped:
            out.append(Experiment(config, (200, 264, 192), batch=3, guard=True))
    return out


SQUARE = [(1024,) * 3, (2048,) * 3, (4096,) * 3, (8192,) * 3]
LARGE = [(4096, 14336, 4096), (8192, 8192, 28672)]


def speed() -> list[Experiment]:
    """A first look: every schedule on the shapes it is meant for."""
    big = [
        COOPERATIVE, replace(COOPERATIVE, cluster=(2, 1)), replace(COOPERATIVE, cluster=(1, 2)),
        Config(tile=(256, 128, 64)), Config(tile=(256, 128, 64), cluster=(2, 1)), Config(tile=(256, 128, 64), cluster=(1, 2)),
        Config(tile=(256, 192, 64)), Config(tile=(256, 192, 64), cluster=(2, 1)),
        PINGPONG, replace(PINGPONG, cluster=(2, 1)), replace(PINGPONG, cluster=(4, 1)),
        Config(scheduler="pingpong", wave=(1, 1), tile=(128, 128, 64), cluster=(2, 1)),
        Config(scheduler="pingpong", wave=(1, 1), tile=(128, 128, 64), cluster=(1, 2)),
    ]  # fmt: skip
    out = [Experiment(c, s, time=True) for s in SQUARE[1:] + LARGE for c in big]
    small = [
        Config(tile=(128, 64, 64), cluster=(2, 1), persistent=False), Config(tile=(128, 64, 64), cluster=(1, 2), persistent=False),
        Config(tile=(128, 64, 64), cluster=(1, 4), persistent=False), Config(tile=(128, 64, 64), cluster=(2, 2), persistent=False),
        Config(tile=(128, 64, 128), cluster=(1, 2), persistent=False),
        Config(tile=(128, 128, 64), split_k=2, persistent=False, cluster=(2, 1)),
        Config(tile=(128, 256, 64), split_k=4, persistent=False), Config(tile=(128, 128, 64), stream=True, cluster=(2, 1)),
        Config(tile=(64, 128, 64), wave=(1, 2), persistent=False, cluster=(2, 1)),
    ]  # fmt: skip
    out += [Experiment(c, SQUARE[0], time=True) for c in small]
    out += [Experiment(small[0], SQUARE[0], time=True, dependent=True)]
    return out + decode() + narrow() + fused()


def decode() -> list[Experiment]:
    """Few rows: the weights' bytes decide."""
    out = []
    for config in (
        replace(DECODE, split_k=2), replace(DECODE, split_k=2, tile=(16, 64, 64)), replace(DECODE, split_k=4, tile=(16, 128, 64), wave=(1, 2)),
        replace(DECODE, split_k=2, tile=(16, 64, 256)), replace(DECODE, split_k=4, tile=(16, 128, 128)), replace(DECODE, split_k=4, persistent=True),
    ):  # fmt: skip
        out.append(Experiment(config, (16, 4096, 4096), time=True))
    out.append(Experiment(replace(DECODE, split_k=2), (16, 4096, 4096), time=True, dependent=True))
    for config in (
        replace(DECODE, tile=(64, 64, 64)), replace(DECODE, tile=(64, 64, 128)), replace(DECODE, tile=(64, 64, 128), cluster=(1, 2)),
        replace(DECODE, tile=(64, 64, 128), cluster=(1, 4)), replace(DECODE, tile=(64, 128, 64), wave=(1, 2), split_k=2, cluster=(1, 2)),
    ):  # fmt: skip
        out.append(Experiment(config, (64, 8192, 8192), time=True))
    for config in (
        Config(tile=(128, 224, 64), epilogue="default", persistent=False), Config(tile=(128, 256, 64), persistent=False),
        Config(tile=(128, 224, 64), epilogue="default", cluster=(1, 2), persistent=False),
        Config(tile=(128, 256, 64), stream=True), Config(tile=(128, 128, 64), cluster=(1, 2)), Config(tile=(128, 192, 64), cluster=(1, 2)),
        Config(tile=(128, 256, 64), swap=True, wave=(1, 2), persistent=False),
    ):  # fmt: skip
        out.append(Experiment(config, (128, 28672, 4096), time=True))
    return out


def narrow() -> list[Experiment]:
    """8-bit operands."""
    out = []
    for dtype, c in (("fp8", "bf16"), ("int8", "int32")):
        base = Config(a=dtype, b=dtype, c=c, tile=(128, 256, 128))
        for shape in (SQUARE[1], SQUARE[2], SQUARE[3], LARGE[0]):
            for config in (
                base, replace(base, cluster=(2, 1)), replace(base, tile=(256, 128, 128), cluster=(1, 2)),
                replace(base, scheduler="pingpong", wave=(1, 1), tile=(64, 256, 128), cluster=(2, 1)),
                replace(base, scheduler="pingpong", wave=(1, 1), tile=(128, 128, 128), cluster=(2, 1)),
            ):  # fmt: skip
                out.append(Experiment(config, shape, time=True))
    promoted = Config(a="fp8", b="fp8", tile=(128, 128, 128), promote=4)
    out.append(Experiment(promoted, SQUARE[2], time=True))
    out.append(
        Experiment(
            replace(promoted, scheduler="pingpong", wave=(1, 1), tile=(64, 128, 128), cluster=(2, 1)),
            SQUARE[2],
            time=True,
        )
    )
    return out


def fused() -> list[Experiment]:
    """Bias and GELU beside cuBLAS and a separate kernel."""
    gelu = replace(COOPERATIVE, bias="bf16", unary="Gelu", cluster=(2, 1))
    return [
        Experiment(gelu, SQUARE[2], time=True),
        Experiment(replace(PINGPONG, bias="bf16", unary="Gelu", cluster=(2, 1)), SQUARE[2], time=True),
        Experiment(gelu, LARGE[0], time=True),
    ]


SUITES: dict[str, Callable[[], list[Experiment]]] = {
    "correct": correct, "speed": speed, "decode": decode, "narrow": narrow, "fused": fused,
}  # fmt: skip
