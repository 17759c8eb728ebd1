"""Operands and attributes of ``moe_gemm``."""

from __future__ import annotations

from tilewright_gemm.fusion import output_dtypes
from tilewright_kit.contract.declaration import Declaration, Example, OperandSpec
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.requests.attributes import ALIGNMENT, flag, integer
from tilewright_kit.requests.products import ALPHA, FAST_ACCUMULATION, OUT_DTYPE
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["ATTRIBUTES", "DTYPES", "EXPECTED_ROWS", "INPUTS", "MOE_GEMM", "OUTPUTS", "RETURN_STATUS"]

DTYPES = (DType.FP32, DType.FP16, DType.BF16, DType.FP8, DType.BF8)

EXPECTED_ROWS = integer(
    "expected_rows",
    "Rows that an expert is expected to have, for the choice of a kernel; any number of rows is computed.",
    0,
    unit="rows",
    constraint="0: the rows of `x` shared out evenly; with three dimensions of `x`, all that an expert has room for.",
)
RETURN_STATUS = flag("return_status", "Return what kernels found wrong with `counts` as the output `status`.")
ATTRIBUTES = (ALPHA, OUT_DTYPE, EXPECTED_ROWS, RETURN_STATUS, ALIGNMENT, FAST_ACCUMULATION)

_ROWS, _ROOM = "[T, K]", "[E, R, K]"
OPERANDS = (
    OperandSpec(
        "x", Role.INPUT, "Rows of all experts, those of an expert one after the other; or room for R rows of each.",
        (_ROWS, _ROOM), (2, 3), DTYPES, constraint="The last dimension has stride 1; the others may have any stride.",
    ),
    OperandSpec(
        "w", Role.INPUT, "Weights of each expert.", ("[E, N, K]",), (3, 3), DTYPES,
        constraint="N or K has stride 1. Of the type of `x`, or fp8 beside bf8.",
    ),
    OperandSpec(
        "counts", Role.INPUT, "Rows of each expert, read by the kernel when it runs.", ("[E]",), (1, 1), (DType.INT32,),
        constraint="From 0 to R; without R their sum is at most T. What is wrong is cut to what there is.",
    ),
    OperandSpec(
        "scale_x", Role.INPUT, "Factor of `x`.", ("[]", "[1]"), (0, 1), (DType.FP32,), optional=True,
    ),
    OperandSpec(
        "scale_w", Role.INPUT, "Factor of `w`: one number, or one for each expert.", ("[]", "[1]", "[E]"), (0, 1),
        (DType.FP32,), optional=True,
    ),
    OperandSpec(
        "out", Role.OUTPUT, "Results; rows of no expert stay as they were.", ("[T, N]", "[E, R, N]"), (2, 3),
        tuple(dict.fromkeys(item for dtype in DTYPES for item in output_dtypes(dtype))),
        constraint="The last dimension has stride 1. If it is not described, of the type of `x`, of fp16 for 8-bit "
        "floats.",
    ),
    OperandSpec(
        "status", Role.OUTPUT, "What kernels found wrong: bits, the first expert concerned, its count, 0.", ("[4]",),
        (1, 1), (DType.INT32,), optional=True,
    ),
)  # fmt: skip
INPUTS = tuple(item.name for item in OPERANDS if item.role is Role.INPUT)
OUTPUTS = tuple(item.name for item in OPERANDS if item.role is Role.OUTPUT)

_COUNTS = TensorDesc.of("int32", (8,))
MOE_GEMM = Declaration(
    "Products of a mixture of experts: each row of x times the weights of its expert, out = alpha * (x w[e]^T).",
    OPERANDS,
    ATTRIBUTES,
    (
        Example("Rows sorted by expert", OperationRequest(
            "moe_gemm",
            {"x": TensorDesc.of("bf16", (40, 64)), "w": TensorDesc.of("bf16", (8, 48, 64)), "counts": _COUNTS},
        )),
        Example("Room for 16 rows of each expert, 8-bit floats with a factor for each expert", OperationRequest(
            "moe_gemm",
            {"x": TensorDesc.of("fp8", (8, 16, 64)), "w": TensorDesc.of("fp8", (8, 48, 64)), "counts": _COUNTS,
             "scale_w": TensorDesc.of("fp32", (8,))},
            {}, {"out_dtype": "bf16", "expected_rows": 4},
        )),
    ),
    (
        "`counts` is an operand and not part of the plan: one plan, and one CUDA graph, serves any routing. In host "
        "memory it is checked before the launch. On a GPU nothing reads it before the kernel, which cuts it to the "
        "rows that there are and says so in `status`: 1 a negative count, 2 more rows than R, 4 more than T in all.",
    ),
)  # fmt: skip
