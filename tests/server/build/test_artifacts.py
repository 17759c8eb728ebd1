from __future__ import annotations

import errno
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_meta import BINARY, meta_of

from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import AccessError, InternalError, InvalidArgumentError, ResourceExhaustedError
from tilewright_server.build.cache import maintenance
from tilewright_server.build.cache.artifacts import Artifact, ArtifactCache
from tilewright_server.build.cache.files import Files


def key_of(number: int) -> str:
    return f"{number:02x}" * 32


def publish(cache: ArtifactCache, number: int = 1, binary: bytes = BINARY) -> str:
    key = key_of(number)
    unit = SourceUnit(f"kernel{number}", "c++", "int x;\n", {"main": "f"})
    with cache.staging() as staging:
        cache.publish(unit, meta_of(key, binary), binary, "log\n", staging)
    return key


def loaded(cache: ArtifactCache, key: str) -> Artifact:
    artifact = cache.get(key)
    assert artifact is not None
    return artifact


def remains(cache: ArtifactCache) -> list[str]:
    """What is left of builds that ended."""
    folders = [cache.root / "staging", cache.root / "locks"]
    return [path.name for folder in folders for path in folder.iterdir() if path.name != ".lock"]


# Reading


def test_entry_is_found_as_it_was_published(cache: ArtifactCache) -> None:
    key = publish(cache)
    artifact = loaded(cache, key)
    assert artifact.binary.read_bytes() == BINARY
    assert artifact.meta == meta_of(key)
    assert (artifact.folder / "log.txt").read_text() == "log\n"
    assert not remains(cache)


def test_second_publication_of_a_key_is_a_hit(cache: ArtifactCache) -> None:
    key = publish(cache)
    before = loaded(cache, key).folder.stat().st_ino
    publish(cache)
    assert loaded(cache, key).folder.stat().st_ino == before
    assert cache.counters.lost_races == 1
    assert not remains(cache)


def damage_binary(folder: Path) -> None:
    (folder / "kernel.so").write_bytes(BINARY[:-1] + b"?")


def cut_binary(folder: Path) -> None:
    (folder / "kernel.so").write_bytes(BINARY[:4])


def lose_binary(folder: Path) -> None:
    (folder / "kernel.so").unlink()


def lose_meta(folder: Path) -> None:
    (folder / "meta.json").unlink()


def cut_meta(folder: Path) -> None:
    (folder / "meta.json").write_bytes((folder / "meta.json").read_bytes()[:40])


def point_outside(folder: Path) -> None:
    record = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(record | {"binary": "../../../etc/passwd"}))


def swap_key(folder: Path) -> None:
    (folder / "meta.json").write_bytes(meta_of(key_of(9)).to_json())


def confuse_types(folder: Path) -> None:
    record = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(record | {"flags": 3}))


@pytest.mark.parametrize(
    "damage",
    [damage_binary, cut_binary, lose_binary, lose_meta, cut_meta, point_outside, swap_key, confuse_types],
)
def test_damaged_entry_is_moved_aside_and_can_be_built_again(
    damage: Callable[[Path], None], cache: ArtifactCache
) -> None:
    key = publish(cache)
    damage(cache.entry(key))
    assert cache.get(key) is None
    assert cache.counters.quarantined == 1
    assert len(list((cache.root / "quarantine").iterdir())) == 1
    publish(cache)
    assert loaded(cache, key).binary.read_bytes() == BINARY


def test_quarantine_is_bounded(cache: ArtifactCache) -> None:
    for number in range(20):
        damage_binary(cache.entry(publish(cache, number)))
        assert cache.get(key_of(number)) is None
    assert len(list((cache.root / "quarantine").iterdir())) == 16


# Whose directory it is


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_directory_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(AccessError) as caught:
        ArtifactCache(folder)
    assert caught.value.rule == "cache_private"
    assert caught.value.fix


def test_folder_above_that_anybody_can_replace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(AccessError):
        ArtifactCache(tmp_path / "open" / "cache")


