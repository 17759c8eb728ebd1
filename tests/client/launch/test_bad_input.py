"""The C interface refuses what it is given wrong: a status, a rule and a fix, and nothing is launched."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable
from ctypes import byref, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tilewright_arch
from tilewright.errors import UnsupportedError
from tilewright.launch.library import Library, OperandInfo, PlanInfo, load_library
from tilewright.types.addresses import address_of
from tilewright_kit.contract.bundle import BundlePlan, write_bundle
from tilewright_tools.cli import main

F = np.float32
BUNDLE_HEADER, BUNDLE_ENTRY = struct.Struct("<8sIIQ32sIIQ"), struct.Struct("<4I2Q")
DIGEST, OPERATION_AT, FEATURES_AT = slice(24, 56), 136, 148
OBJECT_DIGEST = 32


class BindOptions(ctypes.Structure):
    """``tw_bind_options``."""

    _fields_ = (("struct_bytes", c_uint32), ("reserved", c_uint32), ("workspace", c_void_p), ("bytes", c_uint64))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> Path:
    made = tmp_path_factory.mktemp("bundle") / "made.twb"
    arch = ["--arch", tilewright_arch.detect_cpu().id, "--dtype", "fp32", "--cache-dir", str(kernel_cache)]
    assert main(["bundle", "build", "--gemm", "61x48x32", *arch, "-o", str(made)]) == 0
    return made


@pytest.fixture(scope="module")
def library() -> Library:
    return load_library()


@pytest.fixture
def opened(library: Library, bundle: Path) -> Any:
    """The handle of the bundle."""
    handle = library.open_bundle(bundle)
    yield handle
    library.close_bundle(handle)


@pytest.fixture
def plan(library: Library, opened: int) -> Any:
    """The handle of its plan, which can be launched."""
    ((name, _),) = library.bundle_entries(opened)
    handle = library.find_in_bundle(opened, name)
    library.load_plan(handle)
    yield handle
    library.close_plan(handle)


def plan_bytes(bundle: Path) -> bytearray:
    data = bundle.read_bytes()
    entry = BUNDLE_ENTRY.unpack_from(data, BUNDLE_HEADER.size)
    return bytearray(data[entry[4] : entry[4] + entry[5]])


def sealed(data: bytearray) -> bytes:
    """The same with the digest of what it is now."""
    data[DIGEST] = hashlib.sha256(data[DIGEST.stop :]).digest()
    return bytes(data)


def refused(library: Library, status: int, rule: str) -> None:
    assert status != 0
    error = library.error()
    assert error.rule == rule and error.message and error.fix, (error.rule, error.message, error.fix)


def operands() -> tuple[list[Any], list[int]]:
    arrays: list[Any] = [np.ones((61, 32), F), np.ones((32, 48), F), np.full((61, 48), np.nan, F)]
    return arrays, [address_of(array) for array in arrays]


WRONG: dict[str, tuple[str, Callable[[list[int]], list[int]]]] = {
    "null": ("operand_address", lambda at: [0, *at[1:]]),
    "overlapping": ("operand_overlap", lambda at: [at[0], at[1], at[0] + 64]),
    "too few": ("operand_count", lambda at: at[:2]),
    "too many": ("operand_count", lambda at: [*at, at[0]]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_addresses_are_refused_and_the_output_stays(library: Library, plan: int, name: str) -> None:
    arrays, right = operands()
    rule, change = WRONG[name]
    given = change(right)
    data = struct.pack(f"={len(given)}Q", *given)
    refused(library, library.tw_run(plan, data, len(given), None), rule)
    status, handle = library.bind(plan, data, len(given))
    assert not handle
    refused(library, status, rule)
    assert np.isnan(arrays[2]).all()
    assert library.tw_run(plan, struct.pack("=3Q", *right), 3, None) == 0 and (arrays[2] == 32).all()


def test_a_workspace_that_is_too_small_or_lies_odd_is_refused(library: Library, plan: int) -> None:
    needed = library.describe(plan).workspace_bytes
    assert needed > 64, "the last rows are packed there"
    arrays, right = operands()
    memory = np.zeros(needed + 512, np.uint8)
    base = -(-address_of(memory) // 256) * 256
    for address, size in ((base, needed - 1), (base + 8, needed), (base, 0)):
        options, handle = BindOptions(ctypes.sizeof(BindOptions), 0, address, size), c_void_p()
        status = library._native.tw_bind(plan, struct.pack("=3Q", *right), 3, byref(options), byref(handle))
        assert not handle
        refused(library, status, "workspace")
    options, handle = BindOptions(ctypes.sizeof(BindOptions), 0, base, needed), c_void_p()
    assert library._native.tw_bind(plan, struct.pack("=3Q", *right), 3, byref(options), byref(handle)) == 0
    assert library.tw_launch(handle, None) == 0 and (arrays[2] == 32).all()
    library.close_binding(handle)


def test_a_plan_for_another_processor_is_refused_when_it_is_loaded(library: Library, bundle: Path) -> None:
    data = plan_bytes(bundle)
    data[FEATURES_AT : FEATURES_AT + 4] = data[OPERATION_AT : OPERATION_AT + 4]  # no CPU has a feature of that name
    handle = library.open_plan(sealed(data))
    refused(library, library._native.tw_plan_load(handle), "cpu_features")
    _, right = operands()
    refused(library, library.tw_run(handle, struct.pack("=3Q", *right), 3, None), "cpu_features")
    library.close_plan(handle)


def test_a_plan_whose_code_was_not_given_is_refused_when_it_is_loaded(library: Library, bundle: Path) -> None:
    data = plan_bytes(bundle)
    content = bundle.read_bytes()
    entries, objects = BUNDLE_HEADER.unpack_from(content)[5:7]
    assert objects == 1
    place = BUNDLE_HEADER.size + entries * BUNDLE_ENTRY.size
    digest = content[place : place + OBJECT_DIGEST]
    data[data.index(digest) + 1] ^= 1
    handle = library.open_plan(sealed(data))
    refused(library, library._native.tw_plan_load(handle), "object_missing")
    library.close_plan(handle)


def test_code_for_another_processor_stays_in_the_file(library: Library, bundle: Path, tmp_path: Path) -> None:
    data, whole, code = plan_bytes(bundle), bundle.read_bytes(), b"code for another processor"
    data[FEATURES_AT : FEATURES_AT + 4] = data[OPERATION_AT : OPERATION_AT + 4]
    place = BUNDLE_HEADER.size + BUNDLE_ENTRY.size
    sha256 = hashlib.sha256(code).digest()
    at = data.index(whole[place : place + OBJECT_DIGEST])
    data[at : at + OBJECT_DIGEST] = sha256
    write_bundle(tmp_path / "other.twb", [BundlePlan("product", "elsewhere", sealed(data), {sha256: code})])
    handle = library.open_bundle(tmp_path / "other.twb")
    with pytest.raises(UnsupportedError) as caught:
        library.find_in_bundle(handle, "product")
    assert caught.value.rule == "bundle_arch" and not library.knows(sha256)
    library.verify_bundle(handle)  # which does read it
    library.close_bundle(handle)


def test_indices_and_names_that_are_none_are_refused(library: Library, opened: int, plan: int) -> None:
    native = library._native
    operand = OperandInfo(struct_bytes=ctypes.sizeof(OperandInfo))
    name, arch, handle = ctypes.c_char_p(), ctypes.c_char_p(), c_void_p()
    for index in (3, 2**32 - 1):
        refused(library, native.tw_plan_operand(plan, index, byref(operand)), "operand_index")
    for index in (1, 2**32 - 1):
        refused(library, native.tw_bundle_entry(opened, index, byref(name), byref(arch)), "bundle_index")
        refused(library, native.tw_bundle_plan(c_void_p(opened), c_uint32(index), byref(handle)), "bundle_index")
    refused(library, native.tw_bundle_find(opened, b"juggle()", byref(handle)), "bundle_name")
    assert not handle


def test_null_pointers_and_structs_of_another_size_are_refused(library: Library, plan: int) -> None:
    native, handle = library._native, c_void_p()
    small = PlanInfo(struct_bytes=8)
    for status in (
        native.tw_plan_open(None, 0, byref(handle)),
        native.tw_plan_describe(plan, None),
        native.tw_plan_describe(plan, byref(small)),
        native.tw_plan_load(None),
        native.tw_run(None, None, 0, None),
        native.tw_run(plan, None, 3, None),
        native.tw_bind(plan, b"", 3, None, None),
        native.tw_launch(None, None),
        native.tw_launch_many(None, 2, None, None),
        native.tw_bundle_open(None, byref(handle)),
    ):
        refused(library, status, "argument")
    for close in (library.close_plan, library.close_binding, library.close_bundle):
        close(None)


def test_a_record_at_an_odd_address_is_refused(library: Library, plan: int) -> None:
    record = np.zeros(256, np.uint8)
    base = -(-address_of(record) // 64) * 64
    refused(library, library._native.tw_plan_record_into(plan, base + 8), "record_alignment")
    assert not record.any()
