"""Problems as rows of files and values of commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from tilewright_kit.commands.basic_family import BasicFamily
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["FAMILY", "RmsNormCase"]


@dataclasses.dataclass(frozen=True, slots=True)
class RmsNormCase:
    """Rows of fp32 numbers, each normalised by its root mean square."""

    family: ClassVar[str] = "rmsnorm"
    sizes_as_text: ClassVar[Sequence[str]] = ()
    depth: ClassVar[int] = 1
    roundings: ClassVar[int] = 1
    is_plain: ClassVar[bool] = False

    rows: int
    columns: int
    dtype: str = "fp32"

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.columns} {self.dtype}"

    @property
    def flops(self) -> int:
        return 4 * self.rows * self.columns

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def request(self) -> OperationRequest:
        shapes = {"x": (self.rows, self.columns), "weight": (self.columns,)}
        return OperationRequest("rmsnorm", {name: TensorDesc.of(self.dtype, shape) for name, shape in shapes.items()})


FAMILY = BasicFamily("rmsnorm", ("rmsnorm",), RmsNormCase, ("rows", "columns"), {"tiny": ({"rows": 3, "columns": 5},)})
