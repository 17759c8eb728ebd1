"""Convolutions to test with: odd sizes, all numbers of axes, and requests of all three directions for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tilewright_grouped_conv.problem.layout import Order
from tilewright_grouped_conv.problem.operands import strides_in
from tilewright_grouped_conv.problem.sizes import output_size
from tilewright_grouped_conv.vocabulary import Direction
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

LAST, FIRST = Order.LAST, Order.FIRST
OPERATIONS = {
    Direction.FORWARD: "conv",
    Direction.BACKWARD_DATA: "conv_backward_data",
    Direction.BACKWARD_WEIGHT: "conv_backward_weight",
}


@dataclass(frozen=True)
class Case:
    """One convolution. ``padding``: begins, then ends, of every axis."""

    n: int
    c: int
    k: int
    groups: int
    size: tuple[int, ...]
    filter: tuple[int, ...]
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        ndim = len(self.size)
        for field, value, count in (("stride", 1, ndim), ("dilation", 1, ndim), ("padding", 0, 2 * ndim)):
            if not getattr(self, field):
                object.__setattr__(self, field, (value,) * count)

    def __str__(self) -> str:
        return self.name or f"{self.n}-{self.c}-{self.k}-g{self.groups}-{'x'.join(map(str, self.size))}"

    @property
    def ndim(self) -> int:
        return len(self.size)

    @property
    def output(self) -> tuple[int, ...]:
        begins, ends = self.padding[: self.ndim], self.padding[self.ndim :]
        each = zip(self.size, self.filter, self.stride, self.dilation, begins, ends, strict=True)
        return tuple(output_size(*numbers) for numbers in each)

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        x, y = (self.n, self.c, *self.size), (self.n, self.k, *self.output)
        w = (self.k, self.c // self.groups, *self.filter)
        return {"x": x, "dx": x, "w": w, "dw": w, "y": y, "dy": y}

    def tensor(self, name: str, dtype: str, order: Order = LAST) -> TensorDesc:
        shape = self.shapes()[name]
        return TensorDesc.of(dtype, shape, strides_in(order, shape))

    def request(
        self,
        direction: Direction,
        dtype: str = "fp32",
        order: Order = LAST,
        *,
        other: str = "",
        more: dict[str, TensorDesc] | None = None,
        outputs: dict[str, TensorDesc] | None = None,
        **attributes: Any,
    ) -> OperationRequest:
        """A request with all tensors of one order; ``other`` is the type of the second operand."""
        first, second = {"fwd": ("x", "w"), "bwd_data": ("dy", "w"), "bwd_weight": ("x", "dy")}[direction.value]
        inputs = {first: self.tensor(first, dtype, order), second: self.tensor(second, other or dtype, order)}
        inputs |= more or {}
        if direction is Direction.BACKWARD_DATA and not outputs:
            attributes.setdefault("input_size", self.size)
        if direction is Direction.BACKWARD_WEIGHT and not outputs:
            attributes.setdefault("filter_size", self.filter)
        given = {"stride": self.stride, "dilation": self.dilation, "padding": self.padding, "groups": self.groups}
        return OperationRequest(OPERATIONS[direction], inputs, outputs or {}, given | attributes)


SMALL = (
    Case(2, 5, 7, 1, (23,), (4,), dilation=(2,), padding=(1, 2), name="1d"),
    Case(3, 6, 10, 2, (17,), (3,), stride=(2,), padding=(2, 0), name="1d-strided-groups"),
    Case(2, 8, 12, 1, (9, 7), (3, 3), padding=(1, 1, 1, 1), name="2d"),
    Case(1, 3, 5, 1, (11, 13), (5, 4), stride=(2, 3), padding=(2, 1, 0, 3), name="2d-first-layer"),
    Case(2, 15, 10, 5, (8, 10), (2, 3), stride=(3, 4), dilation=(2, 1), padding=(0, 1, 2, 0), name="2d-stride-above"),
    Case(2, 9, 9, 9, (10, 9), (3, 3), padding=(1, 1, 1, 1), name="2d-depthwise"),
    Case(1, 6, 18, 6, (9, 12), (3, 2), stride=(2, 2), padding=(0, 1, 1, 1), name="2d-multiplier"),
    Case(2, 35, 34, 1, (6, 5), (1, 1), name="2d-pointwise"),
    Case(2, 20, 9, 1, (7, 9), (1, 1), stride=(2, 2), name="2d-pointwise-strided"),
    Case(3, 10, 6, 2, (5, 5), (5, 5), name="2d-one-output"),
    Case(1, 4, 6, 1, (4, 6, 5), (2, 3, 3), stride=(1, 2, 1), padding=(1, 0, 1, 0, 1, 1), name="3d"),
    Case(2, 6, 6, 3, (5, 4, 6), (3, 1, 2), dilation=(1, 1, 3), padding=(1, 0, 0, 2, 0, 2), name="3d-groups"),
)