def test_own_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert ArtifactCache(tmp_path / "link").root == tmp_path / "real"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "link", "target"])
def test_directory_of_somebody_else_is_refused(what: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    path = tmp_path / "real"
    if what != "folder":
        path = tmp_path / "link"
        path.symlink_to(tmp_path / "real")
    stranger = path if what != "target" else tmp_path / "real"
    os.chown(stranger, 12345, 12345, follow_symlinks=False)
    with pytest.raises(AccessError):
        ArtifactCache(path)


def test_new_directory_is_private(cache: ArtifactCache) -> None:
    assert cache.root.stat().st_mode & 0o777 == 0o700
    assert loaded(cache, publish(cache)).binary.stat().st_mode & 0o077 == 0


# Failing and dying


class Failing(Files):
    """Fails the N-th operation that changes the disk, once or from then on."""

    def __init__(self, number: int, code: int, *, forever: bool = False) -> None:
        self.number, self.code, self.forever, self.count = number, code, forever, 0

    def _step(self) -> None:
        self.count += 1
        if self.count == self.number or (self.forever and self.count > self.number):
            self.fail()

    def fail(self) -> None:
        raise OSError(self.code, os.strerror(self.code))

    def make_dir(self, path: Path) -> None:
        self._step()
        super().make_dir(path)

    def write(self, path: Path, data: bytes) -> None:
        self._step()
        super().write(path, data[: len(data) // 2] if self.count == self.number else data)
        if self.count == self.number:
            self.fail()

    def sync(self, path: Path) -> None:
        self._step()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)


STEPS = 20
"""More than a publication has, so that the last ones succeed."""


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, ResourceExhaustedError), (errno.EDQUOT, ResourceExhaustedError), (errno.EIO, InternalError)],
)
def test_failure_of_any_step_leaves_nothing_half_published(
    code: int, kind: type[Exception], forever: bool, tmp_path: Path
) -> None:
    failures = 0
    for step in range(1, STEPS):
        cache = ArtifactCache(tmp_path / str(step))
        cache.files = Failing(step, code, forever=forever)
        try:
            publish(cache)
        except kind:
            failures += 1
        cache.files = Files()
        assert not remains(cache), f"step {step}"
        artifact = cache.get(key_of(1))
        assert artifact is None or artifact.binary.read_bytes() == BINARY
        assert cache.counters.quarantined == 0, f"step {step} published half an entry"
        publish(cache)
        loaded(cache, key_of(1))
    assert failures >= 8


PUBLISHER = """
import os, signal, sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_artifacts as t
class Dying(t.Failing):
    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)
cache = t.ArtifactCache(Path({root!r}))
for step in range(1, t.STEPS):
    if os.fork() == 0:
        cache.files = Dying(step, 0)
        t.publish(cache, step)
        os._exit(0)
    _, status = os.wait()
    print(os.WIFSIGNALED(status))
"""


def run_script(text: str, **values: object) -> subprocess.Popen[str]:
    path = [str(Path(__file__).parent), *sys.path]
    script = textwrap.dedent(text).format(path=path, **values)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_kill_at_any_step_leaves_an_entry_whole_or_absent(tmp_path: Path) -> None:
    output = run_script(PUBLISHER, root=str(tmp_path / "cache")).communicate(timeout=60)[0].split()
    assert output.count("True") >= 8
    assert output[-1] == "False"
    cache = ArtifactCache(tmp_path / "cache")
    assert not remains(cache), "the next server removes what the dead one left"
    present = [key for key in map(key_of, range(1, STEPS)) if cache.get(key) is not None]
    assert cache.counters.quarantined == 0
    assert key_of(STEPS - 1) in present


def test_staging_of_a_living_build_is_left_alone(cache: ArtifactCache) -> None:
    with cache.staging() as folder:
        ArtifactCache(cache.root)
        assert folder.is_dir()


# Removing


