from __future__ import annotations

import ctypes
import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ResourceExhaustedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains import toolchain as toolchain_module
from tilewright_server.build.toolchains.toolchain import CpuToolchain
from tilewright_server.build.workers.process import Limits

Unit = Callable[..., SourceUnit]


def refused(
    toolchain: CpuToolchain, unit: SourceUnit, folder: Path, arch: ArchSpec
) -> BuildFailedError | ResourceExhaustedError:
    folder.mkdir()
    with pytest.raises((BuildFailedError, ResourceExhaustedError)) as caught:
        toolchain.compile(unit, folder, arch)
    return caught.value  # type: ignore[return-value]


def test_result_can_be_loaded(unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    (tmp_path / "work").mkdir()
    compiled = CpuToolchain([include_dir()]).compile(unit(7), tmp_path / "work", arch)
    assert ctypes.CDLL(str(compiled.binary)).answer() == 7


def test_equal_sources_give_equal_bytes_wherever_they_are_built(unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    toolchain = CpuToolchain([include_dir()])
    binaries = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        binaries.append(toolchain.compile(unit(), tmp_path / name, arch).binary.read_bytes())
    assert binaries[0] == binaries[1]


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed")
@pytest.mark.extended
def test_wheel_with_a_compiler_is_enough(unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    toolchain = CpuToolchain([include_dir()], search_path=str(tmp_path), scratch=tmp_path / "zig")
    assert toolchain.identity().startswith("zig ")
    (tmp_path / "work").mkdir()
    compiled = toolchain.compile(unit(9), tmp_path / "work", arch)
    assert ctypes.CDLL(str(compiled.binary)).answer() == 9


def test_missing_compiler_is_refused_with_the_way_to_get_one(
    unit: Unit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toolchain_module, "_ziglang", lambda: None)
    with pytest.raises(ToolchainMissingError, match="apt-get install g") as caught:
        CpuToolchain([include_dir()], search_path=str(tmp_path)).identity()
    assert "pip install ziglang" in caught.value.fix


def test_compiler_is_noticed_as_soon_as_it_is_installed(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain_module, "_ziglang", lambda: None)
    path = tmp_path / "bin"
    path.mkdir()
    toolchain = CpuToolchain([include_dir()], search_path=str(path))
    with pytest.raises(ToolchainMissingError):
        toolchain.identity()
    (path / "g++").symlink_to(fake.path)
    assert "fake 1.0" in toolchain.identity()


def test_configured_compiler_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ToolchainMissingError) as caught:
        CpuToolchain([include_dir()], compiler="no-such-compiler").identity()
    assert (caught.value.field, caught.value.value) == ("compiler", "no-such-compiler")


def test_upgraded_compiler_has_another_identity(fake, fake_toolchain: CpuToolchain) -> None:
    before = fake_toolchain.identity()
    fake.behave("exit 1", version="fake 2.0")
    assert fake_toolchain.identity() != before


def test_only_gcc_is_told_which_of_its_passes_to_leave_out(
    fake, fake_toolchain: CpuToolchain, unit: Unit, arch: ArchSpec
) -> None:
    assert "-fno-tree-pre" not in fake_toolchain.flags(unit(), arch)
    fake.behave("exit 1", version="g++ 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.")
    assert "-fno-tree-pre" in fake_toolchain.flags(unit(), arch)


def test_refusal_carries_the_end_of_the_log_and_no_paths(unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    source = unit(text='#include "tilewright/cpu/team.h"\nint x = tw_team();\n#error planted\n')
    error = refused(CpuToolchain([include_dir()]), source, tmp_path / "work", arch)
    assert error.rule == "compiler_failed"
    assert "planted" in error.log_tail
    assert str(include_dir()) not in error.log_tail + str(error)
    assert str(tmp_path) not in error.log_tail + str(error)


def test_unresolved_symbol_fails_the_build_not_the_load(unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    source = unit(text='extern "C" int nowhere(); extern "C" int answer() { return nowhere(); }\n')
    assert "nowhere" in refused(CpuToolchain([include_dir()]), source, tmp_path / "work", arch).log_tail


def test_hanging_compiler_and_its_children_are_killed(fake, unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    child = tmp_path / "child"
    fake.behave(f"sleep 300 & echo $! > {child}; wait")
    toolchain = CpuToolchain([include_dir()], compiler=str(fake.path), limits=Limits(timeout_s=0.5))
    error = refused(toolchain, unit(), tmp_path / "work", arch)
    assert error.rule == "compiler_hung"
    assert not _alive(int(child.read_text()))


def _alive(pid: int) -> bool:
    for _ in range(50):
        try:
            if "Z" in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]:
                return False
        except OSError:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("body", ["kill -9 $$", "exit 137"])
def test_killed_compiler_is_told_from_one_that_fails(
    body: str, fake, fake_toolchain: CpuToolchain, unit: Unit, tmp_path: Path, arch: ArchSpec
) -> None:
    fake.behave(body)
    error = refused(fake_toolchain, unit(), tmp_path / "work", arch)
    assert (error.rule, error.value) == ("compiler_killed", "signal 9")


def test_memory_of_a_compiler_is_limited(fake, unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    # The shell starts its child after the limit was set, as a compiler driver does.
    fake.behave('sleep 0.1; exec python3 -c "bytearray(2 << 30)"')
    limits = Limits(timeout_s=20, memory_bytes=1 << 30)
    toolchain = CpuToolchain([include_dir()], compiler=str(fake.path), limits=limits)
    error = refused(toolchain, unit(), tmp_path / "work", arch)
    assert error.rule in ("compiler_failed", "compiler_killed")


def test_endless_output_is_cut(fake, fake_toolchain: CpuToolchain, unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    fake.behave("yes nonsense | head -c 8000000; echo the end; exit 1")
    error = refused(fake_toolchain, unit(), tmp_path / "work", arch)
    assert error.log_tail.endswith("the end\n")
    assert len(error.log_tail) < 5000


def test_output_without_end_is_stopped_by_the_file_limit(fake, unit: Unit, tmp_path: Path, arch: ArchSpec) -> None:
    fake.behave("yes nonsense")
    limits = Limits(timeout_s=20, file_bytes=1 << 20)
    toolchain = CpuToolchain([include_dir()], compiler=str(fake.path), limits=limits)
    refused(toolchain, unit(), tmp_path / "work", arch)
    assert sum(path.stat().st_size for path in (tmp_path / "work").iterdir()) < 2 << 20


def test_compiler_without_a_result_is_a_failure(
    fake, fake_toolchain: CpuToolchain, unit: Unit, tmp_path: Path, arch: ArchSpec
) -> None:
    fake.behave("exit 0")
    assert "no binary" in str(refused(fake_toolchain, unit(), tmp_path / "work", arch))


def test_full_disk_is_not_the_sources_fault(
    fake, fake_toolchain: CpuToolchain, unit: Unit, tmp_path: Path, arch: ArchSpec
) -> None:
    fake.behave("echo 'fatal error: error writing to x.s: No space left on device'; exit 1")
    error = refused(fake_toolchain, unit(), tmp_path / "work", arch)
    assert isinstance(error, ResourceExhaustedError)
    assert error.retry_after_s


def test_compiler_sees_no_input_and_a_small_environment(
    fake, fake_toolchain: CpuToolchain, unit: Unit, tmp_path: Path, arch: ArchSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "1")
    fake.behave("env; cat; exit 1")
    error = refused(fake_toolchain, unit(), tmp_path / "work", arch)
    names = {line.partition("=")[0] for line in error.log_tail.splitlines()}
    assert names <= {"PATH", "LC_ALL", "TMPDIR", "PWD", "SHLVL", "_", "OLDPWD"}


def test_compiler_yields_to_the_server(
    fake, fake_toolchain: CpuToolchain, unit: Unit, tmp_path: Path, arch: ArchSpec
) -> None:
    fake.behave("sleep 0.1; exec nice; exit 1")
    fake.behave("sleep 0.1; nice; exit 1")
    error = refused(fake_toolchain, unit(), tmp_path / "work", arch)
    assert int(error.log_tail) > os.getpriority(os.PRIO_PROCESS, 0)
