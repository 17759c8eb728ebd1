"""Products as rows of files.

C [batch, M, N] = activation(scale_a * scale_b * (A [batch, M, K] x B [batch, K, N]) + bias, D...). Scales of blocks are
the same for all products of a batch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt

from tilewright_gemm.config.block_scales import DTYPES as BLOCK_DTYPES
from tilewright_gemm.config.block_scales import SCALES, block_of, scale_shapes
from tilewright_gemm.config.int4 import DTYPES as INT4_DTYPES
from tilewright_gemm.config.int4 import SCALE_DTYPES, group_shape, packed_rows
from tilewright_gemm.vocabulary import BFormat, ScaleBlock
from tilewright_kit.commands.cases import (
    DTYPES,
    NO,
    YES,
    add_bias,
    check_dtype,
    check_positive,
    check_steps,
    check_words,
    float_output,
    step_attributes,
    wrong,
)
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["INT4", "LAYOUTS", "GemmCase"]

Array = npt.NDArray[Any]

LAYOUTS = ("rcr", "rrr", "crr", "ccr")
INT4 = tuple(f"{dtype}{zeros}" for zeros in ("", "z") for dtype in SCALE_DTYPES)
_GROUPS = re.compile(r"\d{1,9}(\+\d{1,9})*")


@dataclass(frozen=True, slots=True)
class GemmCase:
    """One product. ``batch`` 0 is a plain one."""

    family: ClassVar[str] = "gemm"
    sizes_as_text: ClassVar[Sequence[str]] = ()

    m: int
    n: int
    k: int
    dtype: str = "fp32"
    """Element type of A and B; ``mixed``: fp8 and bf8."""
    layout: str = "rcr"
    batch: int = 0
    out_dtype: str = ""
    """Empty: what the operation makes of ``dtype``."""
    bias: str = ""
    """Element type of a row that is added; ``yes`` is the type of C, or fp32 if that is whole numbers."""
    activation: str = ""
    d: int = 0
    """Number of D operands of C's shape."""
    binary: str = ""
    """Step that brings D operands in. Empty: they are added."""
    scale_a: str = ""
    """``tensor`` or ``row``."""
    scale_b: str = ""
    """``tensor`` or ``column``."""
    split_k: int = 0
    fast_accumulation: str = ""
    """``yes``: 8-bit floats may be summed with the fewer bits of the matrix unit."""
    alpha: str = ""
    """Factor of the product."""
    clamp: str = ""
    """``low:high``, either of which may be left out."""
    slope: str = ""
    """Factor below zero of ``LeakyRelu`` and ``Elu``."""
    groups: str = ""
    """Rows of each product of a grouped call, in the place of ``m``: ``128+64+0``."""
    scale_block: str = ""
    """Blocks of A and B that have a scale each: ``1x128_128x128``, ``1x128_1x128`` or ``1x32_1x32``."""
    int4: str = ""
    """B is 4-bit weights in groups of 128, with scales of this type: ``fp16``; ``fp16z`` with zero points."""
    packed: str = ""
    """``yes``: B is packed once, before the product."""

    def checked(self, where: str) -> GemmCase:
        check_positive(self, where, ("m", "n", "k"))
        check_dtype(self, where)
        if self.layout not in LAYOUTS:
            reason = f"there is no layout {self.layout!r}"
            raise wrong(where, "layout", self.layout, reason, f"use {', '.join(LAYOUTS)}")
        allowed = {"scale_a": ("", "tensor", "row"), "scale_b": ("", "tensor", "column")}
        for name, words in allowed.items():
            if getattr(self, name) not in words:
                fix = f"use {' or '.join(words[1:])}"
                raise wrong(where, name, getattr(self, name), "there is no such scale", fix)
        if self.scale_block:
            self._check_blocks(where)
        if self.int4:
            self._check_int4(where)
        check_words(self, where, dict.fromkeys(("fast_accumulation", "packed"), (*YES, *NO)))
        if self.is_packed and (self.groups or self.batch or self.int4 or self.scale_block):
            reason, fix = "only the B of a plain product is packed", "leave batch, groups, int4 and scale_block out"
            raise wrong(where, "packed", self.packed, reason, fix)
        check_steps(self, where)
        if self.groups and not _GROUPS.fullmatch(self.groups):
            fix = "write the rows of each product as 128+64+0"
            raise wrong(where, "groups", self.groups, "groups are no list of sizes", fix)
        if self.groups and self.batch:
            raise wrong(where, "groups", self.groups, "a group has no batch", "leave batch or groups out")
        return self

    def _check_blocks(self, where: str) -> None:
        words = [word.value for word in SCALES]
        if self.scale_block not in words:
            raise wrong(where, "scale_block", self.scale_block, "there are no such blocks", f"use {' or '.join(words)}")
        if self.scale_a or self.scale_b:
            reason, fix = "blocks have scales of their own", "leave scale_a and scale_b out, or scale_block"
            raise wrong(where, "scale_block", self.scale_block, reason, fix)
        if not {*DTYPES[self.dtype]} <= {item.value for item in BLOCK_DTYPES}:
            reason = f"blocks of {self.dtype} have no scales"
            raise wrong(where, "scale_block", self.scale_block, reason, "set dtype to fp8, bf8 or mixed")

    def _check_int4(self, where: str) -> None:
        if self.int4 not in INT4:
            raise wrong(where, "int4", self.int4, "4-bit weights have no such scales", f"use {', '.join(INT4)}")
        if self.scale_b or self.scale_block:
            reason = "4-bit weights have scales of their own"
            raise wrong(where, "int4", self.int4, reason, "leave scale_b and scale_block out, or int4")
        if self.dtype not in {item.value for item in INT4_DTYPES}:
            reason = f"4-bit weights are not multiplied with {self.dtype}"
            raise wrong(where, "int4", self.int4, reason, f"set dtype to {', '.join(INT4_DTYPES)}")
        if self.layout[1] != "c":
            raise wrong(where, "layout", self.layout, "4-bit weights lie by columns", "use rcr or ccr")

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each product of a grouped call; empty for a plain one."""
        return tuple(map(int, self.groups.split("+"))) if self.groups else ()

    @property
    def label(self) -> str:
        """For people: ``16 of 64x64x64 fp16 rcr +bias Gelu``."""
        size = f"{self.m}x{self.n}x{self.k}"
        if self.groups:
            size = f"{self.groups} x{self.n}x{self.k}"
        parts = [f"{self.batch} of {size}" if self.batch else size, self.dtype, self.layout]
        parts += [f"*{self.alpha}"] if self.alpha else []
        parts += [f"+{name}" for name in ("bias", "d", "scale_a", "scale_b") if getattr(self, name)]
        parts += [f"blocks {self.scale_block}"] if self.scale_block else []
        parts += [f"int4 {self.int4}"] if self.int4 else []
        parts += [f"out {self.out_dtype}"] if self.out_dtype else []
        parts += [self.activation] if self.activation else []
        parts += [f"slope {self.slope}"] if self.slope else []
        parts += [f"clamp {self.clamp}"] if self.clamp else []
        parts += ["fast"] if self.fast else []
        parts += ["packed"] if self.is_packed else []
        return " ".join(parts)

    @property
    def flops(self) -> int:
        rows = sum(self.rows) if self.groups else self.m * max(self.batch, 1)
        return 2 * rows * self.n * self.k

    @property
    def depth(self) -> int:
        return self.k

    @property
    def roundings(self) -> int:
        return 1

    @property
    def is_plain(self) -> bool:
        """True if C is the product and nothing else."""
        scaled = self.scale_a or self.scale_b or self.scale_block or self.int4 or self.alpha
        return not (self.bias or self.activation or self.d or scaled or self.clamp or self.groups)

    @property
    def fast(self) -> bool:
        """True if sums of 8-bit floats may have fewer bits."""
        return self.fast_accumulation.lower() in YES

    @property
    def is_packed(self) -> bool:
        return self.packed.lower() in YES

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def request(self) -> OperationRequest:
        """The request of this product, or of all products of a group."""
        if not self.groups:
            return self._product()
        found: dict[str, TensorDesc] = {}
        for place, rows in enumerate(self.rows):
            one = dataclasses.replace(self, m=rows, groups="")._product()
            for name, desc in one.inputs.items():
                base, bracket, index = name.partition("[")
                found[f"{base}[{place}]{bracket}{index}"] = desc
        attributes = {**one.attributes, "groups": len(self.rows)}
        return OperationRequest("gemm", found, {}, attributes)

    def _product(self) -> OperationRequest:
        a_type, b_type = DTYPES[self.dtype]
        lead = (self.batch,) if self.batch else ()
        inputs = {
            "a": self._matrix(a_type, self.m, self.k, self.layout[0]),
            "b": self._matrix(b_type, self.k, self.n, self.layout[1]),
        }
        add_bias(self, inputs, self.n)
        float_out = float_output(self.dtype, self.out_dtype)
        for index in range(self.d):
            inputs[f"d[{index}]"] = TensorDesc.of(float_out, (*lead, self.m, self.n))
        if self.scale_a:
            inputs["scale_a"] = TensorDesc.of("fp32", (self.m,) if self.scale_a == "row" else ())
        if self.scale_b:
            inputs["scale_b"] = TensorDesc.of("fp32", (self.n,) if self.scale_b == "column" else ())
        attributes = step_attributes(self)
        if self.scale_block:
            block = ScaleBlock(self.scale_block)
            shapes = scale_shapes(SCALES[block][1], self.m, self.n, self.k)
            own = block_of(SCALES[block][1]).dtype
            inputs |= {f"scale_{side}": TensorDesc.of(own, shape) for side, shape in zip("ab", shapes, strict=True)}
            attributes["scale_block"] = block.value
        if self.int4:
            groups = group_shape(self.n, self.k)
            inputs["b"] = self._matrix("int8", packed_rows(self.k), self.n, "c")
            inputs["scale_b"] = TensorDesc.of(self.int4.rstrip("z"), groups)
            if self.int4.endswith("z"):
                inputs["zero_b"] = TensorDesc.of("int8", groups)
            attributes["b_format"] = BFormat.INT4.value
        if self.fast:
            attributes["fast_accumulation"] = True
        return OperationRequest("gemm", inputs, {}, attributes)

    def _matrix(self, dtype: str, rows: int, columns: int, letter: str) -> TensorDesc:
        lead = (self.batch,) if self.batch else ()
        strides = (columns, 1) if letter == "r" else (1, rows)
        return TensorDesc.of(dtype, (*lead, rows, columns), (*((rows * columns,) if lead else ()), *strides))
