"""Kernels that planners propose for AMD GPUs, over problems of many kinds, and how they build: each one within its
registers. What one could not compile is not to be proposed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright_arch import ArchSpec
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import BuildFailedError, UnsupportedError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.build.toolchains.toolchain import Toolchain

__all__ = ["REQUESTS", "chosen", "faults", "proposed"]

Requests = Iterator[OperationRequest]
FLOATS = ("fp32", "fp16", "bf16")
LAYERS = (
    (32, 64, 64, 56, 3, 1, 1, 1), (32, 512, 512, 7, 3, 1, 1, 1), (32, 256, 64, 56, 1, 1, 0, 1),
    (32, 3, 64, 224, 7, 2, 3, 1), (32, 128, 256, 28, 3, 2, 1, 1), (8, 64, 64, 28, 3, 1, 1, 16),
    (8, 64, 64, 28, 5, 1, 2, 16), (8, 32, 32, 28, 7, 1, 3, 16), (32, 256, 256, 28, 3, 2, 1, 32),
    (32, 96, 96, 56, 3, 1, 1, 96),
)  # fmt: skip
"""Images, channels, outputs, size, taps, stride, padding, groups."""
HEADS = ((32, 32), (64, 64), (96, 128), (128, 128), (256, 256))


def products() -> Requests:
    """Large, small, few rows, a long K and odd sizes, in every type and layout."""
    sizes = ((4096, 4096, 4096), (1024, 1024, 1024), (16, 4096, 4096), (512, 512, 16384), (333, 777, 1111))
    types = (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp8", "bf16"), ("bf8", "fp16"), ("int8", "fp32"))
    for (m, n, k), (dtype, out), a, b in itertools.product(sizes, types, "rc", "rc"):
        inputs = {
            "a": TensorDesc.of(dtype, (m, k), (k, 1) if a == "r" else (1, m)),
            "b": TensorDesc.of(dtype, (k, n), (n, 1) if b == "r" else (1, k)),
        }
        yield OperationRequest("gemm", inputs, {}, {"out_dtype": out})


def convolutions(name: str) -> Requests:
    """Bodies and first layers, strides, small groups with filters of 3, 5 and 7, depthwise; channels last and first."""
    operands = {"conv": ("x", "w"), "conv_backward_data": ("dy", "w"), "conv_backward_weight": ("x", "dy")}[name]
    for (n, c, k, size, taps, stride, pad, groups), dtype, last in itertools.product(LAYERS, FLOATS, (True, False)):
        rows = (size + 2 * pad - taps) // stride + 1
        shapes = {"x": (n, c, size, size), "w": (k, c // groups, taps, taps), "dy": (n, k, rows, rows)}
        inputs = {item: TensorDesc.of(dtype, shapes[item], _strides(shapes[item], last)) for item in operands}
        attributes: dict[str, Any] = {"stride": stride, "padding": pad, "groups": groups}
        attributes |= {"input_size": (size, size)} if name == "conv_backward_data" else {}
        attributes |= {"filter_size": (taps, taps)} if name == "conv_backward_weight" else {}
        yield OperationRequest(name, inputs, {}, attributes)


def _strides(shape: tuple[int, ...], last: bool) -> tuple[int, ...]:
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c) if last else (c * h * w, h * w, w, 1)


def attentions(name: str) -> Requests:
    """Heads of all sizes, few and many queries, masks, and (of gradients) an order that is always the same."""
    backward = name == "attention_backward"
    masks: tuple[Mapping[str, Any], ...] = ({}, {"causal": True}, {"window_left": 64, "window_right": 0})
    for (q, v), dtype, rows, mask in itertools.product(HEADS, FLOATS, (1, 128, 4096), masks):
        if backward and rows == 1:
            continue
        sizes = {"q": (rows, q), "k": (4096, q), "v": (4096, v)}
        sizes |= {"o": (rows, v), "do": (rows, v)} if backward else {}
        inputs = {item: TensorDesc.of(dtype, (2, 8, *size)) for item, size in sizes.items()}
        if not backward:
            yield OperationRequest(name, inputs, {}, dict(mask))
            continue
        inputs["lse"] = TensorDesc.of("fp32", (2, 8, rows))
        for fixed in (False, True):
            yield OperationRequest(name, inputs, {}, {**mask, "deterministic": fixed})


REQUESTS: Mapping[str, Callable[[], Requests]] = {
    "gemm": products,
    "conv": lambda: convolutions("conv"),
    "conv_backward_data": lambda: convolutions("conv_backward_data"),
    "conv_backward_weight": lambda: convolutions("conv_backward_weight"),
    "attention": lambda: attentions("attention"),
    "attention_backward": lambda: attentions("attention_backward"),
}
"""Problems by operation."""


def proposed(
    operation: Operation[Any, Any], arch: ArchSpec, requests: Iterable[OperationRequest]
) -> list[KernelConfig]:
    """All candidates of the operation itself for the problems, each once, in their order."""
    found: dict[KernelConfig, None] = {}
    for request in requests:
        try:
            problem = operation.parse(request)
            candidates = operation.candidates(problem, device_of(arch))
        except UnsupportedError:
            continue  # a type that the arch has no instruction for
        found |= {config: None for config in candidates if config.operation == operation.name}
    return list(found)


def chosen(configs: Iterable[KernelConfig], count: int) -> list[KernelConfig]:
    """Some of them, always the same, by a hash of their names."""
    return sorted(configs, key=lambda item: hashlib.sha256(item.name.encode()).digest())[:count]


def faults(
    operation: Operation[Any, Any], configs: Sequence[KernelConfig], arch: ArchSpec, toolchain: Toolchain, folder: Path
) -> list[str]:
    """Why kernels do not build: the compiler refuses what spills and what does not fit."""
    found = []
    for number, config in enumerate(configs):
        room = folder / str(number)
        room.mkdir(parents=True)
        try:
            toolchain.compile(operation.generate(config, arch), room, arch)
        except BuildFailedError as error:
            found.append(f"{config.name}: {error.rule}: {error.log_tail[-300:]}")
    return found
