"""Archives of kernels that are cut off, damaged or made up: refused with a reason, and nothing of them stays."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from artifact_meta import meta_of

from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import InvalidArgumentError, ResourceExhaustedError
from tilewright_server.build.cache import maintenance
from tilewright_server.build.cache.artifacts import ArtifactCache, ArtifactMeta
from tilewright_server.build.cache.budget import Budget

KEY = "ab" * 32
BINARY = random.Random(0).randbytes(4000)


def record(**changes: Any) -> bytes:
    """What an entry says of itself."""
    return json.dumps(json.loads(meta_of(KEY, BINARY).to_json()) | changes).encode()


def members(meta: bytes | None = None, **more: bytes) -> dict[str, bytes]:
    return {"kernel.cpp": b"int x;\n", "kernel.so": BINARY, "log.txt": b"", "meta.json": meta or record(), **more}


def packed(files: Mapping[str, bytes], key: str = KEY) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"{key}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return data.getvalue()


def flipped(data: bytes, seed: int) -> bytes:
    numbers = random.Random(seed)
    changed = bytearray(data)
    for _ in range(8):
        changed[numbers.randrange(40, len(changed))] ^= 1 << numbers.randrange(8)
    return bytes(changed)


GOOD = packed(members())
ZIPPED = gzip.compress(GOOD, mtime=0)
CUT: dict[str, bytes] = {f"cut-{part}": ZIPPED[: len(ZIPPED) * part // 10] for part in range(10)}
FLIPPED: dict[str, bytes] = {f"flipped-{seed}": flipped(ZIPPED, seed) for seed in range(10)}
FORGED: dict[str, Callable[[], bytes]] = {
    "no-archive": lambda: b"anything",
    "xz": lambda: b"\xfd7zXZ\x00" + bytes(100),
    "bz2": lambda: b"BZh9" + bytes(100),
    "deep": lambda: packed(members(b"[" * 100_000)),
    "number": lambda: packed(members(b"1")),
    "source-is-the-record": lambda: packed(members(record(source="meta.json"))),
    "binary-is-the-log": lambda: packed(members(record(binary="log.txt"))),
    "binary-is-the-source": lambda: packed(members(record(source="kernel.so"))),
    "no-name": lambda: packed(members(record(source=""), **{"": b"int x;"})),
    "parent": lambda: packed(members(record(source=".."), **{"..": b"int x;"})),
    "nul": lambda: packed(members(record(source="a\0b"), **{"a\0b": b"int x;"})),
    "flags": lambda: packed(members(record(flags=[1, {}]))),
    "flags-of-letters": lambda: packed(members(record(flags="-O2"))),
    "entries": lambda: packed(members(record(entries=["main"]))),
    "entries-of-numbers": lambda: packed(members(record(entries={"main": 1}))),
    "arch": lambda: packed(members(record(arch=None))),
    "bytes": lambda: packed(members(record(binary_bytes=1))),
    "bytes-in-words": lambda: packed(members(record(binary_bytes="many"))),
    "no-text": lambda: packed(members(**{"kernel.cpp": b"\xff\xfe"})),
    "many": lambda: packed(members(**{f"extra{number}": b"" for number in range(100)})),
}


@pytest.mark.parametrize("name", [*CUT, *FLIPPED, *FORGED])
def test_what_is_no_archive_of_ours_is_refused_and_leaves_nothing(
    name: str, cache: ArtifactCache, tmp_path: Path
) -> None:
    archive = tmp_path / "kernels.tar.gz"
    archive.write_bytes(FORGED[name]() if name in FORGED else {**CUT, **FLIPPED}[name])
    with pytest.raises(InvalidArgumentError) as caught:
        maintenance.import_entries(cache, archive)
    assert (caught.value.field, caught.value.rule) == ("archive", "cache_archive")
    assert caught.value.fix
    assert not cache.all_keys()
    assert not [path for path in (cache.root / "staging").iterdir() if path.name != ".lock"]


def test_the_archive_that_they_were_made_from_is_good(cache: ArtifactCache, tmp_path: Path) -> None:
    for suffix, data in (("tar", GOOD), ("tar.gz", ZIPPED)):
        archive = tmp_path / f"kernels.{suffix}"
        archive.write_bytes(data)
        imported = maintenance.import_entries(cache, archive)
        assert imported.added + imported.present == (KEY,)
    assert maintenance.verify(cache) == [maintenance.Checked(KEY, meta_of(KEY).name, "")]


def test_an_entry_is_not_read_beyond_a_size(
    cache: ArtifactCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However small it is when it is packed, and into how many members it is divided."""
    monkeypatch.setattr(maintenance, "_MAX_ENTRY", 20_000)
    archive = tmp_path / "kernels.tar.gz"
    for large in ({"log.txt": bytes(20_001)}, {"log.txt": bytes(9000), "extra": bytes(9000)}):
        archive.write_bytes(gzip.compress(packed(members(**large))))
        with pytest.raises(InvalidArgumentError, match="too large"):
            maintenance.import_entries(cache, archive)
    assert not cache.all_keys()


# The budget


def test_a_kernel_that_was_published_counts_though_no_room_can_be_made(
    cache: ArtifactCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    cache.max_bytes = 1
    budget = Budget(cache)
    with cache.staging() as staging:
        meta = ArtifactMeta.from_json(record())
        cache.publish(SourceUnit("kernel", "c++", "int x;\n", {}), meta, BINARY, "", staging)
    with monkeypatch.context() as patch:
        patch.setattr(cache.files, "lock_entry", refuse)
        budget.added(len(BINARY))
    with pytest.raises(ResourceExhaustedError), monkeypatch.context() as patch:
        patch.setattr(cache.files, "lock_entry", refuse)
        maintenance.prune(cache, max_bytes=0)
    assert cache.all_keys() == [KEY]
