"""Products on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tilewright_kit.commands.parameters import argument, flag, option
from tilewright_kit.commands.problem_command import Example, Preparation, ProblemCommand
from tilewright_kit.commands.steps import ACTIVATION, BINARY, CLAMP, SLOPE, SPLIT_K

if TYPE_CHECKING:
    from tilewright_gemm.commands.cases import GemmCase
    from tilewright_kit.commands.cases import CaseFamily

__all__ = ["BLOCKS", "COMMAND", "INT4"]

_DTYPES = ("fp32", "fp16", "bf16", "fp8", "bf8", "int8", "mixed")
_LAYOUTS = ("rcr", "rrr", "crr", "ccr")
BLOCKS = ("1x128_128x128", "1x128_1x128", "1x32_1x32")
INT4 = ("fp32", "fp16", "bf16", "fp32z", "fp16z", "bf16z")
_LAYERS = (
    ("query, key, value", 384, 1152, ""),
    ("attention output", 384, 384, ""),
    ("intermediate", 384, 1536, "Gelu"),
    ("output", 1536, 384, ""),
)
"""Linear layers of all-MiniLM-L6-v2: (name, k, n, activation)."""


class GemmCommand(ProblemCommand):
    name = "gemm"
    rank = 0
    noun = "a product"
    examples: Mapping[str, Sequence[str]] = {
        "run": (
            "512 512 512 --validate",
            "128 4096 4096 --dtype bf16 --layout rcr --validate",
            "64 64 64 --batch 16 --activation Gelu --repeat 100 --json",
            "512 512 512 --bias --d 1 --scale-a row --clamp 0:6 --validate",
            "128 256 512 --groups 128+64+0 --dtype bf16 --validate    grouped",
            "128 4096 4096 --layout rrr --packed --validate",
            "128 7168 4096 --dtype fp8 --scale-block 1x128_128x128 --validate",
            "16 4096 4096 --dtype bf16 --int4 fp16z --validate    4-bit weights",
            "256 256 256 --kernel NAME    (names: tilewright kernels list)",
            "4096 4096 4096 --dtype bf16 --device cuda:0",
            "512 512 512 --target unix:/tmp/tw.sock",
        ),
        "explain": ("128 4096 4096 --dtype bf16", "1 4096 4096 --dtype bf16 --layout rcr --json"),
        "bench": (
            "--shapes decode,squares --dtype bf16 --device cuda:0 --record",
            "--shapes layers.csv --configs all --seconds 60 -o layers.parquet",
            "--shapes 4096x4096x4096 --configs configs.jsonl --peer torch",
            "--shapes prefill --limit 20 --resume -o prefill.csv",
            "--shapes prefill --shard 2/8 --device cuda:1 --record",
            "--shapes 1x4096x4096 --filter '*_mem_*' --flush-cache --json",
        ),
    }
    problem = (
        argument("m", int, "Rows of A and C."),
        argument("n", int, "Columns of B and C."),
        argument("k", int, "Columns of A, rows of B."),
        option("dtype", "fp32", f"Element type: {', '.join(_DTYPES)} (mixed: A fp8, B bf8)."),
        option("layout", "rcr", "Layouts of A, B, C: r row-major, c column-major; C is r."),
    )
    steps = (
        option("out_dtype", "", "Element type of C. Default: what the operation says.", "--out-dtype"),
        ACTIVATION,
        option("batch", 0, "Products in one call; 0: a plain one.", least=0),
        option("groups", "", "Rows of each product of a grouped call, in the place of M: 128+64+0."),
        flag("bias", "Add a row to every row of C.", "--bias"),
        option("d", 0, "Matrices of C's shape that are brought in.", "--d", least=0),
        BINARY,
        option(
            "scale_a", "", "Factors of A: one of the tensor, or one of each row.", words=("tensor", "row"), strict=True
        ),
        option("scale_b", "", "Factors of B: tensor or column.", words=("tensor", "column"), strict=True),
        option(
            "scale_block",
            "",
            "Blocks of A and B that have a factor each, of fp8: 1x128_128x128, 1x128_1x128 or 1x32_1x32.",
            words=BLOCKS,
            strict=True,
        ),
        option(
            "int4",
            "",
            "B is 4-bit weights in groups of 128 with scales of this type; z: and zero points.",
            words=INT4,
            strict=True,
        ),
        option("alpha", "", "Factor of the product.", metavar="NUMBER"),
        CLAMP,
        SLOPE,
        SPLIT_K,
        flag("fast_accumulation", "Sums of 8-bit floats may have fewer bits.", "--fast-accumulation"),
        flag("packed", "Pack B first, once, and use it packed.", "--packed"),
    )
    columns = (
        option("dtype", "", "Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),
        option("layout", "rcr", "Layouts of rows that name none, comma-separated."),
    )
    shapes = (
        "Comma-separated: files (CSV or JSON lines with m, n, k and more), built-in lists (tiny, squares, decode, "
        "prefill, skinny, deep, ragged, batched, large), shapes such as 128x4096x4096 or 16*64x64x64, or - for "
        "standard input."
    )

    def family(self) -> CaseFamily:
        from tilewright_gemm.commands.family import GEMM

        return GEMM

    def case(self, given: Mapping[str, Any]) -> GemmCase:
        from tilewright_gemm.commands.cases import GemmCase

        flags = ("bias", "fast_accumulation", "packed")
        fields = dict(given) | {name: "yes" if given[name] else "" for name in flags if name in given}
        return GemmCase(**fields).checked("the command line")

    def prepared(self, case: GemmCase) -> Mapping[str, Preparation]:
        if not case.is_packed:
            return {}
        from tilewright_kit.commands.cases import DTYPES

        first, second = DTYPES[case.dtype]
        attributes = {"m": case.m} | ({"dtype_a": first} if first != second else {})
        return {"b": Preparation("gemm_pack_b", "b", attributes)}

    def describe(self, case: GemmCase) -> Mapping[str, Any]:
        return {
            "M": case.m, "N": case.n, "K": case.k, "batch": case.batch, "groups": case.rows, "dtype": case.dtype,
            "layout": case.layout,
        }  # fmt: skip

    def shown_kernel(self, kernels: Sequence[str]) -> str:
        return kernels[0] if kernels else ""

    def demonstrated(self, size: int) -> Sequence[Example]:
        """Square products of every type and layout, then a transformer's layers on 128 tokens, weights packed."""
        from tilewright_gemm.commands.cases import GemmCase

        square = GemmCase(size, size, size)
        rows = [
            Example(f"{dtype} {layout}", replace(square, dtype=dtype, layout=layout))
            for dtype in _DTYPES
            for layout in _LAYOUTS
        ]
        for layer, k, n, activation in _LAYERS:
            case = GemmCase(128, n, k, layout="rrr", bias="yes", activation=activation, packed="yes")
            rows.append(Example(f"MiniLM {layer}", case))
        return rows

    def numpy_call(self, case: GemmCase, inputs: Mapping[str, Any]) -> Callable[[], object]:
        import numpy as np

        # NumPy has a fast product for float32 alone; it gets the same numbers, converted beforehand.
        a, b = (inputs[name].astype(np.float32) for name in "ab")
        if case.int4:
            from tilewright_gemm.references.reference import unpacked_weights

            b = unpacked_weights(inputs, "", case.k).astype(np.float32)
        if not case.bias:
            return lambda: np.matmul(a, b)
        bias = inputs["bias"].astype(np.float32)
        return lambda: a @ b + bias


COMMAND = GemmCommand()
