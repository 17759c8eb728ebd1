"""Problems as rows of files and values of commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tilewright_gemm.fusion import SCALES, ScaleBlock, scale_shapes
from tilewright_kit.commands.basic_family import BasicFamily
from tilewright_kit.commands.cases import DTYPES, Case, check_dtype, check_positive, read_case, wrong
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc
from tilewright_moe.declaration import Activation, ResultBlock
from tilewright_moe.problem import TURN
from tilewright_moe.reference import draw_counts

__all__ = ["FAMILY", "WORDS", "MoeCase"]

EIGHTS = ("fp8", "bf8", "mixed")
WORDS: Mapping[str, Sequence[str]] = {
    "scale_block": tuple(block.value for block in SCALES if block is not ScaleBlock.EXPONENTS),
    "activation": (Activation.SWIGLU.value,),
    "out_scale_block": (ResultBlock.ROWS.value,),
}
"""Columns of words, and those that they may hold."""
Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, slots=True)
class MoeCase:
    """Rows routed to experts at random, sorted by expert; or room for each expert's rows."""

    family: ClassVar[str] = "moe"
    sizes_as_text: ClassVar[Sequence[str]] = ()
    roundings: ClassVar[int] = 1
    is_plain: ClassVar[bool] = False

    rows: int
    """Rows of all experts; with ``room`` those that an expert has."""
    n: int
    k: int
    experts: int
    dtype: str = "fp32"
    room: int = 0
    """Rows that each expert has room for; 0: rows are sorted by expert."""
    out_dtype: str = ""
    scale_block: str = ""
    activation: str = ""
    out_scale_block: str = ""

    def checked(self, where: str) -> MoeCase:
        check_positive(self, where, ("rows", "n", "k", "experts"))
        check_dtype(self, where)
        if self.dtype == "int8":
            raise wrong(where, "dtype", self.dtype, "experts have no int8", "use fp32, fp16, bf16, fp8 or bf8")
        if self.room and self.rows > self.room:
            raise wrong(where, "rows", self.rows, f"an expert has room for {self.room} rows", "give more room")
        if self.scale_block and self.dtype not in EIGHTS:
            fix = f"set dtype to {' or '.join(EIGHTS)}"
            raise wrong(where, "scale_block", self.scale_block, "blocks have factors in 8-bit floats", fix)
        for name, words in WORDS.items():
            if (value := getattr(self, name)) not in ("", *words):
                raise wrong(where, name, value, "there is no such word", f"use {' or '.join(words)}")
        if self.activation and self.n % TURN:
            raise wrong(where, "n", self.n, f"a gate has turns of {TURN} columns", f"use a multiple of {TURN}")
        return self

    @property
    def label(self) -> str:
        form = f"room {self.room}, rows {self.rows}" if self.room else f"rows {self.rows}"
        steps = "".join(f", {getattr(self, name)}" for name in WORDS if getattr(self, name))
        return f"{self.experts} experts, {form}, {self.n}x{self.k} {self.dtype}{steps}"

    @property
    def lines(self) -> int:
        """Rows of an expert's weights: with a gate those of both projections."""
        return self.n * (2 if self.activation else 1)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.lines * self.k * (self.experts if self.room else 1)

    @property
    def depth(self) -> int:
        return self.k

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def request(self) -> OperationRequest:
        a, b = DTYPES[self.dtype]
        x = (self.experts, self.room, self.k) if self.room else (self.rows, self.k)
        inputs = {
            "x": TensorDesc.of(a, x),
            "w": TensorDesc.of(b, (self.experts, self.lines, self.k)),
            "counts": TensorDesc.of("int32", (self.experts,)),
        }
        words = ("out_dtype", *WORDS)
        attributes: dict[str, Any] = {name: getattr(self, name) for name in words if getattr(self, name)}
        if self.scale_block:
            of_x, of_w = scale_shapes(SCALES[ScaleBlock(self.scale_block)][1], x[-2], self.lines, self.k)
            inputs["scale_x"] = TensorDesc.of("fp32", (*x[:-2], *of_x))
            inputs["scale_w"] = TensorDesc.of("fp32", (self.experts, *of_w))
        return OperationRequest(
            "moe_gemm", inputs, {}, attributes | ({"expected_rows": self.rows} if self.room else {})
        )


class MoeFamily(BasicFamily):
    """Counts are drawn; results are compared where a row belongs to an expert, which without ``room`` all do."""

    def from_record(self, record: Mapping[str, Any], where: str, defaults: Mapping[str, Any] | None = None) -> Case:
        case: MoeCase = read_case(MoeCase, record, where, defaults, self.required)
        return case.checked(where)

    def settle(self, case: MoeCase, inputs: Mapping[str, Array], rng: np.random.Generator) -> None:
        inputs["counts"][...] = draw_counts(rng, case.experts, case.rows, bool(case.room))

    def peer_call(self, torch: Any, case: MoeCase, operands: Mapping[str, Any]) -> Callable[[], object]:
        """A product for each expert that has rows, whose numbers are known beforehand."""
        x, w, counts = operands["x"], operands["w"], [int(count) for count in operands["counts"].tolist()]
        if case.dtype in EIGHTS or case.activation or case.out_scale_block:
            raise NotImplementedError("PyTorch multiplies no 8-bit floats of experts, and has no steps behind products")
        firsts = [sum(counts[:expert]) for expert in range(len(counts))]

        def products() -> None:
            for expert, count in enumerate(counts):
                if count:
                    rows = x[expert, :count] if case.room else x[firsts[expert] : firsts[expert] + count]
                    torch.mm(rows, w[expert].T)

        return products


def _rows(*sizes: tuple[int, int, int, int]) -> tuple[Mapping[str, Any], ...]:
    return tuple(dict(zip(("rows", "n", "k", "experts"), size, strict=True)) for size in sizes)


FAMILY = MoeFamily(
    "moe",
    ("moe_gemm",),
    MoeCase,
    ("rows", "n", "k", "experts"),
    {
        "tiny": _rows((17, 24, 32, 3), (64, 16, 48, 4)),
        "top8of256": _rows(
            *((8 * tokens, n, k, 256) for tokens in (64, 256, 1024, 4096) for n, k in ((2048, 7168), (7168, 2048)))
        ),
    },
)
