"""Errors on the wire."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from rpc_harness import Client, ServerProcess

import tilewright_server
from tilewright_kit.config.rules import Violation
from tilewright_kit.types import errors as kit
from tilewright_proto.v1 import memory_pb2 as mp
from tilewright_server.endpoints.messages.status_details import STATUS_METADATA
from tilewright_server.endpoints.rpc.transport.status import ERROR_METADATA, STATUS, set_status, status_of
from tilewright_server.protocol.errors import MAX_DETAIL, as_tilewright_error, to_detail

KINDS = [kind for _, kind in inspect.getmembers(kit, inspect.isclass) if issubclass(kind, kit.TilewrightError)]


class FakeContext:
    """The part of a call's context that ``set_status`` needs."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.code: grpc.StatusCode | None = None

    def set_trailing_metadata(self, items: tuple[tuple[str, Any], ...]) -> None:
        self.metadata = dict(items)

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None: ...


def test_every_error_type_has_a_status() -> None:
    for kind in KINDS:
        if kind is not kit.TilewrightError:
            assert kind in STATUS
        assert status_of(kind("x")) is not grpc.StatusCode.UNKNOWN


def test_a_subtype_has_the_status_of_its_type() -> None:
    class OwnError(kit.NotFoundError):
        pass

    assert status_of(OwnError("x")) is grpc.StatusCode.NOT_FOUND


def test_details_travel_whole() -> None:
    error = kit.ConfigInvalidError(
        "no",
        field="tile",
        value=(1, 2),
        rule="tile_rule",
        fix="use another",
        violations=[Violation("r", "f", [1], "because", {"f": [2]})],
    )
    detail = to_detail(error)
    assert (detail.code, detail.message, detail.field) == ("config_invalid", "no", "tile")
    assert (detail.value, detail.rule, detail.fix) == ("(1, 2)", "tile_rule", "use another")
    assert detail.violations[0].fix == {"f": "[2]"}


def test_details_fit_into_metadata_whatever_is_in_them() -> None:
    violations = [Violation("rule" * 20, "field", "v" * 500, "reason " * 200, {"f": 1})] * 200
    error = kit.BuildFailedError(
        "m" * 10_000, value="v" * 10_000, fix="f" * 10_000, log_tail="l" * 100_000 + "END", violations=violations
    )
    detail = to_detail(error)
    assert detail.ByteSize() <= MAX_DETAIL + 1000
    assert detail.log_tail.endswith("END")


def test_text_that_is_no_unicode_does_not_break_an_error() -> None:
    assert to_detail(kit.InvalidArgumentError("bad \ud800 text", value="\udfff")).message == "bad ? text"


def test_an_exhausted_resource_says_when_to_come_back() -> None:
    context: Any = FakeContext()
    set_status(context, kit.ResourceExhaustedError("full", retry_after_s=0.25))
    assert context.metadata["grpc-retry-pushback-ms"] == "250"
    assert context.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    set_status(context, kit.ResourceExhaustedError("full"))
    assert set(context.metadata) == {ERROR_METADATA, STATUS_METADATA}


def test_an_unexpected_error_shows_an_id_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    known = as_tilewright_error(ValueError("/secret/path of session 42"))
    assert isinstance(known, kit.InternalError)
    assert "secret" not in str(known)
    assert known.value in caplog.text
    assert "/secret/path" in (caplog.text + str(caplog.records[0].exc_info))


def test_running_out_of_memory_is_the_callers_to_retry() -> None:
    assert isinstance(as_tilewright_error(MemoryError()), kit.ResourceExhaustedError)


def test_errors_are_statuses_of_google_too() -> None:
    error = kit.ConfigInvalidError(
        "broken " * 500,
        rule="config",
        fix="x" * 5000,
        violations=[Violation(f"rule{number}", "tile", (1, 2), "because " * 60) for number in range(100)],
        log_tail="y" * 100_000,
    )
    context = FakeContext()
    set_status(context, error)  # type: ignore[arg-type]
    assert sum(len(value) * 4 / 3 for value in context.metadata.values()) < 8000
    status = status_pb2.Status.FromString(context.metadata[STATUS_METADATA])
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [item.TypeName() for item in status.details] == ["google.rpc.ErrorInfo", "google.rpc.BadRequest"]

    full = kit.ResourceExhaustedError("full", field="max_sessions", rule="quota", fix="wait", retry_after_s=0.7)
    set_status(context, full)  # type: ignore[arg-type]
    status = status_pb2.Status.FromString(context.metadata[STATUS_METADATA])
    info, quota, retry = error_details_pb2.ErrorInfo(), error_details_pb2.QuotaFailure(), error_details_pb2.RetryInfo()
    for packed, message in zip(status.details, (info, quota, retry), strict=True):
        assert packed.Unpack(message)
    assert (info.reason, info.domain, info.metadata["fix"]) == ("QUOTA", "tilewright", "wait")
    assert quota.violations[0].subject == "max_sessions"
    assert retry.retry_delay.ToMilliseconds() == 700


def test_grpcs_own_library_reads_the_status(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        with pytest.raises(grpc.RpcError) as caught:
            client.memory.UnregisterRegion(mp.UnregisterRegionRequest(session=client.token, region=7))
        status = rpc_status.from_call(caught.value)
        assert status is not None
        assert status.details[0].TypeName() == "google.rpc.ErrorInfo"


def test_every_error_of_the_server_names_its_rule_and_a_fix() -> None:
    names = {kind.__name__ for kind in STATUS}
    for path in Path(tilewright_server.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in names:
                given = {item.arg for item in node.keywords}
                assert {"rule", "fix"} <= given, f"{path.name}, line {node.lineno}: {ast.unparse(node)}"


def test_a_session_of_no_known_priority_is_refused(server: ServerProcess) -> None:
    with Client(server.addresses[0], session=False) as client:
        lease = client.memory.OpenSession(mp.OpenSessionRequest(), metadata=(("tilewright-priority", "urgent"),))
        with pytest.raises(grpc.RpcError) as caught:
            next(lease)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        lease = client.memory.OpenSession(mp.OpenSessionRequest(), metadata=(("tilewright-priority", "background"),))
        assert next(lease).opened.session
        lease.cancel()
