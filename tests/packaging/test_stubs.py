"""The checked-in stubs are what the protocol's files say, and run on every protobuf that the metadata allows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What pip says when it cannot reach an index at all, as opposed to finding nothing there.
OFFLINE = (
    "Temporary failure in name resolution",
    "Network is unreachable",
    "Connection refused",
    "NewConnectionError",
    "ProxyError",
)

ROUND_TRIP = """
import google.protobuf
from tilewright_proto.v1 import dispatch_pb2, error_pb2, kernels_pb2, memory_pb2, tensor_pb2
from tilewright_proto.v1 import dispatch_pb2_grpc, kernels_pb2_grpc, memory_pb2_grpc
request = dispatch_pb2.RunRequest(operation="gemm")
request.inputs.add(name="a").spec.shape.extend([2, 3])
request.attributes["alpha"].number = 0.5
again = dispatch_pb2.RunRequest.FromString(request.SerializeToString())
assert again == request and list(again.inputs[0].spec.shape) == [2, 3]
print(google.protobuf.__version__)
"""


def skip_if_offline(what: str, stderr: str) -> None:
    if any(sign in stderr for sign in OFFLINE):
        pytest.skip(f"{what} is not installed here and no package index can be reached")


def test_stubs_are_fresh(root: Path) -> None:
    command = [sys.executable, str(root / "proto" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    skip_if_offline("grpcio-tools", done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("wanted", ["6.30.*", "7.*"])
@pytest.mark.extended
def test_stubs_run_on_protobuf(wanted: str, root: Path, tmp_path: Path) -> None:
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(tmp_path),
        f"protobuf=={wanted}",
    ]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=240)
    skip_if_offline(f"protobuf {wanted}", done.stderr)
    assert done.returncode == 0, done.stderr
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root / 'proto'}"}
    # Warnings are errors: protobuf warns, before it refuses, when stubs are older than it likes.
    command = [sys.executable, "-W", "error", "-c", ROUND_TRIP]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(wanted.rstrip("*"))
