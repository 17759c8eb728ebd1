"""Binaries that compile and cannot be loaded are not published, and harm nobody but their own kernel."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable

import pytest

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError
from tilewright_server.build.cache.files import io_error
from tilewright_server.build.pool import BuildPool
from tilewright_server.build.workers.helper import HelperPool
from tilewright_server.build.workers.process import Limits
from tilewright_server.build.workers.standing_back import standing_back
from tilewright_server.engine.call import Call

Unit = Callable[..., SourceUnit]
ANSWER = 'extern "C" __attribute__((visibility("default"))) int answer() { return 1; }\n'
CRASHES = "__attribute__((constructor)) static void begin() { __builtin_trap(); }\n"


def built(pool: BuildPool, unit: SourceUnit, arch: ArchSpec) -> str:
    build = pool.submit(unit, arch)
    build.wait(Call.within(60))
    return build.state


@pytest.mark.parametrize("how", ["no ELF file", "truncated", "crashes", "no such symbol"])
def test_what_cannot_be_loaded_is_not_published(how: str, pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    real = fake.path.read_text().splitlines()[-1].removeprefix("exec ")
    changes = {}
    if how == "no ELF file":
        fake.behave('echo garbage > "$out"')
    elif how == "truncated":
        fake.behave(f'{real}; head -c 700 "$out" > short; mv short "$out"')
    elif how == "crashes":
        changes = {"text": ANSWER + CRASHES}
    else:
        changes = {"entries": {"main": "answer", "other": "question"}}
    bad = unit(**changes)
    with pytest.raises(BuildFailedError) as caught:
        built(pool, bad, arch)
    assert caught.value.rule == "binary_unloadable"
    assert str(pool.cache.root) not in caught.value.log_tail
    if how == "no such symbol":
        assert "question" in caught.value.log_tail
    assert not pool.cache.contains(pool.key(bad, arch))
    fake.behave(f"exec {real}", version="fake 2.0")
    assert built(pool, unit(7), arch) == "built"


def test_helpers_need_no_folder_for_temporary_files(
    pool: BuildPool, unit: Unit, arch: ArchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    assert built(pool, unit(), arch) == "built"


def test_a_cache_that_cannot_be_written_says_what_helps() -> None:
    for number in (errno.EROFS, errno.EACCES, errno.EPERM):
        error = io_error(OSError(number, ""), "opening its directory")
        assert (error.field, error.rule) == ("cache_dir", "cache_unwritable")
        assert "below a volume" in error.fix


def test_one_process_loads_many_and_keeps_none_of_them(pool: BuildPool, unit: Unit, arch: ArchSpec) -> None:
    for number in range(6):  # the same name and entry each time, and another content
        assert built(pool, unit(number, name="same"), arch) == "built"
    trial = pool.toolchain("c++")._trial  # type: ignore[attr-defined]
    assert trial._helpers.idle == 1


def test_processes_are_as_nice_as_who_waits_for_them() -> None:
    """Those that are kept too: a process cannot become less nice."""
    pool = HelperPool("tilewright_server.build.workers.load_worker", Limits(timeout_s=60))
    own = os.getpriority(os.PRIO_PROCESS, 0)

    def niceness(further: int) -> tuple[int, int]:
        with standing_back(further):
            pool.ask({"ask": "identity"})
        pid = pool._idle[-1]._process.pid
        return pid, os.getpriority(os.PRIO_PROCESS, pid)

    try:
        first, second, again, last = (niceness(further) for further in (0, 5, 0, 5))
        assert first == again and second == last and first[0] != second[0]
        assert (first[1], second[1]) == (min(own + 5, 19), min(own + 10, 19))
    finally:
        pool.close()


def test_binary_for_another_machine_is_not_tried(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    foreign = bytearray(b"\x7fELF\x02\x01\x01" + bytes(57))
    foreign[18:20] = (0x2A2A).to_bytes(2, "little")
    fake.path.with_name("foreign").write_bytes(foreign)
    fake.behave(f'cp {fake.path.with_name("foreign")} "$out"')
    assert built(pool, unit(), arch) == "built"
