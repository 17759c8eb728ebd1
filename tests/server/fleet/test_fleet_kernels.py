"""Kernels that a server of a fleet has built are not compiled by others; those that are wrong in the storage are."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleet_nodes import ARCH, UNIT, Node

from tilewright_server.hosting.fleet.breaker import Breaker
from tilewright_server.hosting.fleet.kernels import name_of
from tilewright_server.hosting.fleet.seal import Seal
from tilewright_server.hosting.fleet.store import Store
from tilewright_server.protocol.signatures import sign

Nodes = Callable[..., Node]


def warmed(node: Nodes, **options: Any) -> Node:
    """A server that has built the kernel and written it."""
    first = node(**options)
    assert first.build() == "built"
    assert first.kernels.flush(60)
    assert first.count("written") == 1
    return first


def objects(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "storage").rglob("*") if path.is_file()]


def test_one_servers_build_warms_all(node: Nodes) -> None:
    first = warmed(node)
    others = [node() for _ in range(3)]
    assert [other.build() for other in others] == ["cached"] * 3
    assert [other.compiler.made for other in others] == [[], [], []]
    assert {other.binary() for other in others} == {first.binary()}
    assert [other.count("hit") for other in others] == [1, 1, 1]
    assert first.count("miss") == 1


def test_what_came_from_the_fleet_is_not_asked_for_again(node: Nodes) -> None:
    warmed(node)
    second = node()
    assert [second.build(), second.build()] == ["cached", "cached"]
    assert second.count("hit") == 1


def test_a_server_that_may_not_write_reads(node: Nodes, tmp_path: Path) -> None:
    alone = node(write=False)
    assert alone.build() == "built"
    assert alone.kernels.flush(60) and objects(tmp_path) == []


def cut(data: bytes) -> bytes:
    return data[:-100]


def flipped(data: bytes) -> bytes:
    return data[:-5000] + bytes([data[-5000] ^ 1]) + data[-4999:]


def with_digest_of_other_content(data: bytes) -> bytes:
    header, _, content = data.partition(b"\n")
    return json.dumps(json.loads(header) | {"sha256": "0" * 64}).encode() + b"\n" + content


def resealed(content: bytes) -> Callable[[bytes], bytes]:
    """Content that is no kernel, with a digest that is right."""
    return lambda _: Seal().close(content)


@pytest.mark.parametrize(
    "lie",
    [
        cut,
        flipped,
        with_digest_of_other_content,
        lambda _: b"",
        lambda _: b"[" * 5000,
        lambda _: b"<html>404</html>" * 400,
        lambda _: b'{"fleet": 2, "bytes": 0, "sha256": "", "signature": null}\n',
        lambda _: b'{"fleet": 1, "bytes": {}, "sha256": [], "signature": 3}\n',
        resealed(b""),
        resealed(b"no archive"),
        resealed(bytes(10240)),
    ],
)
def test_an_object_that_lies_is_refused_and_written_anew(node: Nodes, tmp_path: Path, lie: Any) -> None:
    warmed(node)
    (path,) = objects(tmp_path)
    path.write_bytes(lie(path.read_bytes()))
    second = node()
    assert second.build() == "built"
    assert (second.count("refused"), second.count("hit")) == (1, 0)
    assert second.kernels.flush(60)
    third = node()
    assert third.build() == "cached"
    assert third.binary() == second.binary()


def test_another_kernel_in_its_place_is_refused(node: Nodes, tmp_path: Path) -> None:
    first = warmed(node)
    other = replace(UNIT, text="int other();")
    first.build(other)
    assert first.kernels.flush(60)
    storage = tmp_path / "storage"
    names = [name_of(first.pool.key(unit, ARCH)) for unit in (UNIT, other)]
    (storage / names[0]).write_bytes((storage / names[1]).read_bytes())
    second = node()
    assert second.build() == "built"
    assert second.count("refused") == 1
    assert second.binary().startswith(UNIT.text.encode())


def test_a_record_that_claims_another_kernels_key_is_refused(node: Nodes, tmp_path: Path) -> None:
    """A writer of the storage may call any kernel by any key: the source tells."""
    first = warmed(node)
    other = replace(UNIT, text="int other();")
    first.build(other)
    assert first.kernels.flush(60)
    storage, seal = tmp_path / "storage", Seal()
    ours, theirs = (first.pool.key(unit, ARCH) for unit in (UNIT, other))
    forged = seal.open((storage / name_of(theirs)).read_bytes()).replace(theirs.encode(), ours.encode())
    (storage / name_of(ours)).write_bytes(seal.close(forged))
    second = node()
    assert second.build() == "built"
    assert second.count("refused") == 1


def test_a_binary_that_could_not_be_loaded_is_not_taken_again(node: Nodes) -> None:
    warmed(node)
    second = node()
    assert second.build() == "cached"
    artifact = second.cache.get(second.pool.key(UNIT, ARCH))
    assert artifact is not None
    second.cache.condemn(artifact)
    assert second.build() == "built"
    assert second.count("refused") == 1


# Signatures


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, tuple[Path, Path]]:
    return {name: make_key(tmp_path, name) for name in ("ours", "theirs")}


def make_key(folder: Path, name: str) -> tuple[Path, Path]:
    pytest.importorskip("cryptography", reason="signatures need cryptography")
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo))
    return private, public


def test_a_signed_kernel_is_taken_where_signatures_are_required(node: Nodes, keys: Any) -> None:
    private, public = keys["ours"]
    warmed(node, seal=Seal(private, public))
    reader = node(seal=Seal(None, public), write=False)
    assert reader.build() == "cached"


@pytest.mark.parametrize("signer", [None, "theirs"])
def test_where_signatures_are_required_no_other_kernel_is_taken(node: Nodes, keys: Any, signer: str | None) -> None:
    warmed(node, seal=Seal(keys[signer][0] if signer else None))
    second = node(seal=Seal(*keys["ours"]))
    assert second.build() == "built"
    assert second.count("refused") == 1
    assert second.kernels.flush(60)
    assert node(seal=Seal(None, keys["ours"][1])).build() == "cached"


def test_a_server_knows_if_it_would_take_what_it_writes(keys: Any) -> None:
    (private, public), (_, foreign) = keys["ours"], keys["theirs"]
    assert Seal().is_trusted and Seal(private, public).is_trusted
    assert not Seal(None, public).is_trusted and not Seal(private, foreign).is_trusted


def test_a_signature_of_other_content_is_refused(node: Nodes, keys: Any, tmp_path: Path) -> None:
    warmed(node, seal=Seal(*keys["ours"]))
    (path,) = objects(tmp_path)
    header, _, content = path.read_bytes().partition(b"\n")
    other = content[:-1] + b"x"
    record = json.loads(Seal().close(other).partition(b"\n")[0]) | {"signature": json.loads(header)["signature"]}
    path.write_bytes(json.dumps(record).encode() + b"\n" + other)
    second = node(seal=Seal(*keys["ours"]))
    assert second.build() == "built"
    assert second.count("refused") == 1


def test_the_signature_of_a_file_is_not_that_of_a_kernel(node: Nodes, keys: Any, tmp_path: Path) -> None:
    """Signatures name contents: one of an archive is good for that content only."""
    warmed(node, seal=Seal())
    (path,) = objects(tmp_path)
    header, _, content = path.read_bytes().partition(b"\n")
    bundle = tmp_path / "some.twb"
    bundle.write_bytes(b"a bundle")
    record = json.loads(header) | {"signature": json.loads(sign(bundle, keys["ours"][0]).read_text())}
    path.write_bytes(json.dumps(record).encode() + b"\n" + content)
    assert node(seal=Seal(None, keys["ours"][1])).build() == "built"


# A storage that is slow, away, or full of work


class Gate(Store):
    """A storage whose writes wait."""

    def __init__(self, url: str) -> None:
        super().__init__(url, 60.0)
        self.opened = threading.Event()

    def write(self, name: str, content: bytes) -> None:
        self.opened.wait(60)
        super().write(name, content)


def test_a_full_queue_drops_and_counts_and_keeps_no_build_waiting(node: Nodes, url: str) -> None:
    store = Gate(url)
    busy = node(store, queue=2)
    units = [replace(UNIT, text=f"int k{number}();") for number in range(6)]
    assert [busy.build(unit) for unit in units] == ["built"] * 6, "though nothing can be written"
    dropped = busy.count("dropped")
    assert dropped >= 3
    assert busy.fleet.state().waiting <= 2
    store.opened.set()
    assert busy.kernels.flush(60)
    assert busy.count("written") == 6 - dropped


def test_the_end_does_not_wait_for_a_storage_that_fails(node: Nodes, tmp_path: Path) -> None:
    (tmp_path / "storage").write_text("a file where a folder should be")
    lonely = node()
    assert lonely.build() == "built"
    assert lonely.build(replace(UNIT, text="int other();")) == "built"
    assert lonely.count("unread") == 2
    assert lonely.fleet.state().serves is False
    lonely.close()
    assert lonely.count("written") == 0


def test_a_breaker_rests_tries_once_and_closes() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, rest_s=10.0, clock=lambda: now[0])
    assert breaker.allows() and not breaker.failed()
    assert breaker.allows() and breaker.failed()
    assert not breaker.allows() and breaker.left_s() == 10.0
    now[0] = 10.0
    assert breaker.allows()
    assert not breaker.allows(), "one try at a time"
    assert not breaker.failed(), "it was open already"
    assert not breaker.allows()
    now[0] = 20.0
    assert breaker.allows()
    breaker.succeeded()
    assert breaker.allows() and breaker.allows()
    assert breaker.opened == 1
