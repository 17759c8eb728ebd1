"""Holes that advisories of Triton name and that the other files have no test for, and the list of all of them in
`docs/kserve-advisories.md`: each row names tests that are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from rpc_harness import ServerProcess
from test_request_holes import INVALID, SERVICE, A, Client, infer, load

from tilewright_proto.inference import inference_pb2 as pb

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "kserve-advisories.md"
MIB = 2**20
TYPED = (INVALID, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED)
NUMBERS = [
    ("timeout", "int64_param", -(2**63)),
    ("timeout", "int64_param", 2**63 - 1),
    ("timeout", "uint64_param", 2**64 - 1),
    ("timeout", "double_param", float("nan")),
    ("timeout", "string_param", "1e999"),
    ("priority", "uint64_param", 2**64 - 1),
    ("priority", "double_param", float("inf")),
    ("alpha", "uint64_param", 2**64 - 1),
    ("alpha", "double_param", float("nan")),
    ("repeat", "int64_param", -(2**63)),
    ("shared_memory_offset", "uint64_param", 2**64 - 1),
]


@pytest.fixture
def client(tcp: str) -> Iterator[Client]:
    """One whose server multiplies after the test as before."""
    made = Client(tcp)
    yield made
    assert made.call(infer()).raw_output_contents == [(A @ A).tobytes()]
    made.channel.close()


def test_each_advisory_names_tests_that_are_there() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| CVE-")]
    assert len(rows) == len({row.split(" ")[1] for row in rows}) >= 50
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        numbers = re.findall(r"\d+", cells[2])
        assert cells[1] and numbers, row
    tests = re.findall(r"^(\d+)\. `(tests/\S+\.py)`:\s+`(test_\w+)`", PAGE.read_text("utf-8"), re.MULTILINE)
    listed = {int(number) for number, *_ in tests}
    assert listed >= {int(number) for row in rows for number in re.findall(r"\d+", row.strip("|").split("|")[2])}
    for _, file, name in tests:
        assert f"def {name}(" in (ROOT / file).read_text("utf-8"), f"{file}::{name}"


@pytest.mark.parametrize(("name", "kind", "value"), NUMBERS, ids=lambda value: str(value)[:24])
def test_numbers_of_parameters_that_fit_no_type_change_nothing(
    client: Client, name: str, kind: str, value: float | str
) -> None:
    """Answered as if they were sensible, or refused in typed words."""
    request = infer()
    setattr(request.parameters[name], kind, value)
    try:
        assert len(client.call(request).raw_output_contents) == 1
    except grpc.RpcError as error:
        assert error.code() in (*TYPED, grpc.StatusCode.DEADLINE_EXCEEDED), error


@pytest.mark.parametrize("what", ["dimensions", "inputs", "parameters", "requested outputs", "contents"])
def test_more_of_anything_than_there_can_be_is_refused_in_a_moment(
    client: Client, server: ServerProcess, what: str
) -> None:
    request, before = infer(), server.rss_mib()
    if what == "dimensions":
        request.inputs[0].shape.extend([1] * 200_000)
    elif what == "inputs":
        for place in range(50_000):
            request.inputs.add(name=f"x{place}", datatype="FP32", shape=(1,))
    elif what == "parameters":
        for place in range(50_000):
            request.parameters[f"x{place}"].int64_param = place
    elif what == "requested outputs":
        for place in range(50_000):
            request.outputs.add(name=f"x{place}")
    else:
        request.raw_input_contents.extend([b"x"] * 50_000)
    client.refused(request, *TYPED)
    assert server.rss_mib() < before + 200


def test_a_configuration_of_a_model_reads_no_file(client: Client, tmp_path: Path) -> None:
    """Neither a path in it nor a file that it names is opened: its contents are not in any answer."""
    secret = tmp_path / "secret"
    secret.write_text("the-secret-itself")
    inputs = f'"input": [{{"name": "a", "data_type": "TYPE_FP32", "dims": [4, 4], "label_filename": "{secret}"}}]'
    for text in (
        f'{{{inputs}, "parameters": {{"EXECUTION_ENV_PATH": {{"string_value": "{secret}"}}}}}}',
        f'{{"default_model_filename": "{secret}", {inputs}}}',
        f'{{"name": "../../{secret}", "platform": "{secret}"}}',
        str(secret),
        f"file://{secret}",
    ):
        assert "the-secret-itself" not in client.refused(load("tilewright.gemm@x", text), *TYPED)


def test_the_server_has_no_memory_under_a_name_that_a_client_could_register(
    client: Client, server: ServerProcess
) -> None:
    """Memory that the server shares with its own processes has descriptors only, so no request for it can be made."""
    client.call(infer())
    mapped = Path(f"/proc/{server.pid}/maps").read_text().split("\n")
    assert not [line for line in mapped if "/dev/shm/" in line]


@pytest.mark.extended
@pytest.mark.parametrize("method", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=["gzip", "deflate"])
def test_a_message_that_grows_by_decompression_is_refused_before_it_has(
    server: ServerProcess, tcp: str, method: grpc.Compression
) -> None:
    """300 MiB of zeros, in a third of a megabyte."""
    request = infer()
    request.raw_input_contents[0] = bytes(300 * MIB)
    before = server.rss_mib()
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(tcp, options=options, compression=method) as channel:
        call = channel.unary_unary(SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, bytes)
        with pytest.raises(grpc.RpcError) as caught:
            call(request, timeout=120)
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, caught.value
    peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
    assert peak is not None and int(peak[1]) / 1024 < before + 150


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grpc-timeout", "99999999999999S"),
        ("traceparent", "00-" + "f" * 4000),
        ("x-request-id", "\x20" * 4000),
        ("grpc-trace-bin", b"\xff" * 4000),
        ("authorization", "Bearer " + "=" * 4000),
        ("grpc-previous-rpc-attempts", "-1"),
        ("content-encoding", "gzip"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_headers_that_are_malformed_end_no_server(client: Client, name: str, value: str | bytes) -> None:
    call = client.channel.unary_unary(SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, bytes)
    try:
        call(infer(), metadata=[(name, value)], timeout=60)
    except grpc.RpcError as error:
        assert error.code() != grpc.StatusCode.UNAVAILABLE, error


def test_what_is_refused_again_and_again_is_kept_nowhere(client: Client, server: ServerProcess) -> None:
    def refuse(times: int) -> None:
        for place in range(times):
            client.refused(load(f"tilewright.gemm@x{place}", "{"), INVALID)
            client.refused(infer((4, 5)), INVALID)

    refuse(100)
    before = server.rss_mib()
    refuse(400)
    assert server.rss_mib() < before + 8
    assert server.regions() == (0, 0)


def test_a_region_is_the_object_that_was_registered_and_no_later_one_of_its_name(client: Client) -> None:
    """Its descriptor is held, and is no other's when the region has ended."""
    key = f"/tw-advisories-{id(client)}"
    path = Path(f"/dev/shm{key}")
    try:
        path.write_bytes(A.tobytes())
        client.call(pb.SystemSharedMemoryRegisterRequest(name="r", key=key, byte_size=64))
        path.unlink()
        path.write_bytes(np.full((4, 4), 7, np.float32).tobytes())
        request = infer()
        del request.raw_input_contents[0]
        request.inputs[0].parameters["shared_memory_region"].string_param = "r"
        request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 64
        assert client.call(request).raw_output_contents == [(A @ A).tobytes()]
        client.call(pb.SystemSharedMemoryUnregisterRequest(name="r"))
        client.refused(request, *TYPED)
    finally:
        path.unlink(missing_ok=True)
