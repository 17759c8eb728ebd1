"""Calls with arrays on a GPU, against a server that only writes down what it is asked and a driver in host memory: what
is exported, planned, bound and launched, and in which order streams and events are used.
"""

import gc
import sys

import numpy as np
import pytest
from device_operands import STREAM, operands, settled
from producers import Capsules, Interface

import tilewright as tw
from tilewright.gpu import cuda
from tilewright.transport import frames as packets


def test_a_product_is_exported_planned_bound_and_launched_once_each(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    for _ in range(5):
        assert client.gemm(a, b, out=c) is c
    assert len(server.registered) == len(server.planned) == len(server.bound) == 1
    source = server.registered[0].cuda_ipc
    assert len(source.handle) == 64
    assert (source.offset, server.registered[0].bytes) == (0, 1 << 20)
    assert source.device_uuid == cuda.format_uuid(bytes(range(16)))
    assert server.planned[0].selection.device == "cuda:0"
    slices = [place.region.offset for place in server.bound[0].execution.locations]
    assert slices == [0, 4096, 8192]
    assert [launch[0] for launch in server.peer.launches] == [9001] * 5
    assert server.peer.attached == ["cuda:0"]
    assert server.executed == []
    assert client.report.kernels is not None


def test_a_launch_waits_for_the_stream_and_the_stream_for_it_without_the_host(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    client.gemm(a, b, out=c)
    fake.log.clear()
    client.gemm(a, b, out=c)
    names = [entry[0] for entry in fake.log if entry[0] != "attributes"]
    assert names == ["record", "wait"]
    record, wait = fake.calls("record")[0], fake.calls("wait")[0]
    assert (record[1], wait[0]) == (STREAM, STREAM)
    assert fake.events[record[0]] == "own"
    assert fake.events[wait[1]].startswith("theirs C")
    assert server.peer.launches[-1][1] == packets.WAIT | packets.RECORD | packets.REPLY
    assert not fake.calls("synchronize")
    assert not fake.calls("event synchronize")


def test_nothing_is_put_on_a_stream_that_has_nothing_to_wait_for(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    client.gemm(a, b, out=c)
    fake.log.clear()
    fake.busy = False
    client.gemm(a, b, out=c)
    assert not fake.calls("record")
    assert not fake.calls("wait")
    assert server.peer.launches[-1][1] == packets.RECORD | packets.REPLY


def test_a_result_that_is_not_given_is_made_by_the_library_of_the_operands(client, torch, fake) -> None:
    a, b, _ = operands(torch, fake, 8, "bfloat16")
    result = client.gemm(a, b)
    assert isinstance(result, torch.Tensor)
    assert torch.made == [((8, 8), "bfloat16", "cuda:0")]


@pytest.mark.extended
def test_an_array_of_no_known_library_gets_a_device_array(client, server, fake) -> None:
    base = fake.allocate(1 << 16)
    a = Interface(base, (4, 4), stream=7)
    result = client.gemm(a, a)
    assert isinstance(result, tw.DeviceArray)
    assert (result.shape, result.dtype, result.device) == ((4, 4), np.float32, "cuda:0")
    assert result.__cuda_array_interface__["stream"] == 7
    assert server.bound[0].execution.locations[2].WhichOneof("place") == "buffer"
    assert client.gemm(result, a, out=result) is result
    result.copy_from(np.eye(4, dtype=np.float32))
    assert (result.numpy() == np.eye(4)).all()
    capsule = result.__dlpack__(stream=9, max_version=(1, 0))
    assert fake.log[-2][0] == "record"
    assert fake.log[-1][:2] == ("wait", 9)
    del capsule
    opened = [entry for entry in fake.allocations.values() if entry.foreign]
    assert len(opened) == 1
    del result
    client.release_exports()
    client.close()
    gc.collect()
    assert not [entry for entry in fake.allocations.values() if entry.foreign]


def test_arrays_that_are_ready_on_other_streams_are_waited_for(client, fake) -> None:
    base = fake.allocate(1 << 16)
    a, b = Interface(base, (4, 4), stream=7), Interface(base + 4096, (4, 4), stream=8)
    out = Interface(base + 8192, (4, 4), stream=9)
    client.gemm(a, b, out=out)
    assert {stream for _, stream in fake.calls("record")} == {7, 8, 9}
    before, after = fake.calls("wait")[:2], fake.calls("wait")[2:]
    assert {stream for stream, _ in before} == {9}
    assert {stream for stream, _ in after} == {7, 8, 9}  # a and b may be written again when they were read


def test_a_device_array_follows_the_stream_that_it_is_used_on(client, fake, torch) -> None:
    base = fake.allocate(1 << 16)
    a = torch.Tensor(base, (4, 4))
    array = client.device_empty((4, 4))
    client.gemm(a, a, out=array)
    assert array.__cuda_array_interface__["stream"] == STREAM
    fake.log.clear()
    torch.current = 43
    bound = client.plan_gemm(a, array).bind(a, array, out=a)
    bound()
    assert array.__cuda_array_interface__["stream"] == 43
    assert ("record", STREAM) in {(entry[0], entry[-1]) for entry in fake.log}


@pytest.mark.extended
def test_memory_whose_owner_knows_no_streams_is_kept_until_it_is_read(client, fake) -> None:
    base = fake.allocate(1 << 16)
    value = Capsules(base, (4, 4))
    before = sys.getrefcount(value)
    client.gemm(value, value, out=Capsules(base + 4096, (4, 4)))
    gc.collect()
    assert sys.getrefcount(value) > before
    other = Capsules(base + 8192, (4, 4))
    client.gemm(other, other, out=Capsules(base + 4096, (4, 4)))  # the first is over by now
    gc.collect()
    assert sys.getrefcount(value) == before


def test_an_address_that_was_freed_and_used_again_is_exported_again(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    client.gemm(a, b, out=c)
    base = a.address
    fake.replace(base)
    client.gemm(a, b, out=c)
    assert settled(client, lambda: len(server.unregistered) == 1)
    assert len(server.registered) == 2
    assert len(server.bound) == 2


def test_allocations_that_are_gone_are_given_back_when_others_are_exported(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    client.gemm(a, b, out=c)
    del fake.allocations[a.address]
    client.gemm(*operands(torch, fake)[:2], out=operands(torch, fake)[2])
    assert settled(client, lambda: len(server.unregistered) == 1)


def test_exports_are_given_back_on_request(client, server, torch, fake) -> None:
    a, b, c = operands(torch, fake)
    client.gemm(a, b, out=c)
    client.release_exports()
    assert len(server.unregistered) == 1
    client.gemm(a, b, out=c)
    assert len(server.registered) == 2


@pytest.mark.parametrize(("kind", "source"), [("pool", "cuda_pool"), ("mapped", "device_fd")])
def test_memory_without_legacy_handles_goes_by_descriptor(client, server, torch, fake, kind: str, source: str) -> None:
    base = fake.allocate(1 << 20, kind)
    a, b, c = (torch.Tensor(base + offset, (8, 8)) for offset in (0, 4096, 8192))
    client.gemm(a, b, out=c)
    assert [request.WhichOneof("source") for request in server.registered] == [source]
    for fd in fake.descriptors:
        with pytest.raises(OSError):
            np.fromfile(f"/proc/self/fd/{fd}", np.uint8)


@pytest.mark.parametrize(
    ("kind", "error", "rule"),
    [
        ("private", tw.UnsupportedError, "device_memory_shareable"),
        ("managed", tw.InvalidArgumentError, "device_memory_kind"),
    ],
)
def test_memory_that_cannot_be_shared_is_refused(client, torch, fake, kind: str, error: type, rule: str) -> None:
    base = fake.allocate(1 << 16, kind)
    with pytest.raises(error) as caught:
        client.gemm(torch.Tensor(base, (4, 4)), torch.Tensor(base, (4, 4)))
    assert caught.value.rule == rule
    assert caught.value.fix


def test_a_tensor_across_mappings_goes_by_all_their_descriptors(client, server, torch, fake) -> None:
    base = fake.allocate_parts(4096, 4)
    a, b, c = (torch.Tensor(base + offset, (32, 32)) for offset in (0, 4096 + 256, 8192 + 256))
    for _ in range(2):
        client.gemm(a, b, out=c)
    assert [list(request.device_fd.part_bytes) for request in server.registered] == [[], [4096, 4096], [4096, 4096]]
    assert [request.bytes for request in server.registered] == [4096, 8192, 8192]
    assert len(fake.descriptors) == 5
    for fd in fake.descriptors:
        with pytest.raises(OSError):
            np.fromfile(f"/proc/self/fd/{fd}", np.uint8)
    fake.replace(base + 8192)  # in the second of b, and the first of c
    client.gemm(a, b, out=c)
    assert len(server.registered) == 5


def test_a_tensor_across_too_many_mappings_or_beyond_them_is_refused(client, torch, fake) -> None:
    base = fake.allocate_parts(32, 130)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(torch.Tensor(base, (8, 8)), torch.Tensor(base, (8, 129)))
    assert (caught.value.field, caught.value.rule) == ("b", "device_memory_parts")
    assert caught.value.fix
    base = fake.allocate_parts(1024, 3)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(torch.Tensor(base, (32, 32)), torch.Tensor(base, (32, 32)))
    assert caught.value.rule == "region_bounds"


def test_a_device_that_the_server_does_not_run_is_refused_by_its_uuid(client, torch, fake) -> None:
    base = fake.allocate(1 << 16, ordinal=1)
    with pytest.raises(tw.UnsupportedError, match="GPU-10111213") as caught:
        client.gemm(torch.Tensor(base, (4, 4), index=1), torch.Tensor(base, (4, 4), index=1))
    assert caught.value.rule == "device_visible"


def test_operands_on_two_devices_are_refused(client, server, torch, fake, monkeypatch) -> None:
    first, second = fake.allocate(1 << 16), fake.allocate(1 << 16, ordinal=1)
    session = client.session
    session.gpus[bytes(range(16, 32)).hex()] = session.devices[0]
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(torch.Tensor(first, (4, 4)), torch.Tensor(second, (4, 4), index=1))
    assert caught.value.rule == "one_device"


def test_odd_addresses_are_told_to_the_planner(client, server, torch, fake) -> None:
    base = fake.allocate(1 << 16)
    aligned, odd = torch.Tensor(base, (4, 4), "float16"), torch.Tensor(base + 4098, (4, 4), "float16")
    client.gemm(aligned, aligned, out=torch.Tensor(base + 8192, (4, 4), "float16"))
    client.gemm(aligned, odd, out=torch.Tensor(base + 8192, (4, 4), "float16"))
    assert "alignment" not in server.planned[0].attributes
    assert server.planned[1].attributes["alignment"].integer == 2


def test_layouts_that_no_kernel_takes_are_copied_by_their_library(client, server, torch, fake) -> None:
    base = fake.allocate(1 << 16)
    a = torch.Tensor(base, (4, 4), strides=(8, 2))
    out = torch.Tensor(base + 8192, (4, 4), strides=(1, 4))
    assert client.gemm(a, torch.Tensor(base, (4, 4), strides=(1, 8)), out=out) is out
    kinds = [item if isinstance(item, str) else item[0] for item in torch.made]
    assert kinds == ["contiguous", (4, 4), "copy"]
    assert list(server.planned[0].inputs[1].spec.strides) == [1, 8]
    assert list(server.planned[0].inputs[0].spec.strides) == []
