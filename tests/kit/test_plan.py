"""Argument blocks have the layout of the C structs, and plans survive JSON both ways."""

from __future__ import annotations

import ctypes
import json
import math
from typing import Any

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.plan import (
    ARGS,
    F64,
    I64,
    ExecutionPlan,
    Geometry,
    PixelWalk,
    Pointer,
    Stage,
    Struct,
    Table,
    TensorMap,
    WorkspaceLayout,
    pack,
)
from tilewright_kit.contract.problem import Operand, Role
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError
from tilewright_kit.types.tensor import TensorDesc


class Operand_(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_void_p), ("row_stride", ctypes.c_int64)]


class Problem_(ctypes.Structure):
    _fields_ = [
        ("a", ctypes.c_void_p),
        ("alpha", ctypes.c_double),
        ("scale", Operand_),
        ("d", ctypes.POINTER(Operand_)),
        ("null", ctypes.c_void_p),
    ]


class Args_(ctypes.Structure):
    _fields_ = [("problems", ctypes.POINTER(Problem_)), ("count", ctypes.c_int64), ("none", ctypes.c_void_p)]


def problem(index: int, d: int) -> Struct:
    operands = tuple(Struct((Pointer(f"d[{i}]", i), I64(10 * index + i))) for i in range(d))
    return Struct((Pointer("a", index), F64(index / 2), Struct((Pointer("s"), I64(-1))), Table(operands), Pointer()))


def test_a_bound_block_reads_as_the_c_structs_do() -> None:
    packed = pack(Struct((Table((problem(0, 2), problem(1, 0), problem(2, 1))), I64(3), Table(()))))
    block = bytearray(len(packed.template))
    base = ctypes.addressof((ctypes.c_char * len(block)).from_buffer(block))
    packed.bind({"a": 4096, "s": 8192, "d[0]": 100, "d[1]": 200}, block, base)
    args = Args_.from_buffer(block)
    assert (args.count, args.none) == (3, None)
    for index, d in enumerate((2, 0, 1)):
        seen = args.problems[index]
        assert (seen.a, seen.alpha, seen.null) == (4096 + index, index / 2, None)
        assert (seen.scale.ptr, seen.scale.row_stride) == (8192, -1)
        assert bool(seen.d) == bool(d)
        assert [(seen.d[i].ptr, seen.d[i].row_stride) for i in range(d)] == [
            (100 * (i + 1) + i, 10 * index + i) for i in range(d)
        ]


def test_structs_with_tensor_maps_are_aligned_and_padded_as_in_c() -> None:
    descriptor = TensorMap("a", 32, "fp16", (64, 8), (128,), (64, 8))
    row = Struct((descriptor, I64(7)))
    packed = pack(Struct((Table((row, row)), I64(5), row, Pointer("a"))))
    # 2 words, then the inner struct from 64 to 256, a word; the table follows at the next multiple of 64.
    assert packed.root_bytes == 320
    assert packed.maps == tuple((offset, descriptor) for offset in (64, 320, 512))
    assert set(packed.relocations) == {(0, ARGS, 320), (256, "a", 0)}
    assert len(packed.template) == 320 + 2 * 192
    assert packed.template[64 + 128] == packed.template[320 + 128] == 7


def test_an_unbound_tensor_map_is_zero() -> None:
    packed = pack(Struct((TensorMap("", 0, "fp16", (), (), ()), I64(1))))
    assert (packed.maps, packed.template[:128], packed.root_bytes) == ((), bytes(128), 192)


def test_a_block_that_is_too_small_is_not_written() -> None:
    packed = pack(Struct((I64(1), I64(2))))
    small = bytearray(8)
    with pytest.raises(ValueError, match="16 bytes"):
        packed.bind({}, small, 0)
    assert small == bytearray(8)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_a_typed_error(value: int) -> None:
    with pytest.raises(InvalidArgumentError):
        pack(Struct((I64(value),)))


def test_workspace_parts_are_aligned_and_do_not_overlap() -> None:
    layout = WorkspaceLayout()
    starts = [layout.reserve(nbytes) for nbytes in (1, 64, 65, 0, 3)]
    assert starts == [0, 64, 128, 256, 256]
    assert layout.bytes == 259


# ---- JSON ----

