"""Links, and files in the place of folders, where the cache keeps its own."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_artifacts import key_of, loaded, publish

from tilewright_kit.types.errors import AccessError
from tilewright_server.build.cache.artifacts import META, ArtifactCache
from tilewright_server.build.cache.maintenance import list_entries


@pytest.mark.parametrize("what", ["entry", "dangling", "file", "lock", "loop"])
def test_link_or_file_in_the_place_of_something_else_is_moved_aside(
    what: str, cache: ArtifactCache, tmp_path: Path
) -> None:
    key = publish(cache)
    entry = cache.entry(key)
    elsewhere = entry.rename(tmp_path / "elsewhere")
    if what in ("entry", "dangling"):
        entry.symlink_to(elsewhere if what == "entry" else tmp_path / "nothing")
    elif what == "file":
        entry.write_text("not a folder")
    elif what == "loop":
        entry.symlink_to(entry)
    else:
        (cache.root / "locks" / key).symlink_to(tmp_path / "target")
    assert cache.get(key) is None
    lock = cache.try_build_lock(key)
    assert lock is not None
    publish(cache)
    cache.end_build(key, lock)
    loaded(cache, key).release()
    assert not (tmp_path / "target").exists()
    assert (elsewhere / "meta.json").exists()
    assert cache.evict(key)


SPOILT = {
    "loop": lambda path: path.symlink_to(path),
    "dangling": lambda path: path.symlink_to("nothing"),
    "file": lambda path: path.write_bytes(b"no folder"),
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize(
    "place", ["objects", "quarantine", "staging", "locks", "shard", "entry", "meta", "binary", "huge"]
)
@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_whatever_lies_where_the_cache_has_its_own_it_works_again(
    cache: ArtifactCache, place: str, spoil: Callable[[Path], None]
) -> None:
    key = publish(cache)
    entry = cache.entry(key)
    meta = json.loads((entry / META).read_text())
    places = {"shard": entry.parent, "entry": entry, "meta": entry / META, "binary": entry / meta["binary"]}
    spoilt = places.get(place, entry / META if place == "huge" else cache.root / place)
    spoilt.rename(cache.root.parent / "elsewhere")
    if place == "huge":
        with spoilt.open("wb") as file:
            file.truncate(1 << 40)
    else:
        spoil(spoilt)
    again = ArtifactCache(cache.root)
    found = again.get(key)
    if found is None:
        lock = again.try_build_lock(key)
        assert lock is not None
        publish(again)
        again.end_build(key, lock)
    else:
        found.release()
    loaded(again, key).release()
    assert [item.key for item in list_entries(again)] == [key]


def test_links_to_folders_of_ours_alone_are_followed(cache: ArtifactCache, tmp_path: Path) -> None:
    key = publish(cache)
    elsewhere = cache.objects.rename(tmp_path / "elsewhere")
    cache.objects.symlink_to(elsewhere)
    loaded(ArtifactCache(cache.root), key).release()
    elsewhere.chmod(0o777)
    with pytest.raises(AccessError) as caught:
        ArtifactCache(cache.root)
    assert caught.value.rule == "cache_private"


def test_link_is_evicted_without_what_it_leads_to(cache: ArtifactCache, tmp_path: Path) -> None:
    key = publish(cache)
    elsewhere = cache.entry(key).rename(tmp_path / "elsewhere")
    cache.entry(key).symlink_to(elsewhere)
    assert cache.evict(key)
    assert not cache.contains(key)
    for number in range(2, 30):  # beyond what the quarantine keeps
        cache.entry(publish(cache, number)).rename(tmp_path / f"{number}")
        cache.entry(key_of(number)).symlink_to(tmp_path / f"{number}")
        assert cache.get(key_of(number)) is None
    assert len(list((cache.root / "quarantine").iterdir())) == 16
    assert (elsewhere / "meta.json").exists()
