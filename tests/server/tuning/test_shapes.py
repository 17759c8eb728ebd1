"""Shapes come from files, names and the command line; what cannot be meant is refused by file, line and column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tilewright_gemm.commands.cases import GemmCase as Case
from tilewright_gemm.commands.family import GEMM, NAMED
from tilewright_gemm.plugin import GemmOperation
from tilewright_kit.commands.cases import Case as AnyCase
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_tools.tuning.problems import shapes


def read_shapes(
    wanted: str, dtypes: Sequence[str] = ("fp32",), layouts: Sequence[str] = ("rcr",), stdin: Sequence[str] = ()
) -> list[AnyCase]:
    return shapes.read_shapes(GEMM, wanted, {"dtype": dtypes, "layout": layouts}, stdin)


def test_csv_with_columns_comments_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "layers.csv"
    file.write_text("# what the model runs\nM, N, K, dtype, bias, activation\n8,16,32,bf16,yes,Gelu\n\n1,2,3,,,\n")
    assert read_shapes(str(file), ("fp16", "int8"), ("rcr",)) == [
        Case(8, 16, 32, "bf16", bias="yes", activation="Gelu"), Case(1, 2, 3, "fp16"), Case(1, 2, 3, "int8"),
    ]  # fmt: skip


def test_csv_without_columns_is_m_n_k_and_batch(tmp_path: Path) -> None:
    file = tmp_path / "plain.csv"
    file.write_text("8,16,32\n1,2,3,4\n")
    assert read_shapes(str(file), layouts=("rrr",)) == [
        Case(8, 16, 32, layout="rrr"), Case(1, 2, 3, layout="rrr", batch=4)
    ]  # fmt: skip


def test_json_lines_and_lists(tmp_path: Path) -> None:
    lines, whole = tmp_path / "a.jsonl", tmp_path / "b.json"
    lines.write_text('{"m": 8, "n": 16, "k": 32, "bias": true}\n{"m": "1", "n": 2, "k": 3, "layout": "ccr"}\n')
    whole.write_text('[{"m": 8, "n": 16, "k": 32, "d": 2}]')
    assert read_shapes(f"{lines}, {whole}") == [
        Case(8, 16, 32, bias="yes"), Case(1, 2, 3, layout="ccr"), Case(8, 16, 32, d=2)
    ]  # fmt: skip


def test_names_written_shapes_and_standard_input() -> None:
    assert read_shapes("tiny,128x256x64,16*8x8x8,tiny") == [
        *(Case(**row) for row in NAMED["tiny"]), Case(128, 256, 64), Case(8, 8, 8, batch=16)
    ]  # fmt: skip
    assert read_shapes("-", stdin=['{"m": 1, "n": 2, "k": 3}\n']) == [Case(1, 2, 3)]
    assert all(len(read_shapes(name)) == len(rows) for name, rows in NAMED.items())


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("m,n,k,layot\n1,2,3,rcr\n", "shapes.layot", "did you mean layout?"),
        ("m,n\n1,2\n", "shapes.k", "column k is missing"),
        ("m,n,k\n1,x,3\n", "shapes.n", "x.csv:2"),
        ("m,n,k\n1,0,3\n", "shapes.n", "at least 1"),
        ("m,n,k,batch\n1,1,3,-2\n", "shapes.batch", "negative"),
        ("m,n,k\n1,2,3,4\n", "shapes", "4 cells under 3 columns"),
        ("m,n,k,dtype\n1,2,3,fp17\n", "shapes.dtype", "fp17"),
        ("m,n,k,layout\n1,2,3,rcc\n", "shapes.layout", "rcc"),
        ("m,n,k,scale_a\n1,2,3,column\n", "shapes.scale_a", "no such scale"),
        ("m,n,k,slope\n1,2,3,0.5\n", "shapes.slope", "activation"),
        ("m,n,k,activation,slope\n1,2,3,Elu,steep\n", "shapes.slope", "no number"),
        ("\n", "shapes", "no shapes"),
    ],
)
def test_a_row_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, field: str, says: str) -> None:
    file = tmp_path / "x.csv"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError) as caught:
        read_shapes(str(file))
    assert caught.value.field == field
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"m": 1, "n": 2, "k": 3', "[1, 2]", '{"m": 1.5, "n": 2, "k": 3}', '{"m": 1, "n": 2, "k": 3, "dtype": 7}']
)
def test_json_that_cannot_be_meant_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidArgumentError):
        read_shapes(str(file))


def test_a_list_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(InvalidArgumentError, match="decode"):
        read_shapes("no_such_list")


@pytest.mark.parametrize(
    "case",
    [
        Case(8, 16, 32, "mixed", "ccr", batch=3, out_dtype="fp32"),
        Case(8, 16, 32, "int8", bias="yes", out_dtype="fp16", activation="Relu"),
        Case(8, 8, 32, "bf16", d=2, binary="MultiDMultiply", scale_a="row", scale_b="tensor", split_k=2),
    ],
    ids=lambda case: case.label,
)
def test_a_case_becomes_a_request_that_the_operation_takes(case: Case) -> None:
    problem = GemmOperation().parse(case.request())
    assert (problem.m, problem.n, problem.k, problem.layout) == (case.m, case.n, case.k, case.layout)
    assert problem.flops == case.flops
    assert problem.num_d == case.d
    assert GEMM.from_record(case.to_dict(), "again") == case
    resized = GemmOperation().resized(problem, {"m": 4, "n": 6, "k": 10, "batch": max(case.batch, 1)})
    assert resized is not None
    assert (resized.m, resized.n, resized.k) == (4, 6, 10)
    described, other = problem.describe(), resized.describe()
    assert {name for name in described if described[name] != other[name]} <= {"products", "flops", "split_k"}
