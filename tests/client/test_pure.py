"""Errors, framing, settings, arguments: everything that needs no server."""

import subprocess
import sys

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilewright as tw
from tilewright import errors
from tilewright.dispatch.operands.operands import attributes_to_wire
from tilewright.operations import gemm
from tilewright.session import settings
from tilewright.transport import messages as wire
from tilewright_proto.v1 import dispatch_pb2, error_pb2, tensor_pb2

CODES = {
    "invalid_argument": tw.InvalidArgumentError,
    "config_invalid": tw.ConfigInvalidError,
    "unsupported": tw.UnsupportedError,
    "not_found": tw.NotFoundError,
    "permission_denied": tw.AccessError,
    "resource_exhausted": tw.ResourceExhaustedError,
    "deadline_exceeded": tw.DeadlineError,
    "cancelled": tw.CancelledError,
    "toolchain_missing": tw.ToolchainMissingError,
    "build_failed": tw.BuildFailedError,
    "device_error": tw.DeviceError,
    "unavailable": tw.UnavailableError,
    "internal": tw.InternalError,
}


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_a_type_with_all_its_details(code: str) -> None:
    broken = error_pb2.Violation(rule="r", field="tile", value="3", reason="odd", fix={"tile": "4"})
    detail = error_pb2.ErrorDetail(
        code=code,
        message="no",
        field="f",
        value="v",
        rule="r",
        fix="do",
        violations=[broken],
        log_tail="log",
        retry_after_ms=1500,
    )
    metadata = [("tilewright-error-bin", detail.SerializeToString())]
    error = errors.from_status(grpc.StatusCode.UNKNOWN, "text", metadata)
    assert type(error) is CODES[code]
    assert (error.code, error.field, error.value, error.rule, error.fix) == (code, "f", "v", "r", "do")
    assert (error.log_tail, error.retry_after) == ("log", 1.5)
    assert error.violations == (tw.Violation("r", "tile", "3", "odd", {"tile": "4"}),)
    assert str(error) == "no Fix: do" or "[f=v]" in str(error)


def test_a_bare_or_damaged_status_is_still_typed() -> None:
    kind = grpc.StatusCode
    assert type(errors.from_status(kind.UNAVAILABLE, "gone", None)) is tw.UnavailableError
    assert type(errors.from_status(kind.NOT_FOUND, "", [("tilewright-error-bin", b"\xff")])) is tw.NotFoundError
    assert type(errors.from_status(None, None, ())) is tw.InternalError
    new = error_pb2.ErrorDetail(code="code of a later version", message="m").SerializeToString()
    assert type(errors.from_status(kind.NOT_FOUND, "", [("tilewright-error-bin", new)])) is tw.NotFoundError


@given(
    st.binary(max_size=40),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**63), max_size=4), st.integers(0, 300))),
    st.integers(0, 2**32 - 1),
)
def test_framing_by_hand_is_the_message(token: bytes, calls: list[tuple[int, list[int], int]], timeout: int) -> None:
    chunks, executions = [], []
    for plan, offsets, repeat in calls:
        places = [tensor_pb2.Location(region=tensor_pb2.RegionSlice(region=9, offset=offset)) for offset in offsets]
        fields = [wire.location_field(place.SerializeToString()) for place in places]
        chunks.append(wire.execution(plan, fields, repeat))
        executions.append(dispatch_pb2.Execution(plan=plan, locations=places, repeat=repeat if repeat > 1 else 0))
    message = wire.execute_request(wire.session_field(token), chunks, timeout)
    wanted = dispatch_pb2.ExecuteRequest(session=token, executions=executions, timeout_ms=timeout)
    assert dispatch_pb2.ExecuteRequest.FromString(message) == wanted


def test_target_comes_from_the_environment_or_the_users_socket(tmp_path) -> None:
    assert settings.default_target({"TILEWRIGHT_TARGET": "host:1"}) == "host:1"
    assert settings.default_target({"XDG_RUNTIME_DIR": str(tmp_path)}) == f"unix:{tmp_path}/tilewright/tilewright.sock"
    assert settings.default_target({}).startswith("unix:/tmp/tilewright-")
    with pytest.raises(tw.InvalidArgumentError):
        settings.normalise_target(" ")


def test_attributes_take_the_protocols_types() -> None:
    found = attributes_to_wire({"f": True, "i": 3, "n": 0.5, "t": "x", "is": [1, 2], "ns": [1, 2.5], "ts": ["a"]})
    kinds = {name: value.WhichOneof("value") for name, value in found.items()}
    expected = ["flag", "integer", "number", "text", "integers", "numbers", "texts"]
    assert list(kinds.values()) == expected
    assert attributes_to_wire({"none": None, "np": np.int64(4)})["np"].integer == 4
    for bad in (object(), 2**70, [object()], {"a": 1}):
        with pytest.raises(tw.InvalidArgumentError):
            attributes_to_wire({"bad": bad})


def test_words_of_gemm_are_checked_before_anything_is_sent() -> None:
    assert gemm.attributes(activation="swish", binary="add", count_d=2, alpha=2) == {
        "alpha": 2.0,
        "binary": "MultiDAdd",
        "unary": "Silu",
    }
    assert gemm.attributes(clamp=(0, None)) == {"unary": "Clamp", "clamp_lo": 0.0}
    for activation in ("relu6", "softplus"):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            gemm.attributes(activation=activation, clamp=(0, 1))
        assert (caught.value.field, caught.value.rule) == ("clamp", "no_effect")
    for wrong in ({"activation": "rleu"}, {"binary": "sub"}, {"clamp": 3}, {"alpha": "2"}, {"out_dtype": "f8"}):
        with pytest.raises(tw.InvalidArgumentError):
            gemm.attributes(**wrong)


def test_import_is_cheap_and_starts_nothing() -> None:
    code = """
import os, sys, threading
import grpc, numpy, ml_dtypes, google.protobuf.descriptor_pb2
threads, files, known = threading.active_count(), set(os.listdir("/proc/self/fd")), set(sys.modules)
import tilewright
assert threading.active_count() == threads, threading.enumerate()
assert set(os.listdir("/proc/self/fd")) == files
print("\\n".join(set(sys.modules) - known))
"""
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    heavy = {"tilewright_kit", "tilewright_server", "pluggy", "typer", "rich", "torch", "cuda", "asyncio", "inspect"}
    assert not {name.split(".")[0] for name in loaded} & heavy
    assert len(loaded) < 140, sorted(loaded)  # a fraction of what NumPy and gRPC load
