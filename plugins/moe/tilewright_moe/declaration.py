"""Operands and attributes of ``moe_gemm``."""

from __future__ import annotations

from tilewright_gemm.fusion import SCALES, ScaleBlock, output_dtypes
from tilewright_kit.contract.declaration import Declaration, Example, OperandSpec
from tilewright_kit.contract.problem import OperationRequest, Role
from tilewright_kit.requests.attributes import ALIGNMENT, flag, integer, word
from tilewright_kit.requests.products import ALPHA, FAST_ACCUMULATION, OUT_DTYPE
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc
from tilewright_kit.types.vocabulary import Word

__all__ = [
    "ACTIVATION",
    "ATTRIBUTES",
    "DTYPES",
    "EXPECTED_ROWS",
    "INPUTS",
    "MOE_GEMM",
    "OUTPUTS",
    "OUT_SCALE_BLOCK",
    "RETURN_STATUS",
    "SCALE_BLOCK",
    "Activation",
    "ResultBlock",
]

DTYPES = (DType.FP32, DType.FP16, DType.BF16, DType.FP8, DType.BF8)


class Activation(Word):
    """Steps that take both projections of an expert."""

    NONE = "none"
    SWIGLU = "swiglu"


class ResultBlock(Word):
    """Blocks of results, rows x columns, that share a factor."""

    NONE = "none"
    ROWS = "1x128"


EXPECTED_ROWS = integer(
    "expected_rows",
    "Rows that an expert is expected to have, for the choice of a kernel; any number of rows is computed.",
    0,
    unit="rows",
    constraint="0: the rows of `x` shared out evenly; with three dimensions of `x`, all that an expert has room for.",
)
RETURN_STATUS = flag("return_status", "Return what kernels found wrong with `counts` as the output `status`.")
SCALE_BLOCK = word(
    "scale_block",
    "Blocks of `x` (rows x k) and of `w` (columns x k) that `scale_x` and `scale_w` have a factor for each.",
    [ScaleBlock.NONE.value, *(item.value for item in SCALES if item is not ScaleBlock.EXPONENTS)],
    ScaleBlock.NONE.value,
    constraint="`none`: factors of tensors and of experts. Blocks are for fp8 and bf8, and both scales are given.",
)
ACTIVATION = word(
    "activation",
    "`swiglu`: silu(gate) * up, where `w` holds both projections of an expert.",
    [item.value for item in Activation],
    Activation.NONE.value,
    constraint="N of `w` is a multiple of 16: eight rows of the gate's weights, then eight of the other's, and so on. "
    "The result has N / 2 columns.",
)
OUT_SCALE_BLOCK = word(
    "out_scale_block",
    "Blocks of the result (rows x columns) that are brought to the range of fp8, with a factor each in `out_scale`.",
    [item.value for item in ResultBlock],
    ResultBlock.NONE.value,
    constraint="`1x128`: the result is fp8. `out` times `out_scale` is what was computed.",
)
ATTRIBUTES = (
    ALPHA, OUT_DTYPE, EXPECTED_ROWS, RETURN_STATUS, SCALE_BLOCK, ACTIVATION, OUT_SCALE_BLOCK, ALIGNMENT,
    FAST_ACCUMULATION,
)  # fmt: skip

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
        "scale_x", Role.INPUT, "Factor of `x`: one number, or one for each block.",
        ("[]", "[1]", "[T, ceil(K/128)]", "[E, R, ceil(K/128)]"), (0, 3), (DType.FP32,), optional=True,
        constraint="Blocks only with the attribute `scale_block`; any strides.",
    ),
    OperandSpec(
        "scale_w", Role.INPUT, "Factor of `w`: one number, one for each expert, or one for each block.",
        ("[]", "[1]", "[E]", "[E, N, ceil(K/128)]", "[E, ceil(N/128), ceil(K/128)]"), (0, 3), (DType.FP32,),
        optional=True, constraint="Blocks only with the attribute `scale_block`; any strides.",
    ),
    OperandSpec(
        "out", Role.OUTPUT, "Results; rows of no expert stay as they were. With `swiglu` N / 2 columns.",
        ("[T, N]", "[E, R, N]"), (2, 3),
        tuple(dict.fromkeys((*(item for dtype in DTYPES for item in output_dtypes(dtype)), DType.FP8))),
        constraint="The last dimension has stride 1. If it is not described, of the type of `x`, of fp16 for 8-bit "
        "floats. fp8 with `out_scale_block` only.",
    ),
    OperandSpec(
        "out_scale", Role.OUTPUT, "Factor of each block of the result.",
        ("[T, ceil(N/128)]", "[E, R, ceil(N/128)]"), (2, 3), (DType.FP32,), optional=True,
        constraint="Only with the attribute `out_scale_block`; any strides. N as of `out`.",
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
        Example("8-bit floats with a factor for each block", OperationRequest(
            "moe_gemm",
            {"x": TensorDesc.of("fp8", (40, 256)), "w": TensorDesc.of("fp8", (8, 384, 256)), "counts": _COUNTS,
             "scale_x": TensorDesc.of("fp32", (40, 2)), "scale_w": TensorDesc.of("fp32", (8, 3, 2))},
            {}, {"out_dtype": "bf16", "scale_block": ScaleBlock.ROWS_AND_SQUARES.value},
        )),
        Example("Gate and other projection of an expert, joined, to fp8 with factors", OperationRequest(
            "moe_gemm",
            {"x": TensorDesc.of("bf16", (40, 64)), "w": TensorDesc.of("bf16", (8, 512, 64)), "counts": _COUNTS},
            {}, {"activation": "swiglu", "out_scale_block": "1x128"},
        )),
    ),
    (
        "`counts` is an operand and not part of the plan: one plan, and one CUDA graph, serves any routing. In host "
        "memory it is checked before the launch. On a GPU nothing reads it before the kernel, which cuts it to the "
        "rows that there are and says so in `status`: 1 a negative count, 2 more rows than R, 4 more than T in all.",
    ),
)  # fmt: skip
