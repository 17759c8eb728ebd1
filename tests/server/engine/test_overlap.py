from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc
from tilewright_server.engine.execution.overlap import OverlapCheck

MEMORY = np.zeros(1 << 16, np.uint8)
BASE = MEMORY.ctypes.data


def check(operands: list[tuple[str, Role, TensorDesc, int]], in_place: tuple[tuple[str, str], ...] = ()) -> None:
    plan = ExecutionPlan(
        "x",
        "y",
        tuple(Operand(name, desc, role) for name, role, desc, _ in operands),
        (),
        details={"in_place": in_place},
    )
    OverlapCheck(plan).check([BASE + offset for *_, offset in operands])


def matrix(rows: int = 4, columns: int = 4, stride: int = 4) -> TensorDesc:
    return TensorDesc.of("fp32", (rows, columns), (stride, 1))


def test_output_over_an_input_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check([("a", Role.INPUT, matrix(), 0), ("c", Role.OUTPUT, matrix(), 60)])
    assert (caught.value.field, caught.value.value, caught.value.rule) == ("c", "a", "operand_overlap")


def test_output_over_an_output_is_refused() -> None:
    with pytest.raises(InvalidArgumentError):
        check([("c", Role.OUTPUT, matrix(), 0), ("d", Role.OUTPUT, matrix(), 4)])


def test_neighbours_and_shared_inputs_are_fine() -> None:
    check([("a", Role.INPUT, matrix(), 0), ("b", Role.INPUT, matrix(), 0), ("c", Role.OUTPUT, matrix(), 64)])


def test_columns_of_one_matrix_may_be_input_and_output() -> None:
    left = matrix(8, 4, 8)
    check([("a", Role.INPUT, left, 0), ("c", Role.OUTPUT, left, 16)])
    with pytest.raises(InvalidArgumentError):
        check([("a", Role.INPUT, left, 0), ("c", Role.OUTPUT, left, 12)])


def test_plan_may_allow_the_very_same_tensor_only() -> None:
    allowed = (("c", "d[0]"),)
    check([("d[0]", Role.INPUT, matrix(), 0), ("c", Role.OUTPUT, matrix(), 0)], allowed)
    with pytest.raises(InvalidArgumentError):
        check([("d[0]", Role.INPUT, matrix(), 0), ("c", Role.OUTPUT, matrix(), 4)], allowed)
    with pytest.raises(InvalidArgumentError):
        check([("a", Role.INPUT, matrix(), 0), ("c", Role.OUTPUT, matrix(), 0)], allowed)


def test_packed_tensors_are_compared_whole() -> None:
    packed = TensorDesc(matrix().dtype, (4, 4), (0, 0), "panels", 256)
    with pytest.raises(InvalidArgumentError):
        check([("b", Role.INPUT, packed, 0), ("c", Role.OUTPUT, matrix(), 192)])


def test_empty_operands_are_nowhere() -> None:
    check([("a", Role.INPUT, matrix(0, 4), 0), ("c", Role.OUTPUT, matrix(), 0)])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Role)), st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.integers(0, 40)
        ),
        min_size=2,
        max_size=14,
    )
)
def test_answer_is_that_of_the_bytes_themselves(items: list[tuple[Role, int, int, int, int]]) -> None:
    operands, touched = [], []
    for place, (role, rows, columns, gap, offset) in enumerate(items):
        desc = matrix(rows, columns, columns + gap)
        operands.append((f"t{place}", role, desc, 4 * offset))
        touched.append({offset + row * (columns + gap) + column for row in range(rows) for column in range(columns)})
    wrong = any(
        touched[one] & touched[other] and Role.OUTPUT in (items[one][0], items[other][0])
        for one in range(len(items))
        for other in range(one)
    )
    if wrong:
        with pytest.raises(InvalidArgumentError):
            check(operands)
    else:
        check(operands)
