"""Launch plans and code objects as the server gives them: to whom, in which pieces, and what a client makes of them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import tilewright as tw
from tilewright.transport import rpc
from tilewright.transport.rpc import Rpc
from tilewright.types.spec import Spec
from tilewright_proto.v1 import dispatch_pb2, tensor_pb2

F_GET_SEALS, SEALS = 1034, 0x1 | 0x2 | 0x4 | 0x8
"""No more seals, no shrinking, no growing, no writing."""


def asked(client: tw.Client, call: Rpc) -> Any:
    def flow() -> Any:
        return (yield call)

    return client._drive(flow)


def plan_of(client: tw.Client, **more: Any) -> dispatch_pb2.PlanReply:
    operands = [
        tensor_pb2.Operand(name=name, spec=Spec.of(shape, "fp32").to_wire(name))
        for name, shape in (("a", (12, 20)), ("b", (20, 28)))
    ]
    request = dispatch_pb2.PlanRequest(
        session=client.session.token, operation="gemm", inputs=operands, placement=dispatch_pb2.PLACEMENT_CALLER, **more
    )
    reply: dispatch_pb2.PlanReply = asked(client, Rpc(rpc.PLAN, request))
    return reply


def fetch(client: tw.Client, plan: int, sha256: bytes, *, local: bool = False, **more: Any) -> Any:
    request = dispatch_pb2.FetchObjectRequest(session=client.session.token, plan=plan, sha256=sha256, **more)
    return asked(client, Rpc(rpc.FETCH_OBJECT, request, local=local))


def test_a_reply_brings_the_launch_plan_and_small_objects(apart: tw.Client) -> None:
    reply = plan_of(apart)
    assert reply.launch_plan.startswith(b"TWPLAN\0\0")
    assert hashlib.sha256(reply.launch_plan[56:]).digest() == reply.launch_plan[24:56]
    assert not reply.HasField("launch_refused")
    (item,) = reply.objects
    assert hashlib.sha256(item.content).digest() == item.sha256
    assert len(item.content) == item.bytes


def test_objects_that_the_caller_knows_are_left_out(apart: tw.Client) -> None:
    (item,) = plan_of(apart).objects
    (again,) = plan_of(apart, known_objects=[item.sha256, bytes(32)]).objects
    assert (again.sha256, again.bytes, again.content) == (item.sha256, item.bytes, b"")


def test_a_plan_for_the_server_brings_neither(apart: tw.Client) -> None:
    request = dispatch_pb2.PlanRequest()
    request.CopyFrom(apart.plan_gemm(Spec.of((12, 20), "fp32"), Spec.of((20, 28), "fp32"))._state.request)
    reply = asked(apart, Rpc(rpc.PLAN, request))
    assert reply.launch_plan == b""
    assert not reply.objects


def test_an_object_comes_in_pieces_over_grpc(apart: tw.Client) -> None:
    reply = plan_of(apart)
    (item,) = reply.objects
    whole = fetch(apart, reply.plan, item.sha256)
    assert (whole.content, whole.bytes) == (item.content, item.bytes)
    assert fetch(apart, reply.plan, item.sha256, offset=1000).content == item.content[1000:]
    assert fetch(apart, reply.plan, item.sha256, offset=item.bytes).content == b""
    for offset in (-1, item.bytes + 1, 1 << 62):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            fetch(apart, reply.plan, item.sha256, offset=offset)
        assert caught.value.rule == "code_object_range"


def test_an_object_comes_as_a_sealed_file_over_the_local_socket(apart: tw.Client) -> None:
    reply = plan_of(apart)
    (item,) = reply.objects
    told, fds = fetch(apart, reply.plan, item.sha256, local=True)
    (fd,) = fds
    try:
        assert told.bytes == item.bytes
        assert fcntl.fcntl(fd, F_GET_SEALS) & SEALS == SEALS
        assert os.pread(fd, item.bytes + 1, 0) == item.content
        with pytest.raises(OSError, match=r"denied|permitted"):
            os.pwrite(fd, b"x", 0)
    finally:
        os.close(fd)


@pytest.mark.parametrize("local", [False, True], ids=["grpc", "local"])
def test_nobody_fetches_objects_of_plans_that_are_not_his(apart: tw.Client, auto: tw.Client, local: bool) -> None:
    reply = plan_of(apart)
    (item,) = reply.objects
    served = apart.plan_gemm(Spec.of((12, 20), "fp32"), Spec.of((20, 28), "fp32"))._state
    for client, plan, sha256 in (
        (auto, reply.plan, item.sha256),
        (apart, reply.plan + 1, item.sha256),
        (apart, reply.plan, bytes(32)),
        (apart, reply.plan, b""),
        (apart, served.plan, item.sha256),
    ):
        with pytest.raises(tw.NotFoundError):
            fetch(client, plan, sha256, local=local)
    assert fetch(apart, reply.plan, item.sha256).content == item.content


FETCHING = """
import sys
import numpy as np
import tilewright as tw
from tilewright.dispatch.bindings.in_place import opened_plan
from tilewright.launch.library import load_library
from tilewright.transport import rpc
from tilewright.transport.rpc import Rpc
from tilewright_proto.v1 import dispatch_pb2

with tw.connect(sys.argv[1], launch="server") as client:
    a, b = np.ones((12, 20), np.float32), np.ones((20, 28), np.float32)
    request = dispatch_pb2.PlanRequest()
    request.CopyFrom(client.plan_gemm(a, b)._state.request)
    request.placement = dispatch_pb2.PLACEMENT_CALLER

    def flow():
        request.known_objects.extend(item.sha256 for item in (yield Rpc(rpc.PLAN, request)).objects)
        reply = yield Rpc(rpc.PLAN, request)
        assert not any(item.content or load_library().knows(item.sha256) for item in reply.objects)
        return (yield from opened_plan(client._subject, client.session, reply.plan, reply, ("a", "b", "out")))

    if sys.argv[2] == "grpc":
        client.session.control = None
    plan, out = client._drive(flow), np.empty((12, 28), np.float32)
    assert plan.run(plan.pack(*(item.__array_interface__["data"][0] for item in (a, b, out)))) == 0
    assert (out == 20).all()
"""


@pytest.mark.parametrize("way", ["grpc", "local"])
def test_a_client_fetches_what_a_reply_left_out(real_server, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FETCHING, real_server.target, way], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_launch_plan_names_operands_layouts_and_pairs(apart: tw.Client) -> None:
    """The format's numbers at their places, as docs/protocol.md has them."""
    reply = plan_of(apart)
    data = reply.launch_plan
    version, header, total = np.frombuffer(data[8:16], "<u4").tolist() + np.frombuffer(data[16:24], "<u8").tolist()
    kind, team, operands, stages, objects = np.frombuffer(data[56:76], "<u4").tolist()
    assert (version, header, total) == (1, 152, len(data))
    assert (kind, operands, objects) == (1, 3, 1)
    assert team >= 1
    assert stages >= 1
    assert b"\0out\0" in data
