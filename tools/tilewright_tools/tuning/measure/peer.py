"""The same problem by another library, on the same device under the same conditions: PyTorch, where it is installed.

What it is asked is the family's to say; activations and other epilogues are left out, which favours the peer.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewright_kit.commands.cases import Case
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.types.errors import UnsupportedError
from tilewright_tools.tuning.measure.timing import Timing, TimingOptions, measure
from tilewright_tools.tuning.problems.families import family_named

__all__ = ["PEERS", "time_peer"]

PEERS = ("torch",)
_GPUS = ("cuda", "hip")
"""Kinds of device that torch can be made for, by the names that ``torch.version`` has for them too."""
_TYPES = {
    "float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "int8", "int32": "int32",
    "float8_e4m3fn": "float8_e4m3fn", "float8_e5m2": "float8_e5m2",
}  # fmt: skip


def time_peer(
    name: str,
    device: DeviceInfo,
    case: Case,
    inputs: Mapping[str, npt.NDArray[Any]],
    options: TimingOptions,
    copies: int,
) -> tuple[Timing | None, str]:
    """The peer's time, or None and why there is none. Raises ``UnsupportedError`` for an unknown peer."""
    if name not in PEERS:
        raise UnsupportedError("there is no such peer", field="peer", value=name, rule="peer", fix="use torch")
    if importlib.util.find_spec("torch") is None:
        return None, "torch is not installed"
    torch = importlib.import_module("torch")
    if device.kind not in ("cpu", *_GPUS):
        return None, f"torch is not asked on {device.kind}"
    if device.kind != "cpu" and not _is_for(torch, device.kind):
        return None, f"torch has no {device.kind} here"
    try:
        return _time(torch, device, case, inputs, options, copies), ""
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return None, f"torch cannot do {case.label}: {str(error).splitlines()[0][:160]}"
    finally:
        # What torch keeps for itself is missed by the next problem's operands.
        if device.kind != "cpu" and _is_for(torch, device.kind):
            torch.cuda.empty_cache()


def _is_for(torch: Any, kind: str) -> bool:
    """True if it was made for that kind of GPU, and finds one."""
    return bool(torch.cuda.is_available()) and getattr(torch.version, kind, None) is not None


def _time(
    torch: Any,
    device: DeviceInfo,
    case: Case,
    inputs: Mapping[str, npt.NDArray[Any]],
    options: TimingOptions,
    copies: int,
) -> Timing:
    # Torch made for ROCm calls its devices as the one for CUDA does.
    place = "cpu" if device.kind == "cpu" else f"cuda:{device.id.rpartition(':')[2]}"
    if place == "cpu":
        torch.set_num_threads(max(device.units, 1))
    else:
        torch.cuda.set_device(place)
    family = family_named(case.family)
    calls = [
        family.peer_call(torch, case, {name: _tensor(torch, array, place) for name, array in inputs.items()})
        for _ in range(copies)
    ]
    timed = _on_host(calls) if place == "cpu" or options.timer == "host" else _on_cuda(torch, calls)
    if place != "cpu":
        torch.cuda.synchronize(place)
    return measure(timed, options, turns=copies)


def _tensor(torch: Any, array: npt.NDArray[Any], place: str) -> Any:
    """In the same order of memory as ours: a column-major matrix, or a channels-last image, stays one."""
    order = sorted(range(array.ndim), key=lambda axis: (-array.strides[axis], axis))
    plain = np.ascontiguousarray(array.transpose(order)).reshape([array.shape[axis] for axis in order])
    bits = {1: np.int8, 2: np.int16, 4: np.int32}[array.itemsize]
    tensor = torch.from_numpy(plain.view(bits)).to(place).view(getattr(torch, _TYPES[array.dtype.name]))
    return tensor.permute([order.index(axis) for axis in range(array.ndim)])


def _on_host(calls: list[Callable[[], object]]) -> Callable[[int], float]:
    def run(repeat: int) -> float:
        begun = time.perf_counter_ns()
        for _ in range(repeat):
            for call in calls:
                call()
        return (time.perf_counter_ns() - begun) / (repeat * len(calls))

    return run


def _on_cuda(torch: Any, calls: list[Callable[[], object]]) -> Callable[[int], float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay = _graph(torch, calls)

    def run(repeat: int) -> float:
        begin.record()
        for _ in range(repeat):
            replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6 / (repeat * len(calls))

    return run


def _graph(torch: Any, calls: list[Callable[[], object]]) -> Callable[[], object]:
    """All calls as one CUDA graph, so that small kernels do not wait for Python; one after the other if they cannot be
    captured."""

    def plainly() -> None:
        for call in calls:
            call()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # libraries make their workspaces at the first call, which cannot be captured
        plainly()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            plainly()
    except RuntimeError:
        torch.cuda.synchronize()
        return plainly
    replay: Callable[[], object] = graph.replay
    return replay
