"""Links, and files in the place of folders, where the cache keeps its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_artifacts import key_of, loaded, publish

from tilewright_server.build.cache.artifacts import ArtifactCache


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
