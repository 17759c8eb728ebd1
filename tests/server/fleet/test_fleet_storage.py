"""S3's client against a local S3, and storage that is away, hangs, forbids, or is none."""

from __future__ import annotations

import contextlib
import http.server
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleet_nodes import UNIT, Node

from tilewright_kit.types.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from tilewright_server.hosting.fleet.breaker import Breaker
from tilewright_server.hosting.fleet.fleet import open_fleet
from tilewright_server.hosting.fleet.store import Store
from tilewright_server.settings import Settings

Nodes = Callable[..., Node]


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has S3's client go to a port of this machine, as its own variables say."""
    pytest.importorskip("s3fs", reason="S3 needs s3fs: pip install 'tilewright[fleet]'")

    def to(port: int) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    return to


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    """A local S3 with the bucket `kernels`."""
    pytest.importorskip("moto", reason="the local S3 is moto's: pip install 'moto[s3]' flask flask-cors")
    pytest.importorskip("flask_cors", reason="the local S3 needs flask-cors: pip install flask flask-cors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as server:
        try:
            deadline = time.monotonic() + 120
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
                    break
                assert server.poll() is None and time.monotonic() < deadline, "moto's server did not start"
                time.sleep(0.1)
            make_bucket(port)
            yield port
        finally:
            server.kill()


def make_bucket(port: int) -> None:
    import urllib.request

    request = urllib.request.Request(f"http://127.0.0.1:{port}/kernels", method="PUT")
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


@pytest.mark.extended
def test_kernels_go_through_s3(node: Nodes, endpoint: Callable[[int], None], s3_port: int) -> None:
    endpoint(s3_port)
    first = node(Store("s3://kernels/fleet/a", 60.0))
    assert first.build() == "built"
    assert first.count("miss") == 1, "an object that is not there is no failure"
    assert first.kernels.flush(120) and first.count("written") == 1
    second = node(Store("s3://kernels/fleet/a", 60.0))
    assert second.build() == "cached"
    assert second.binary() == first.binary()
    assert node(Store("s3://kernels/fleet/b", 60.0)).build() == "built", "another folder"


@pytest.mark.extended
def test_folders_of_s3_are_listed_anew(endpoint: Callable[[int], None], s3_port: int) -> None:
    endpoint(s3_port)
    store, other = (Store("s3://kernels/listed", 60.0) for _ in range(2))
    assert store.names("measurements") == []
    other.write("measurements/b", b"2")
    assert store.names("measurements") == ["measurements/b"]
    other.write("measurements/a", b"1")
    assert store.names("measurements") == ["measurements/a", "measurements/b"]
    assert store.read("measurements/a", 1) == b"1"
    with pytest.raises(InvalidArgumentError, match="more than 0 bytes"):
        store.read("measurements/a", 0)
    other.remove("measurements/a")
    assert store.read("measurements/a", 10) is None


@pytest.mark.extended
def test_an_s3_without_the_bucket_is_no_reason_not_to_build(
    node: Nodes, endpoint: Callable[[int], None], s3_port: int
) -> None:
    endpoint(s3_port)
    lonely = node(Store("s3://none-such/fleet", 60.0, Breaker(failures=1, rest_s=1000)))
    assert lonely.build() == "built"
    assert lonely.kernels.counters.written == 0


class Forbids(http.server.BaseHTTPRequestHandler):
    def refuse(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD = do_PUT = refuse

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_storage_that_forbids_is_left_alone_after_some_tries(node: Nodes, endpoint: Callable[[int], None]) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Forbids) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint(server.server_address[1])
        store = Store("s3://kernels/fleet", 60.0, Breaker(failures=2, rest_s=1000))
        refused = node(store, write=False)
        units = [replace(UNIT, text=f"int k{number}();") for number in range(4)]
        assert [refused.build(unit) for unit in units] == ["built"] * 4
        assert refused.count("unread") == 4
        assert not refused.fleet.state().serves
        with pytest.raises(UnavailableError, match="left alone") as caught:
            store.read("kernels/x", 1)
        assert caught.value.rule == "fleet_store" and caught.value.fix
        server.shutdown()


def test_a_storage_that_hangs_costs_its_time_limit_a_few_times(node: Nodes, endpoint: Callable[[int], None]) -> None:
    with socket.socket() as silent:  # connections are made by the system, and nobody answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        endpoint(silent.getsockname()[1])
        hung = node(Store("s3://kernels/fleet", 0.2, Breaker(failures=2, rest_s=1000)), write=False)
        units = [replace(UNIT, text=f"int k{number}();") for number in range(20)]
        begin = time.monotonic()
        assert [hung.build(unit) for unit in units] == ["built"] * 20
        spent = time.monotonic() - begin
        assert hung.count("unread") == 20
        assert hung.fleet.store.breaker.opened == 1
        assert spent < 20, "not as long as an S3 client waits: minutes"


def test_accesses_that_hang_are_bounded(url: str) -> None:
    store = Store(url, 0.02, Breaker(failures=1000))
    ended = threading.Event()
    store._files = SimpleNamespace(open=lambda *args: ended.wait(60))
    before = threading.active_count()
    for _ in range(40):
        with pytest.raises(UnavailableError):
            store.read("a", 1)
    assert threading.active_count() - before <= 32
    with pytest.raises(UnavailableError, match="accesses hang"):
        store.read("a", 1)
    ended.set()


@pytest.mark.parametrize("wrong", ["kernels", "nonsense://x/y", "/var/kernels"])
def test_a_url_that_is_none_is_said_at_the_start(wrong: str) -> None:
    pytest.importorskip("fsspec", reason="the fleet's storage needs fsspec: pip install 'tilewright[fleet]'")
    with pytest.raises(InvalidArgumentError) as caught:
        Store(wrong)
    assert caught.value.rule == "fleet_url" and "s3://" in caught.value.fix


def test_a_package_that_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(UnsupportedError) as caught:
        Store("s3://kernels/fleet")
    assert caught.value.rule == "fleet_package" and "tilewright[fleet]" in caught.value.fix


def test_a_key_that_is_none_is_said_at_the_start(tmp_path: Path, url: str) -> None:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    (tmp_path / "key.pem").write_text("nonsense")
    settings = Settings(fleet=url, fleet_key=tmp_path / "key.pem")
    with ExitStack() as parts, pytest.raises(InvalidArgumentError, match="Ed25519"):
        open_fleet(settings, SimpleNamespace(), lambda: None, parts)  # type: ignore[arg-type]


def test_a_file_is_whole_or_not_there(url: str, tmp_path: Path) -> None:
    store = Store(url)
    store.write("a/b", b"first")
    store.write("a/b", b"second")
    assert store.read("a/b", 100) == b"second"
    assert [path.name for path in (tmp_path / "storage" / "a").iterdir()] == ["b"]
    assert store.names("a") == ["a/b"]
