"""Products of experts on the command line; imports nothing heavy at its top."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tilewright_kit.commands.parameters import argument, option
from tilewright_kit.commands.problem_command import Example, ProblemCommand

if TYPE_CHECKING:
    from tilewright_kit.commands.cases import CaseFamily
    from tilewright_moe.cases import MoeCase

__all__ = ["COMMAND"]


class MoeCommand(ProblemCommand):
    name = "moe"
    rank = 30
    noun = "a mixture of experts"
    examples: Mapping[str, Sequence[str]] = {
        "run": ("512 2048 1024 --experts 16 --validate", "16 256 512 --experts 8 --room 32 --dtype bf16 --validate"),
        "explain": ("2048 2048 7168 --experts 256 --dtype bf16",),
        "bench": ("--shapes top8of256 --dtype bf16 --device cuda:0", "--shapes 512x2048x1024x16"),
    }
    problem = (
        argument("rows", int, "Rows of all experts; with --room those that an expert has."),
        argument("n", int, "Columns of the result."),
        argument("k", int, "Elements of a row."),
        option("experts", 8, "Experts, to which rows are routed at random.", least=1),
        option("dtype", "fp32", "Element type: fp32, fp16, bf16, fp8, bf8 or mixed (x fp8, w bf8)."),
    )
    steps = (
        option("room", 0, "Rows that each expert has room for; 0: rows are sorted by expert.", least=0),
        option("out_dtype", "", "Element type of the result. Default: what the operation says.", "--out-dtype"),
        option(
            "scale_block",
            "",
            "Blocks of x and w that have a factor each, of fp8: 1x128_128x128 or 1x128_1x128.",
            words=("1x128_128x128", "1x128_1x128"),
            strict=True,
        ),
        option("activation", "", "swiglu: silu(gate) * up of both projections.", words=("swiglu",), strict=True),
        option(
            "out_scale_block",
            "",
            "Blocks of an fp8 result that have a factor each: 1x128.",
            words=("1x128",),
            strict=True,
        ),
    )
    columns = (option("dtype", "", "Types of rows that name none, comma-separated. Default: fp32 on a CPU, bf16."),)
    shapes = (
        "Comma-separated: files with rows, n, k, experts and more, the lists tiny and top8of256, or shapes such as "
        "512x2048x1024x16."
    )

    def family(self) -> CaseFamily:
        from tilewright_moe.cases import FAMILY

        return FAMILY

    def case(self, given: Mapping[str, Any]) -> MoeCase:
        from tilewright_moe.cases import MoeCase

        return MoeCase(**given).checked("the command line")

    def describe(self, case: MoeCase) -> Mapping[str, Any]:
        return case.to_dict()

    def compared(self, case: MoeCase, inputs: Mapping[str, Any], name: str, output: Any) -> Any:  # noqa: ARG002
        """Rows that belong to an expert."""
        return output[:, : case.rows] if case.room else output

    def demonstrated(self, size: int) -> Sequence[Example]:
        return [Example("moe fp32", self.case({"rows": 128, "n": size, "k": size, "experts": 8}))]

    def numpy_call(self, case: MoeCase, inputs: Mapping[str, Any]) -> Callable[[], object]:
        import numpy as np

        x, w = (inputs[name].astype(np.float32) for name in ("x", "w"))
        ends = np.cumsum(inputs["counts"]).tolist()

        def products() -> object:
            if case.room:
                return np.matmul(x[:, : case.rows], w.transpose(0, 2, 1))
            return [
                x[first:end] @ w[expert].T for expert, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
            ]

        return products


COMMAND = MoeCommand()
