"""The operation ``gemm_pack_b``: B is packed once, kept by the caller or the server, and used by many products."""

from __future__ import annotations

from tilewright_gemm.config.packing import UNDECIDED, Packing, parse_packing
from tilewright_gemm.problem.attributes import known_names, refuse, take_dtype, take_int
from tilewright_gemm.problem.layout import layouts_of
from tilewright_gemm.problem.operands import TYPES_A, check_tensor
from tilewright_gemm.problem.problem import PackBProblem, View
from tilewright_gemm.vocabulary import is_pair
from tilewright_kit.contract.declaration import AttributeSpec, OperandSpec, ValueType
from tilewright_kit.contract.problem import Operand, OperationRequest, Role
from tilewright_kit.requests.attributes import element_type, integer
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["PACK_ATTRIBUTES", "PACK_OPERANDS", "parse_pack_b"]

M = integer("m", "Rows of the products to come, which the format is chosen for.", 128, 1, 2**31)
DTYPE_A = element_type("dtype_a", "Element type of `a` in the products to come.", TYPES_A, absent="that of `b`")
FORMAT = AttributeSpec(
    "format",
    "Packed format by name, such as `bpanel-fp32-nr32-vk1`.",
    (ValueType.TEXT,),
    absent="the planner chooses, and the reply's specification of `out` names it",
)
PACK_ATTRIBUTES = (M, DTYPE_A, FORMAT)
PACK_OPERANDS = (
    OperandSpec(
        "b", Role.INPUT, "Matrix to pack.", ("[K, N]",), (2, 2), TYPES_A,
        constraint="One of its dimensions has neighbours as its elements (stride 1).",
    ),
    OperandSpec(
        "out", Role.OUTPUT, "Packed matrix.", ("[K, N]",), (2, 2), TYPES_A,
        constraint="Described by a packed format and its bytes, or left to the planner.",
    ),
)  # fmt: skip


def parse_pack_b(request: OperationRequest) -> PackBProblem:
    """Check a request to pack ``b`` [K, N]. Attributes: ``m`` (rows to plan for), ``dtype_a`` (default: B's type),
    ``format``.

    Without ``format`` the planner chooses one, and the plan's operands say which. Raises ``InvalidArgumentError``.
    """
    known_names(request.attributes, PACK_ATTRIBUTES)
    for name, desc in (*request.inputs.items(), *request.outputs.items()):
        check_tensor(name, desc)
    if set(request.inputs) != {"b"} or not set(request.outputs) <= {"out"}:
        named = next((name for name in (*request.inputs, *request.outputs) if name not in ("b", "out")), "b")
        raise refuse(
            "gemm_pack_b takes the input b and writes out", str(named), named, "operand_known", "give exactly b"
        )
    b = request.inputs["b"]
    if len(b.shape) != 2 or b.packing:
        raise refuse("b must be a plain matrix", "b.shape", b.shape, "matrix_rank", "pack one matrix [K, N] at a time")
    dtype_a = take_dtype(request.attributes, DTYPE_A) or b.dtype
    if not is_pair(dtype_a, b.dtype):
        raise refuse(
            f"there is no GEMM of {dtype_a} with {b.dtype}",
            "b.dtype",
            b.dtype.value,
            "dtype_pair",
            "convert b, or name the type of A in dtype_a",
        )
    k, n = b.shape
    packing = _wanted_format(request, k, n)
    strides = [stride if size > 1 else 0 for size, stride in zip(b.shape, b.strides, strict=True)]
    letters = layouts_of(k, n, strides[0], strides[1], "c") if b.size else "c"
    if not letters:
        raise refuse(
            "b has unit stride in neither dimension",
            "b.strides",
            b.strides,
            "unit_stride",
            "make a contiguous copy of it",
        )
    out = TensorDesc(
        b.dtype,
        (k, n),
        (),
        packing=str(packing) if packing else UNDECIDED,
        packed_bytes=packing.nbytes(k, n) if packing else 0,
    )
    return PackBProblem(
        dtype_a=dtype_a,
        dtype_b=b.dtype,
        layout=f"r{letters[0]}r",
        m=take_int(request.attributes, M),
        n=n,
        k=k,
        b=View("b", strides[0], strides[1]),
        tensors=(Operand("b", b, Role.INPUT), Operand("out", out, Role.OUTPUT)),
        packing=packing,
    )


def _wanted_format(request: OperationRequest, k: int, n: int) -> Packing | None:
    text = request.attributes.get(FORMAT.name, "")
    if not isinstance(text, str):
        raise refuse(
            "format must be text",
            "attributes.format",
            text,
            "attribute_type",
            "give a format such as bpanel-fp32-nr32-vk1",
        )
    wanted = parse_packing(text, "out") if text else None
    out = request.outputs.get("out")
    if out is None or out.packing in ("", UNDECIDED):
        if out is not None and out.shape != (k, n):
            raise refuse(
                "out has another shape than b", "out.shape", out.shape, "output_shape", f"give the shape {[k, n]}"
            )
        return wanted
    given = parse_packing(out.packing, "out")
    if wanted is not None and given != wanted:
        raise refuse(
            "out is in another format than asked for", "out.packing", out.packing, "packing_format", "leave format out"
        )
    if out.shape != (k, n) or out.packed_bytes != given.nbytes(k, n) or not isinstance(out.dtype, DType):
        raise refuse(
            "out does not fit b",
            "out.packed_bytes",
            out.packed_bytes,
            "packed_size",
            f"give shape {[k, n]} and {given.nbytes(k, n)} bytes",
        )
    return given