names = st.text(max_size=8)
int64 = st.integers(-(2**63), 2**63 - 1)
sizes = st.lists(st.integers(0, 2**40), max_size=5).map(tuple)
steps = st.lists(st.integers(-(2**15), 2**15), max_size=3).map(tuple)
walks = st.none() | st.builds(PixelWalk, steps, steps, steps)
swizzles, fetches = st.sampled_from((0, 32, 64, 128)), st.sampled_from((0, 256))
maps = st.builds(TensorMap, names, st.integers(0, 2**62), names, sizes, sizes, sizes, swizzles, fetches, walks)
leaves = st.one_of(
    st.builds(Pointer, names, int64), st.builds(I64, int64), st.builds(F64, st.floats(allow_nan=False)), maps
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    structs = st.lists(inner, max_size=3).map(lambda items: Struct(tuple(items)))
    return structs | st.lists(structs, max_size=3).map(lambda rows: Table(tuple(rows)))


structs = st.lists(st.recursive(leaves, nested, max_leaves=8), max_size=4).map(lambda items: Struct(tuple(items)))
triples = st.tuples(*[st.integers(1, 2**20)] * 3)
stages = st.builds(
    Stage,
    names,
    st.builds(toy.ToyConfig, vector=st.integers(1, 8), streaming=st.booleans()),
    names,
    structs,
    st.builds(Geometry, st.integers(1, 99), triples, triples, triples, st.integers(0, 2**18)),
)
operands = st.builds(
    Operand,
    names,
    st.builds(TensorDesc.of, st.sampled_from(DType), st.lists(st.integers(0, 9), max_size=3)),
    st.sampled_from(Role),
)
plans = st.builds(
    ExecutionPlan,
    st.just("toy"),
    names,
    st.lists(operands, max_size=3).map(tuple),
    st.lists(stages, max_size=3).map(tuple),
    st.integers(0, 2**40),
    st.lists(names, max_size=2).map(tuple),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.dictionaries(names, st.none() | st.integers() | names, max_size=2),
)
TYPES = {"toy": toy.ToyConfig}


@given(plans)
@pytest.mark.extended
def test_a_plan_comes_back_from_json(plan: ExecutionPlan) -> None:
    record = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert ExecutionPlan.from_dict(record, TYPES) == plan


def test_nan_survives_json() -> None:
    stage = Stage("s", toy.ToyConfig(), "main", Struct((F64(math.nan),)))
    record = json.loads(json.dumps(ExecutionPlan("toy", "a", (), (stage,)).to_dict(), allow_nan=False))
    number = ExecutionPlan.from_dict(record, TYPES).stages[0].args.fields[0]
    assert isinstance(number, F64)
    assert math.isnan(number.value)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, child in children for path in paths(child, (*at, key)))]


def test_damage_anywhere_in_a_record_is_a_typed_error_or_harmless(device: DeviceInfo) -> None:
    operation = toy.ToyOperation()
    problem = operation.parse(next(iter(operation.samples())))
    plan = operation.plan(problem, operation.candidates(problem, device)[0], device)
    for path in paths(plan.to_dict()):
        for wrong in (None, 3, -1, "x", True, [], {}, 1.5, [[]], {"i64": "1"}, 2**80):
            record: Any = json.loads(json.dumps(plan.to_dict()))
            if not path:
                record = wrong
            else:
                place = record
                for key in path[:-1]:
                    place = place[key]
                place[path[-1]] = wrong
            try:
                assert isinstance(ExecutionPlan.from_dict(record, TYPES), ExecutionPlan)
            except InvalidArgumentError as error:
                assert error.reason


def test_a_kernel_whose_name_is_not_that_of_its_config_is_refused(device: DeviceInfo) -> None:
    operation = toy.ToyOperation()
    problem = operation.parse(next(iter(operation.samples())))
    record = operation.plan(problem, toy.ToyConfig(), device).to_dict()
    record["stages"][0]["config"]["vector"] = 8
    with pytest.raises(InvalidArgumentError) as caught:
        ExecutionPlan.from_dict(record, TYPES)
    assert caught.value.field == "plan.stages[0].kernel"


def test_endless_nesting_is_refused(device: DeviceInfo) -> None:
    args: Any = []
    for _ in range(500):
        args = [args]
    stage = Stage("s", toy.ToyConfig(), "main", Struct(())).to_dict() | {"args": args}
    record = ExecutionPlan("toy", "a", (), ()).to_dict() | {"stages": [stage]}
    with pytest.raises(InvalidArgumentError, match="nested"):
        ExecutionPlan.from_dict(record, TYPES)
