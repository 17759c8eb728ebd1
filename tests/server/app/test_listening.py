"""Where a server listens, who may reach it, and what it does about others that were there before."""

from __future__ import annotations

import os
import signal
import socket
import stat
from pathlib import Path

import grpc
import pytest
from rpc_harness import Client, MemoryFile, ServerProcess, in_region, inline, refused

from tilewright_kit.types.errors import AccessError, InvalidArgumentError, TilewrightError
from tilewright_server.endpoints.rpc.listeners import TcpAddress, UnixAddress, parse_address


def test_the_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    with ServerProcess(tmp_path, listen=f"unix:{tmp_path}/deep/er/s.sock") as server:
        path = tmp_path / "deep" / "er" / "s.sock"
        assert server.addresses == [f"unix:{path}"]
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not list(path.parent.iterdir()), "socket and lock are removed"


@pytest.mark.extended
def test_a_dead_servers_socket_is_replaced(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as first:
        first.signal(signal.SIGKILL)
        first.wait()
        assert first.socket.exists()
        with ServerProcess(tmp_path) as second, Client(second.addresses[0]) as client:
            assert client.token


@pytest.mark.extended
def test_a_live_server_keeps_its_socket(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as first, Client(first.addresses[0]) as client:
        with ServerProcess(tmp_path) as second:
            assert second.wait() == 1
            assert "another server listens there" in second.log()
        client.status()
        with Client(first.addresses[0]) as again:
            again.status()


def test_another_programs_socket_is_left_alone(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s.sock"))
        other.listen()
        with ServerProcess(tmp_path) as server:
            assert server.wait() == 1
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(str(tmp_path / "s.sock"))


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s.sock").write_text("precious")
    with ServerProcess(tmp_path) as server:
        assert server.wait() == 1
    assert (tmp_path / "s.sock").read_text() == "precious"


@pytest.mark.parametrize("mode", [0o777, 0o2775])
@pytest.mark.extended
def test_below_a_folder_that_others_can_write_to_it_makes_its_own(tmp_path: Path, mode: int) -> None:
    """As the volumes of a pod are."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    own = folder / f"tilewright-{os.geteuid()}"
    for _ in range(2):  # the folder stays, and is taken again
        with ServerProcess(tmp_path, listen=f"unix:{folder}/s.sock") as server:
            assert server.addresses == [f"unix:{own}/s.sock"], server.log()
            assert f"listening on {own}/s.sock instead" in server.log()
            assert stat.S_IMODE(own.stat().st_mode) & 0o777 == 0o700
            with Client(server.addresses[0]) as client:
                assert client.token


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "others"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, 4711, 4711)
    with ServerProcess(tmp_path, listen=f"unix:{folder}/s.sock") as server:
        assert server.wait() == 1
        assert "can be changed by other users" in server.log()


@pytest.mark.extended
def test_sockets_take_the_mode_and_group_that_are_set(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/made/s.sock"
    with ServerProcess(tmp_path, listen=listen, socket_mode="660", socket_group=os.getegid()) as server:
        assert server.ready, server.log()
        folder = tmp_path / "made"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o710
        for path in (folder / "s.sock", folder / "s.sock.local"):
            assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) == (0o660, os.getegid())
    with ServerProcess(tmp_path, listen=listen, socket_group="no such group") as server:
        assert server.wait() == 1
        assert "there is no such group" in server.log()


def test_several_addresses_and_tcp_without_shared_memory(tmp_path: Path) -> None:
    listen = f"unix:{tmp_path}/a.sock,unix:{tmp_path}/b.sock,127.0.0.1:0"
    with ServerProcess(tmp_path, listen=listen, insecure="true") as server:
        assert server.addresses[:2] == [f"unix:{tmp_path}/a.sock", f"unix:{tmp_path}/b.sock"]
        assert not server.addresses[2].endswith(":0"), "the port that the system chose"
        for address in server.addresses:
            with Client(address) as client:
                assert client.copy(inline(bytes(64))).outputs[0].inline == bytes(64)
                assert client.opened.shared_memory == address.startswith("unix:")
        file = MemoryFile(4096)
        with Client(server.addresses[2]) as remote:
            with refused("permission_denied", "region_transport") as found:
                remote.register(file)
            assert "Unix socket" in found[0].fix
        with Client(server.addresses[1]) as local:
            local.copy(in_region(local.register(file).region))
        file.close()


@pytest.mark.parametrize("address", ["127.0.0.1:7070", "localhost:7070", "[::1]:7070"])
def test_tcp_has_to_be_allowed(tmp_path: Path, address: str) -> None:
    with pytest.raises(AccessError) as caught:
        parse_address(address, insecure=False)
    assert caught.value.rule == "listen_insecure"
    assert "--insecure" in caught.value.fix
    assert isinstance(parse_address(address, insecure=True), TcpAddress)
    if address == "127.0.0.1:7070":
        with ServerProcess(tmp_path, listen=address) as server:
            assert server.wait() == 1
            assert "--insecure" in server.log()


@pytest.mark.parametrize("address", ["0.0.0.0:7070", "[::]:7070", "10.0.0.1:7070", "example.org:80"])
def test_only_loopback_is_listened_on(address: str) -> None:
    with pytest.raises(AccessError) as caught:
        parse_address(address, insecure=True)
    assert caught.value.rule == "listen_loopback"


@pytest.mark.parametrize(
    "address", ["", "unix:", "unix:a\0b", "unix:" + "x" * 200, "7070", ":7070", "127.0.0.1:", "127.0.0.1:99999", "h:-1"]
)
def test_nonsense_is_a_typed_error(address: str) -> None:
    with pytest.raises(TilewrightError) as caught:
        parse_address(address, insecure=True)
    assert isinstance(caught.value, (InvalidArgumentError, AccessError))
    assert caught.value.field == "listen"


def test_unix_addresses_come_in_two_spellings() -> None:
    expected = UnixAddress(Path("/tmp/x.sock"))
    assert parse_address("unix:/tmp/x.sock", insecure=False) == expected
    assert parse_address("unix:///tmp/x.sock", insecure=False) == expected


def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with ServerProcess(tmp_path, listen=f"unix:{tmp_path}/s.sock,{address}", insecure="1") as server:
            assert server.wait() == 1
            assert f"cannot listen on {address}" in server.log()
    assert not (tmp_path / "s.sock").exists(), "what was bound before is taken back"
    assert not list(tmp_path.glob("*.lock"))


def test_an_unknown_method_is_unimplemented(tmp_path: Path) -> None:
    with ServerProcess(tmp_path) as server, Client(server.addresses[0]) as client:
        nothing = client.channel.unary_unary("/tilewright.v1.Dispatch/Nothing")
        with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
            nothing(b"")
