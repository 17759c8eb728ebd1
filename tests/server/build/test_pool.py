from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import (
    BuildFailedError,
    CancelledError,
    DeadlineError,
    ResourceExhaustedError,
    TilewrightError,
    UnavailableError,
    UnsupportedError,
)
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache
from tilewright_server.build.pool import BuildEvent, BuildPool, PoolOptions
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.build.workers.process import Limits
from tilewright_server.engine.call import Call

Unit = Callable[..., SourceUnit]


def build(pool: BuildPool, unit: SourceUnit, arch: ArchSpec, **options: bool) -> str:
    """The state in which a build ended. Raises its error."""
    task = pool.submit(unit, arch, **options)
    task.wait(Call.within(30))
    return task.state


def failure(pool: BuildPool, unit: SourceUnit, arch: ArchSpec, **options: bool) -> TilewrightError:
    with pytest.raises(TilewrightError) as caught:
        build(pool, unit, arch, **options)
    return caught.value


def test_second_build_is_a_hit(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    assert build(pool, unit(), arch) == "built"
    assert build(pool, unit(), arch) == "cached"
    assert fake.calls == 1


def test_any_number_of_callers_cause_one_compilation(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    with ThreadPoolExecutor(16) as threads:
        states = list(threads.map(lambda _: build(pool, unit(), arch), range(64)))
    assert set(states) <= {"built", "cached"}
    assert fake.calls == 1


BUILDER = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import tilewright_arch
import test_pool as t
from tilewright_kit.contract.source import SourceUnit
toolchain = t.CpuToolchain([], compiler={compiler!r})
pool = t.BuildPool(t.ArtifactCache(Path({root!r})), {{"c++": toolchain}})
arch = tilewright_arch.detect_cpu()
print("ready", flush=True)
sys.stdin.readline()
print(t.build(pool, SourceUnit("k", "c++", {text!r}, {{}}), arch), flush=True)
pool.close()
"""


def test_processes_that_share_a_cache_compile_each_key_once(fake, tmp_path: Path, unit: Unit) -> None:
    body = fake.path.read_text().splitlines()[-1]
    fake.behave(f"sleep 0.5\n{body}")
    script = textwrap.dedent(BUILDER).format(
        path=[str(Path(__file__).parent), *sys.path],
        compiler=str(fake.path),
        root=str(tmp_path / "cache"),
        text=unit().text,
    )
    servers = [
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        ready = [server.stdout.readline().strip() for server in servers if server.stdout is not None]
        for server in servers:
            if server.stdin is not None:
                server.stdin.write("go\n")
                server.stdin.flush()
        states = sorted(server.communicate(timeout=30)[0].strip() for server in servers)
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    assert ready == ["ready"] * 3
    assert states == ["built", "cached", "cached"]
    assert fake.calls == 1


def test_failure_is_answered_from_memory(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    fake.behave("echo because; exit 1")
    assert failure(pool, unit(), arch).log_tail == "because\n"
    again = failure(pool, unit(), arch)
    assert isinstance(again, BuildFailedError)
    assert again.log_tail == "because\n"
    assert fake.calls == 1


def test_failure_is_forgotten_on_request_and_in_time(
    cache: ArtifactCache, fake, fake_toolchain: CpuToolchain, unit: Unit, arch: ArchSpec
) -> None:
    pool = BuildPool(cache, {"c++": fake_toolchain}, PoolOptions(failure_ttl_s=0.2))
    fake.behave("exit 1")
    failure(pool, unit(), arch)
    failure(pool, unit(), arch, retry_failed=True)
    assert fake.calls == 2
    time.sleep(0.25)
    failure(pool, unit(), arch)
    assert fake.calls == 3
    pool.close()


def test_mended_compiler_is_tried_at_once(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    good = fake.path.read_text().splitlines()[-1]
    fake.behave("exit 1")
    failure(pool, unit(), arch)
    fake.behave(good)
    assert build(pool, unit(), arch) == "built"


def test_full_disk_is_not_remembered_against_the_kernel(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    good = fake.path.read_text().splitlines()[-1]
    flag = fake.path.with_name("full")
    flag.touch()
    fake.behave(f"if [ -e {flag} ]; then echo No space left on device; exit 1; fi\n{good}")
    assert isinstance(failure(pool, unit(), arch), ResourceExhaustedError)
    flag.unlink()
    assert build(pool, unit(), arch) == "built"


@pytest.mark.parametrize(
    "end",
    [
        "kill -KILL $$",
        "kill -TERM $$",
        "exit 137",
        "exit 143",
        "echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1",
        "echo 'cc1plus: out of memory allocating 65536 bytes'; exit 1",
    ],
)
def test_kill_from_outside_is_retried_and_not_remembered(
    pool: BuildPool, fake, unit: Unit, arch: ArchSpec, end: str
) -> None:
    good = fake.path.read_text().splitlines()[-1]
    flag = fake.path.with_name("flag")
    flag.touch()
    fake.behave(f"if [ -e {flag} ]; then {end}; fi\n{good}")
    error = failure(pool, unit(), arch)
    assert isinstance(error, UnavailableError)
    assert (error.rule, bool(error.retry_after_s)) == ("compiler_killed", True)
    assert fake.calls == 3
    flag.unlink()
    assert build(pool, unit(), arch) == "built"
    assert fake.calls == 4


def test_compiler_killed_once_costs_the_caller_nothing_but_time(
    pool: BuildPool, fake, unit: Unit, arch: ArchSpec
) -> None:
    good = fake.path.read_text().splitlines()[-1]
    flag = fake.path.with_name("flag")
    flag.touch()
    fake.behave(f"if [ -e {flag} ]; then rm {flag}; kill -KILL $$; fi\n{good}")
    assert build(pool, unit(), arch) == "built"
    assert fake.calls == 2


@pytest.mark.parametrize("end", ["kill -SEGV $$", "exit 139", "echo 'error: Killed is not declared'; exit 1"])
def test_crash_and_refusal_of_the_compiler_are_its_word_on_the_source(
    pool: BuildPool, fake, unit: Unit, arch: ArchSpec, end: str
) -> None:
    fake.behave(end)
    assert isinstance(failure(pool, unit(), arch), BuildFailedError)
    assert isinstance(failure(pool, unit(), arch), BuildFailedError)
    assert fake.calls == 1


def test_compiler_that_took_too_long_is_asked_once_and_not_remembered(
    cache: ArtifactCache, fake, unit: Unit, arch: ArchSpec
) -> None:
    toolchain = CpuToolchain([include_dir()], compiler=str(fake.path), limits=Limits(timeout_s=1.5))
    pool = BuildPool(cache, {"c++": toolchain})
    fake.behave("sleep 60")
    for calls in (1, 2):
        error = failure(pool, unit(), arch)
        assert isinstance(error, UnavailableError)
        assert error.rule == "compiler_hung"
        assert fake.calls == calls
    pool.close()


def test_server_without_descriptors_or_disk_tries_again(
    pool: BuildPool, fake, unit: Unit, arch: ArchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pool.cache.files.make_dir
    reasons = [errno.ENOSPC, errno.EMFILE]

    def make_dir(path: Path) -> None:
        if path.name == "work" and reasons:
            number = reasons.pop()
            raise OSError(number, os.strerror(number))
        real(path)

    monkeypatch.setattr(pool.cache.files, "make_dir", make_dir)
    assert build(pool, unit(), arch) == "built"
    reasons.extend([errno.ENOSPC] * 3)
    error = failure(pool, unit(7), arch)
    assert isinstance(error, ResourceExhaustedError)
    assert (error.rule, error.value) == ("build_resources", "ENOSPC")


def test_deadline_of_one_waiter_does_not_end_the_build(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    good = fake.path.read_text().splitlines()[-1]
    gate = fake.path.with_name("gate")
    fake.behave(f"while [ ! -e {gate} ]; do sleep 0.01; done\n{good}")
    task = pool.submit(unit(), arch)
    with pytest.raises(DeadlineError):
        task.wait(Call.within(0.05))
    assert task.state in ("queued", "building")
    gate.touch()
    task.wait(Call.within(20))
    assert task.state == "built"


def test_waiter_can_cancel(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    good = fake.path.read_text().splitlines()[-1]
    fake.behave(f"sleep 0.4\n{good}")
    task = pool.submit(unit(), arch)
    call = Call.within(20)
    threading.Timer(0.05, call.cancel).start()
    with pytest.raises(CancelledError):
        task.wait(call)
    assert build(pool, unit(), arch) == "built"


def test_events_tell_the_story(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    good = fake.path.read_text().splitlines()[-1]
    fake.behave(f"sleep 0.1\n{good}")
    heard: list[BuildEvent] = []
    task = pool.submit(unit(), arch)
    task.listen(lambda event: 1 // 0)
    task.listen(heard.append)
    task.wait(Call.within(20))
    late: list[BuildEvent] = []
    task.listen(late.append)  # its turn comes when the others have heard all
    states = [event.state for event in heard]
    assert states in (["queued", "building", "built"], ["building", "built"])
    assert heard[-1].build_ns > 50_000_000
    assert [event.state for event in late] == ["built"]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_as_many_compilers_run_at_a_time_as_there_are_workers(
    workers: int, cache: ArtifactCache, fake, fake_toolchain: CpuToolchain, unit: Unit, arch: ArchSpec
) -> None:
    # Each compiler waits until as many as there are workers have begun, and tells how many run beside it then.
    begun, running, seen = (fake.path.with_name(name) for name in ("begun", "running", "seen"))
    for folder in (begun, running):
        folder.mkdir()
    real = fake.path.read_text().splitlines()[-1].removeprefix("exec ")
    fake.behave(
        f"touch {begun}/$$ {running}/$$\n"
        f"until [ $(ls {begun} | wc -l) -ge {workers} ]; do sleep 0.01; done\n"
        f"ls {running} | wc -l >> {seen}\n"
        f"{real}; rm {running}/$$"
    )
    pool = BuildPool(cache, {"c++": fake_toolchain}, PoolOptions(workers=workers))
    for task in [pool.submit(unit(number), arch) for number in range(6)]:
        task.wait(Call.within(30))
        assert task.state == "built"
    pool.close()
    assert fake.calls == 6
    assert max(map(int, seen.read_text().split())) <= workers


@pytest.mark.parametrize(("budget", "workers"), [(0, 8), (1 << 30, 2), (1, 1)])
def test_memory_budget_limits_the_workers(
    budget: int, workers: int, cache: ArtifactCache, fake_toolchain: CpuToolchain
) -> None:
    pool = BuildPool(cache, {"c++": fake_toolchain}, PoolOptions(workers=8, budget_bytes=budget))
    assert pool.workers == workers


def test_closing_ends_a_compiler_at_once(pool: BuildPool, fake, unit: Unit, arch: ArchSpec) -> None:
    late = fake.path.with_name("late")
    fake.behave(f"sleep 15; touch {late}")  # less than a compiler may take
    running = pool.submit(unit(1), arch)
    waiting = [pool.submit(unit(number), arch) for number in (2, 3, 4)]
    while running.state == "queued":
        time.sleep(0.01)
    pool.close()
    assert not late.exists()
    for task in (running, *waiting):
        assert task.state == "failed"
    with pytest.raises(UnavailableError):
        pool.submit(unit(5), arch)
    assert not list((pool.cache.root / "locks").iterdir())


def test_language_without_a_toolchain_is_unsupported(pool: BuildPool, unit: Unit, arch: ArchSpec) -> None:
    with pytest.raises(UnsupportedError, match="cuda"):
        pool.submit(unit(language="cuda"), arch)


def test_cache_stays_within_its_budget(
    fake_toolchain: CpuToolchain, tmp_path: Path, unit: Unit, arch: ArchSpec
) -> None:
    cache = ArtifactCache(tmp_path / "small", max_bytes=60_000)
    pool = BuildPool(cache, {"c++": fake_toolchain})
    for number in range(8):
        build(pool, unit(number), arch)
        for key in cache.all_keys():  # as if they had not been used for long
            os.utime(cache.entry(key), (1e9 + number, 1e9 + number))
    used = sum(path.stat().st_size for path in cache.objects.rglob("*") if path.is_file())
    assert 0 < used <= 80_000
    pool.close()


def test_header_edited_during_a_build_is_not_published_under_the_old_key(
    cache: ArtifactCache, fake, tmp_path: Path, unit: Unit, arch: ArchSpec
) -> None:
    folder = tmp_path / "include"
    folder.mkdir()
    header = folder / "a.hpp"
    header.write_text("#define A 1\n")
    good = fake.path.read_text().splitlines()[-1]
    fake.behave(f"{good.removeprefix('exec ')}\necho '#define A 22' > {header}")
    pool = BuildPool(cache, {"c++": CpuToolchain([folder], compiler=str(fake.path))})
    source = unit(text='#include "a.hpp"\n' + unit().text)
    assert "changed" in str(failure(pool, source, arch))
    assert build(pool, source, arch) == "built"
    pool.close()
