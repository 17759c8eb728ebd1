"""The convolutions of `tilewright demo`: layers of networks in every direction, checked, and timed beside NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tilewright_tools.cli.demo.demo_rows import Row, best_of
from tilewright_tools.cli.problems import cases, conv_cases, running

if TYPE_CHECKING:
    import numpy.typing as npt

    import tilewright
    from tilewright_tools.tuning.problems.families.conv import ConvCase

    Array = npt.NDArray[Any]

__all__ = ["LAYERS", "conv_row", "layer_cases", "numpy_conv"]

_ALL = conv_cases.DIRECTIONS
LAYERS: tuple[tuple[str, dict[str, Any], tuple[tuple[str, str], ...]], ...] = (
    (
        "ResNet 3x3",
        {"n": 2, "c": 64, "k": 64, "size": "56x56", "filter": "3", "padding": "1"},
        (*((dtype, way) for dtype in ("fp32", "bf16") for way in _ALL), ("fp16", "fwd"), ("int8", "fwd")),
    ),
    ("ResNet 1x1", {"n": 2, "c": 256, "k": 64, "size": "56x56", "filter": "1"}, (("fp32", "fwd"), ("bf16", "fwd"))),
    (
        "ResNet 3x3 NCHW",
        {"n": 2, "c": 64, "k": 64, "size": "56x56", "filter": "3", "padding": "1", "layout": "channels_first"},
        (("fp32", "fwd"),),
    ),
    (
        "ResNeXt 32 groups",
        {"n": 2, "c": 128, "k": 128, "size": "56x56", "filter": "3", "padding": "1", "groups": 32},
        tuple(("fp32", way) for way in _ALL),
    ),
    (
        "MobileNet depthwise",
        {"n": 2, "c": 96, "k": 96, "size": "56x56", "filter": "3", "padding": "1", "groups": 96},
        tuple(("fp32", way) for way in _ALL),
    ),
    (
        "3D 3x3x3",
        {"n": 1, "c": 32, "k": 32, "size": "8x28x28", "filter": "3", "padding": "1"},
        tuple(("fp32", way) for way in _ALL),
    ),
)
"""Name, geometry, and the element types and directions that are shown."""


def layer_cases() -> list[tuple[str, ConvCase]]:
    """What is shown, in order, with what it is called."""
    return [
        (f"{name} {dtype} {way}", conv_cases.case_of(**geometry, dtype=dtype, direction=way))
        for name, geometry, shown in LAYERS
        for dtype, way in shown
    ]


def conv_row(client: tilewright.Client, what: str, case: ConvCase, device: str | None) -> Row:
    """Run a layer through the service, check what its plan wrote, and time it beside NumPy."""
    operation, problem, request = conv_cases.load(case)
    inputs: dict[str, Any] = conv_cases.operands(client, request)
    ((name, out),) = client.run(case.operation, inputs, attributes=request.attributes, device=device).items()
    report = client.report
    assert report is not None
    plan = client.plan(case.operation, inputs, {name: out}, request.attributes, device=device)
    running.poison(out)  # what is checked is what the plan writes
    plan(**inputs, out=out)
    found = cases.check(out, conv_cases.truth(operation, problem, inputs), case.depth)
    seconds, numpy_seconds = best_of(plan.bind(**inputs, out=out), numpy_conv(case, inputs))
    kernel = report.kernels[-1] if report.kernels else ""
    return Row(what, kernel, seconds, numpy_seconds, case.flops, found)


def numpy_conv(case: ConvCase, inputs: dict[str, Array]) -> Callable[[], Array]:
    """The same in float32 NumPy, channels last, as one product for each tap: the fastest way there without a compiler.

    For filters with stride 1 and equal pads. The call returns its result as [N, *out, K], [N, *in, C] or
    [G, taps, K / G, C / G].
    """
    import itertools

    import numpy as np

    groups, pads = case.groups, case.pads[0]
    taps = list(itertools.product(*map(range, case.filters)))
    edge = [(0, 0), *((pad, pad) for pad in pads), (0, 0)]
    last = {name: np.ascontiguousarray(np.moveaxis(array.astype(np.float32), 1, -1)) for name, array in inputs.items()}
    size = case.outputs

    def grouped(pixels: Array) -> Array:
        """[..., channels] as [G, pixels, channels / G]."""
        found: Array = pixels.reshape(-1, groups, pixels.shape[-1] // groups).swapaxes(0, 1)
        return found

    def window_of(padded: Array, begins: tuple[int, ...], sizes: tuple[int, ...]) -> Array:
        place = (slice(None), *(slice(at, at + n) for at, n in zip(begins, sizes, strict=True)))
        found: Array = padded[place]
        return found

    def window(padded: Array, tap: tuple[int, ...]) -> Array:
        return window_of(padded, tap, size)

    def weights(tap: tuple[int, ...]) -> Array:
        """[G, K / G, C / G]."""
        at: Array = np.moveaxis(last["w"], 0, -2)[tap]
        return at.reshape(groups, -1, at.shape[-1])

    def forward() -> Array:
        padded = np.pad(last["x"], edge)
        total: Any = sum(grouped(window(padded, tap)) @ weights(tap).swapaxes(1, 2) for tap in taps)
        found: Array = total.swapaxes(0, 1).reshape(case.n, *size, case.k)
        return found

    def backward_data() -> Array:
        dx = np.zeros((case.n, *(n + 2 * pad for n, pad in zip(case.sizes, pads, strict=True)), case.c), np.float32)
        dy = grouped(last["dy"])
        for tap in taps:
            part = window(dx, tap)
            part += (dy @ weights(tap)).swapaxes(0, 1).reshape(case.n, *size, case.c)
        return window_of(dx, pads, case.sizes)

    def backward_weight() -> Array:
        padded, dy = np.pad(last["x"], edge), grouped(last["dy"]).swapaxes(1, 2)
        found: Array = np.stack([dy @ grouped(window(padded, tap)) for tap in taps], 1)
        return found

    return {"fwd": forward, "bwd_data": backward_data, "bwd_weight": backward_weight}[case.direction]
