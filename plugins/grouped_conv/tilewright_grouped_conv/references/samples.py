"""Small requests that show what the operations can do; the conformance test plans, builds, runs and checks them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["conv_samples", "transform_samples"]


def conv_samples(direction: Direction) -> Iterator[OperationRequest]:
    yield from _SAMPLES[direction]()


def _last(dtype: str, *shape: int) -> TensorDesc:
    """A tensor whose channels are neighbours."""
    return TensorDesc.of(dtype, shape, strides_in(Order.LAST, shape))


def _first(dtype: str, *shape: int) -> TensorDesc:
    return TensorDesc.of(dtype, shape)


def _forward() -> Iterator[OperationRequest]:
    def of(
        x: TensorDesc, w: TensorDesc, more: dict[str, TensorDesc] | None = None, **attributes: object
    ) -> OperationRequest:
        return OperationRequest("conv", {"x": x, "w": w, **(more or {})}, {}, attributes)  # type: ignore[arg-type]

    yield of(_last("fp32", 2, 8, 9, 7), _last("fp32", 12, 8, 3, 3), padding=1)
    yield of(_first("fp32", 2, 6, 8, 10), _first("fp32", 10, 3, 3, 3), groups=2, stride=2, padding=(1, 0, 2, 1))
    yield of(
        _last("bf16", 1, 16, 6, 6),
        _last("bf16", 24, 16, 1, 1),
        {"bias": TensorDesc.of("fp32", (24,)), "d[0]": _last("bf16", 1, 24, 6, 6)},
        unary="Relu",
        alpha=0.5,
    )
    yield of(_last("fp16", 2, 20, 9, 9), _last("fp16", 20, 1, 3, 3), groups=20, padding="same_upper")
    yield of(_last("fp32", 2, 5, 31), _last("fp32", 7, 5, 4), dilation=2)
    yield of(_last("fp32", 1, 4, 4, 6, 5), _last("fp32", 6, 4, 2, 3, 3), stride=(1, 2, 1), padding=1)
    yield of(_last("int8", 1, 16, 7, 7), _last("int8", 9, 16, 3, 3), padding=1)
    yield of(
        _last("fp8", 1, 32, 6, 6),
        _last("bf8", 16, 32, 3, 3),
        {"scale": TensorDesc.of("fp32", (16,))},
        padding=1,
    )


def _backward_data() -> Iterator[OperationRequest]:
    def of(
        dy: TensorDesc, w: TensorDesc, more: dict[str, TensorDesc] | None = None, **attributes: object
    ) -> OperationRequest:
        inputs = {"dy": dy, "w": w, **(more or {})}
        return OperationRequest("conv_backward_data", inputs, {}, attributes)  # type: ignore[arg-type]

    yield of(_last("fp32", 2, 12, 9, 7), _last("fp32", 12, 8, 3, 3), padding=1, input_size=(9, 7))
    yield of(_last("fp32", 2, 10, 4, 5), _last("fp32", 10, 3, 3, 3), groups=2, stride=2, padding=1, input_size=(8, 10))
    yield of(_first("fp32", 1, 6, 5, 5), _first("fp32", 6, 9, 1, 1), stride=2, input_size=(10, 9))
    yield of(
        _last("bf16", 1, 8, 6),
        _last("bf16", 8, 4, 3),
        {"acc": _last("bf16", 1, 4, 14)},
        stride=2,
        dilation=2,
        padding=1,
        input_size=14,
        accumulate=True,
    )
    yield of(_last("fp32", 1, 12, 7, 7), _last("fp32", 12, 1, 3, 3), groups=12, padding=1, input_size=(7, 7))


def _backward_weight() -> Iterator[OperationRequest]:
    def of(
        x: TensorDesc, dy: TensorDesc, more: dict[str, TensorDesc] | None = None, **attributes: object
    ) -> OperationRequest:
        inputs = {"x": x, "dy": dy, **(more or {})}
        return OperationRequest("conv_backward_weight", inputs, {}, attributes)  # type: ignore[arg-type]

    yield of(_last("fp32", 2, 8, 9, 7), _last("fp32", 2, 12, 9, 7), padding=1, filter_size=(3, 3))
    yield of(_last("bf16", 2, 6, 8, 10), _last("bf16", 2, 10, 4, 5), groups=2, stride=2, padding=1, filter_size=(3, 3))
    yield of(_first("fp32", 2, 6, 8, 10), _first("fp32", 2, 10, 8, 10), filter_size=(1, 1), split_k=3)
    yield of(
        _last("fp32", 3, 5, 31),
        _last("fp32", 3, 7, 25),
        {"acc": _last("fp32", 7, 5, 4)},
        dilation=2,
        filter_size=4,
        accumulate=True,
    )
    yield of(_last("fp32", 2, 12, 7, 7), _last("fp32", 2, 12, 7, 7), groups=12, padding=1, filter_size=(3, 3))


_SAMPLES = {
    Direction.FORWARD: _forward,
    Direction.BACKWARD_DATA: _backward_data,
    Direction.BACKWARD_WEIGHT: _backward_weight,
}


def transform_samples() -> Iterator[OperationRequest]:
    def of(dtype: str, to: str, kept: Sequence[int], sizes: Sequence[int]) -> OperationRequest:
        return OperationRequest("conv_transform", {"x": _first(dtype, *kept)}, {"out": _last(to, *sizes)})

    yield of("fp32", "fp32", (2, 5, 7, 9), (2, 8, 7, 9))
    yield of("fp16", "fp32", (2, 3, 31), (2, 3, 31))
    yield of("int8", "int8", (1, 3, 4, 5, 6), (1, 4, 4, 5, 6))