def age(cache: ArtifactCache, key: str, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(cache.entry(key), (then, then))


def test_least_recently_used_goes_first(cache: ArtifactCache) -> None:
    keys = [publish(cache, number, BINARY * 100) for number in range(5)]
    for place, key in enumerate(keys):
        age(cache, key, 1000 - place)
    loaded(cache, keys[0]).release()  # a use
    entries = maintenance.list_entries(cache)
    assert [entry.key for entry in entries] == [keys[0], *reversed(keys[1:])]
    result = maintenance.prune(cache, max_bytes=sum(entry.nbytes for entry in entries[:2]))
    assert result.removed == (keys[1], keys[2], keys[3])
    assert cache.all_keys() == sorted([keys[0], keys[4]])


def test_old_entries_go_whatever_their_size(cache: ArtifactCache) -> None:
    old, new = publish(cache, 1), publish(cache, 2)
    age(cache, old, 1000)
    assert maintenance.prune(cache, max_age_s=500).removed == (old,)
    assert cache.all_keys() == [new]


def test_loaded_entry_is_never_evicted(cache: ArtifactCache) -> None:
    key = publish(cache)
    artifact = loaded(cache, key)
    result = maintenance.prune(cache, max_bytes=0)
    assert (result.removed, result.in_use) == ((), 1)
    assert artifact.binary.exists()
    artifact.release()
    assert maintenance.prune(cache, max_bytes=0).removed == (key,)
    assert cache.get(key) is None


HOLDER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_artifacts as t
artifact = t.loaded(t.ArtifactCache(Path({root!r})), t.key_of(1))
print("loaded", flush=True)
sys.stdin.readline()
"""


def test_entry_loaded_by_another_process_is_never_evicted_until_that_dies(cache: ArtifactCache) -> None:
    key = publish(cache)
    holder = run_script(HOLDER, root=str(cache.root))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "loaded"
        assert maintenance.prune(cache, max_bytes=0).in_use == 1
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert maintenance.prune(cache, max_bytes=0).removed == (key,)


def test_entry_that_is_being_built_is_not_evicted(cache: ArtifactCache) -> None:
    key = publish(cache)
    lock = cache.try_build_lock(key)
    assert lock is not None
    assert not cache.evict(key)
    cache.end_build(key, lock)
    assert cache.evict(key)


# What people do


def test_verify_names_the_damage_and_repairs_it(cache: ArtifactCache) -> None:
    good, bad = publish(cache, 1), publish(cache, 2)
    damage_binary(cache.entry(bad))
    damages = {item.key: item.damage for item in maintenance.verify(cache)}
    assert damages[good] == ""
    assert "binary" in damages[bad]
    maintenance.verify(cache, repair=True)
    assert cache.all_keys() == [good]


@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_export_and_import_carry_whole_entries(suffix: str, cache: ArtifactCache, tmp_path: Path) -> None:
    keys = [publish(cache, number) for number in (1, 2)]
    archive = tmp_path / f"kernels{suffix}"
    assert maintenance.export_entries(cache, archive) == 2
    other = ArtifactCache(tmp_path / "other")
    publish(other, 2)
    result = maintenance.import_entries(other, archive)
    assert (result.added, result.present) == ((keys[0],), (keys[1],))
    assert loaded(other, keys[0]).meta == loaded(cache, keys[0]).meta


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/evil", "x" * 64 + "/kernel.so", key_of(1) + "/../../evil", key_of(1) + "/kernel.so"]
)
def test_hostile_archive_is_refused(name: str, cache: ArtifactCache, tmp_path: Path) -> None:
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo(name)
        info.size = 4
        tar.addfile(info, io.BytesIO(b"evil"))
    with pytest.raises(InvalidArgumentError):
        maintenance.import_entries(cache, archive)
    assert not cache.all_keys()
    assert not list(tmp_path.rglob("evil"))


def test_archive_with_a_damaged_binary_is_refused(cache: ArtifactCache, tmp_path: Path) -> None:
    key = publish(cache)
    archive = tmp_path / "kernels.tar"
    maintenance.export_entries(cache, archive)
    archive.write_bytes(archive.read_bytes().replace(BINARY, BINARY[::-1]))
    with pytest.raises(InvalidArgumentError, match="damaged"):
        maintenance.import_entries(ArtifactCache(tmp_path / "other"), archive)
    assert loaded(cache, key)


def test_no_descriptor_is_left_open(cache: ArtifactCache) -> None:
    key = publish(cache)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        loaded(cache, key).release()
        publish(cache)
    maintenance.verify(cache)
    maintenance.prune(cache, max_bytes=0)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
