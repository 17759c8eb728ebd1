"""The compiler of AMD GPUs' kernels: real clang and zig, no GPU and no ROCm."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache, artifact_key
from tilewright_server.build.pool import BuildPool, PoolOptions
from tilewright_server.build.toolchains import hip_compilers
from tilewright_server.build.toolchains.code_object import read_code_object
from tilewright_server.build.toolchains.hip import HipToolchain, scratch_in_use, unbundled
from tilewright_server.build.toolchains.private_memory import reaches_private_memory
from tilewright_server.build.workers import helper as helper_module
from tilewright_server.build.workers.process import Limits
from tilewright_server.engine.call import Call

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
PLAIN = """
extern "C" __attribute__((global)) void answer(const float* x, float* out, int n) {
  for (int i = __builtin_amdgcn_workitem_id_x(); i < n; i += 256) out[i] = x[i] + NUMBER;
}
"""
SPILLING = """
extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 1024), amdgpu_waves_per_eu(8)))
void answer(const float* x, float* out, int n) {
  float a[160];
#pragma unroll
  for (int i = 0; i < 160; i++) a[i] = x[__builtin_amdgcn_workitem_id_x() * 160 + i];
  for (int r = 0; r < n; r++) {
#pragma unroll
    for (int i = 0; i < 160; i++) a[i] = a[i] * a[(i * 7 + 3) % 160];
  }
#pragma unroll
  for (int i = 0; i < 160; i++) out[__builtin_amdgcn_workitem_id_x() * 160 + i] = a[i];
}
"""
# The same, of numbers that all lanes have together: scalar registers.
SCALAR = """
extern "C" __attribute__((global)) void answer(const int* x, int* out, int n) {
  int a[160];
#pragma unroll
  for (int i = 0; i < 160; i++) a[i] = x[i];
  for (int r = 0; r < n; r++) {
#pragma unroll
    for (int i = 0; i < 160; i++) a[i] = a[i] * a[(i * 7 + 3) % 160];
  }
#pragma unroll
  for (int i = 0; i < 160; i++) out[i] = a[i];
}
"""
# Needs an array in memory: the index is known at run time only.
SCRATCH = """
extern "C" __attribute__((global)) void answer(const int* x, int* out, int n) {
  int a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n];
  for (int i = 0; i < n; i++) a[x[i] & 63] += a[x[i + 1] & 63];
  for (int i = 0; i < 64; i++) out[i] = a[i];
}
"""
# Compiles for a minute and more: every level of the template is instantiated twice.
ENDLESS = """
template <int a, int b> struct F { static constexpr int v = F<a - 1, b>::v + F<a - 1, b + (1 << a)>::v; };
template <int b> struct F<0, b> { static constexpr int v = b & 1; };
extern "C" __attribute__((global)) void answer(int* out) { *out = F<24, 0>::v; }
"""


def _clang() -> str:
    return next((name for name in hip_compilers._NAMES if shutil.which(name)), "")


COMPILERS = [
    pytest.param("clang", marks=pytest.mark.skipif(not _clang(), reason="clang++ 19 or later is not installed")),
    pytest.param(
        "ziglang",
        marks=pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="ziglang is not installed"),
    ),
]


def _script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def _answers(
    release: str, *, target: str = "amdgcn", lld: Path | str = "", options: str = "true", otherwise: str = "true"
) -> str:
    """A shell script's body that answers what a clang is asked before it is used."""
    return (
        f'case "$1" in --version) echo "clang version {release}";; --print-targets) echo "  {target} - it";;'
        f" --print-prog-name=lld) echo {lld};; -mllvm) {options};; *) {otherwise};; esac"
    )


def hip_unit(text: str = PLAIN, number: int = 42, **changes: Any) -> SourceUnit:
    record: dict[str, Any] = {
        "name": f"answer_{number}",
        "language": "hip",
        "text": text.replace("NUMBER", str(number)),
        "entries": {"main": "answer"},
        "plugin_version": "1",
    }
    return SourceUnit(**{**record, **changes})


@pytest.fixture(scope="module")
def arch() -> ArchSpec:
    return tilewright_arch.load("gfx942")


@pytest.fixture(params=COMPILERS)
def compiler(request: pytest.FixtureRequest) -> str:
    return _clang() if request.param == "clang" else str(request.param)


@pytest.fixture
def toolchain(compiler: str) -> Iterator[HipToolchain]:
    toolchain = HipToolchain([include_dir()], compiler=compiler)
    yield toolchain
    toolchain.close()


@pytest.fixture
def refused(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> Callable[..., BuildFailedError]:
    def refused(text: str, **changes: Any) -> BuildFailedError:
        with pytest.raises(BuildFailedError) as caught:
            toolchain.compile(hip_unit(text, **changes), tmp_path, arch)
        return caught.value

    return refused


@pytest.mark.parametrize("name", ARCHS)
def test_result_is_a_code_object_and_the_log_tells_its_resources(
    name: str, toolchain: HipToolchain, tmp_path: Path
) -> None:
    spec = tilewright_arch.load(name)
    compiled = toolchain.compile(hip_unit(), tmp_path, spec)
    assert compiled.binary.name == "kernel.co"
    code = read_code_object(compiled.binary.read_bytes())
    kernel = code.kernel("answer")
    assert (code.target, kernel.wave, kernel.kernarg_bytes) == (name, spec.wave_size, 20)
    assert f"resources of answer: {kernel.vgprs} VGPRs (0 of them AGPRs), {kernel.sgprs} SGPRs, 0 bytes" in compiled.log
    assert 1 <= kernel.vgprs <= 32


def test_equal_sources_give_equal_bytes(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> None:
    binaries = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        binaries.append(toolchain.compile(hip_unit(), tmp_path / name, arch).binary.read_bytes())
    assert binaries[0] == binaries[1]
    assert str(tmp_path).encode() not in binaries[0]


def test_refusal_carries_the_log_and_no_paths(refused: Callable[..., BuildFailedError], tmp_path: Path) -> None:
    error = refused('#include "tilewright/core/integers.hpp"\n#error planted\nint x = tw_nothing();\n')
    assert error.rule == "compiler_failed"
    assert "planted" in error.log_tail
    assert str(include_dir()) not in error.log_tail + str(error)
    assert str(tmp_path) not in error.log_tail + str(error)


def test_builtin_of_another_arch_is_refused(toolchain: HipToolchain, tmp_path: Path) -> None:
    text = """
typedef _Float16 h16 __attribute__((ext_vector_type(16)));
typedef float f8 __attribute__((ext_vector_type(8)));
extern "C" __attribute__((global)) void answer(f8* c, h16* a) {
  *c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(*a, *a, *c);
}
"""
    with pytest.raises(BuildFailedError, match="refused") as caught:
        toolchain.compile(hip_unit(text), tmp_path, tilewright_arch.load("gfx942"))
    assert caught.value.rule == "compiler_failed"
    assert "wmma" in caught.value.log_tail
    assert toolchain.compile(hip_unit(text), tmp_path, tilewright_arch.load("gfx1100")).binary.is_file()


def test_arch_that_the_compiler_does_not_know_is_refused(
    toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(hip_unit(), tmp_path, replace(arch, toolchain=arch.toolchain.retargeted("gfx4711")))
    assert caught.value.rule == "compiler_failed"
    assert "gfx4711" in caught.value.log_tail


def test_code_for_another_arch_than_asked_for_is_refused(
    toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path
) -> None:
    with pytest.raises(BuildFailedError, match="the code is for gfx950, and was asked for gfx942"):
        toolchain.compile(hip_unit(flags=("--no-offload-arch=all", "--offload-arch=gfx950")), tmp_path, arch)


@pytest.mark.parametrize(("text", "least"), [(SPILLING, 8), (SCRATCH, 256)])
def test_spills_and_scratch_fail_the_build_unless_the_unit_allows_them(
    text: str,
    least: int,
    refused: Callable[..., BuildFailedError],
    toolchain: HipToolchain,
    arch: ArchSpec,
    tmp_path: Path,
) -> None:
    error = refused(text)
    assert error.rule == "kernel_spills"
    assert int(error.value) >= least
    assert "bytes of scratch" in error.log_tail
    allowed = toolchain.compile(hip_unit(text, defines={"TW_ALLOW_SPILLS": "1"}), tmp_path, arch)
    assert read_code_object(allowed.binary.read_bytes()).kernel("answer").scratch_bytes == int(error.value)


def test_scalar_registers_may_lie_in_lanes_of_vector_registers(
    toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path
) -> None:
    compiled = toolchain.compile(hip_unit(SCALAR), tmp_path, arch)
    facts = read_code_object(compiled.binary.read_bytes()).kernel("answer")
    assert facts.sgpr_spills > 0
    assert facts.vgpr_spills == scratch_in_use(facts) == 0
    assert scratch_in_use(replace(facts, sgpr_spills=8, scratch_bytes=36)) == 0
    assert scratch_in_use(replace(facts, sgpr_spills=8, scratch_bytes=40)) == 40
    assert scratch_in_use(replace(facts, sgpr_spills=0, scratch_bytes=4)) == 4
    assert scratch_in_use(replace(facts, sgpr_spills=8, vgpr_spills=1, scratch_bytes=8)) == 8


@pytest.mark.parametrize("name", ["gfx1100", "gfx1201"])
def test_memory_that_was_set_aside_and_is_not_reached_is_told_from_memory_in_use(
    name: str, toolchain: HipToolchain, tmp_path: Path
) -> None:
    other = tilewright_arch.load(name)
    images = {}
    for kind, text in (("used", SCRATCH), ("none", SCALAR)):
        (tmp_path / kind).mkdir()
        unit = hip_unit(text, defines={"TW_ALLOW_SPILLS": "1"})
        images[kind] = toolchain.compile(unit, tmp_path / kind, other).binary.read_bytes()
    assert reaches_private_memory(images["used"], name) and not reaches_private_memory(images["none"], name)
    assert reaches_private_memory(images["none"], "gfx942")  # whose code is not read


def test_compiler_that_takes_too_long_is_killed_and_the_next_build_works(
    compiler: str, arch: ArchSpec, tmp_path: Path
) -> None:
    toolchain = HipToolchain([], compiler=compiler, limits=Limits(timeout_s=2.0))
    toolchain.identity()
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(hip_unit(ENDLESS), tmp_path, arch)
    assert caught.value.rule == "compiler_hung"
    assert toolchain.compile(hip_unit(), tmp_path, arch).binary.is_file()


def test_abort_ends_a_build_at_once(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> None:
    abort = threading.Event()
    threading.Timer(0.5, abort.set).start()
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(hip_unit(ENDLESS), tmp_path, arch, abort)
    assert caught.value.rule == "compiler_aborted"


def test_key_follows_compiler_flags_and_headers(compiler: str, arch: ArchSpec, tmp_path: Path) -> None:
    header = tmp_path / "own.hpp"
    header.write_text("constexpr int one = 1;\n")
    own = HipToolchain([tmp_path], compiler=compiler)
    unit = hip_unit('#include "own.hpp"\n' + PLAIN)
    before = artifact_key(unit, arch, own)
    assert before == artifact_key(unit, arch, own)
    assert before != artifact_key(unit, tilewright_arch.load("gfx950"), own)
    assert before != artifact_key(hip_unit(unit.text, defines={"X": "1"}), arch, own)
    assert own.compile(unit, tmp_path, arch).binary.is_file()
    header.write_text("constexpr int one = 2;\n")
    assert before != artifact_key(unit, arch, own)


def test_builds_run_through_the_pool(toolchain: HipToolchain, arch: ArchSpec, tmp_path: Path) -> None:
    pool = BuildPool(ArtifactCache(tmp_path / "cache"), {"hip": toolchain}, PoolOptions(workers=2))
    builds = [pool.submit(hip_unit(number=number), arch) for number in range(4)]
    for build in builds:
        build.wait(Call.within(60))
    assert [build.state for build in builds] == ["built"] * 4
    assert pool.submit(hip_unit(number=1), arch).key == builds[1].key
    pool.close()


@pytest.mark.skipif(not _clang(), reason="clang++ 19 or later is not installed")
def test_the_first_clang_that_can_be_used_is_taken_and_the_others_are_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path(shutil.which(_clang()) or "").resolve()
    folder = tmp_path / "bin"
    folder.mkdir()
    _script(folder / "clang++", "echo 'Debian clang version 14.0.6'")
    _script(folder / "clang++-21", "echo 'nonsense'")
    _script(folder / "clang++-20", _answers("20.1.0", target="x86-64"))
    _script(folder / "clang++-19", _answers("19.1.7", lld="lld"))
    monkeypatch.setattr(hip_compilers, "_ROCM", ())
    monkeypatch.setattr(hip_compilers, "_NAMES", ("clang++", "clang++-21", "clang++-20", "clang++-19"))
    monkeypatch.setattr(hip_compilers, "zig_binary", lambda: None)
    monkeypatch.setattr(hip_compilers, "have_module", lambda _: False)
    toolchain = HipToolchain([], search_path=str(folder))
    with pytest.raises(ToolchainMissingError, match="no compiler for AMD GPUs was found") as caught:
        toolchain.identity()
    said = caught.value.log_tail
    assert "hiprtc: hip-python is not installed" in said
    assert "clang++: it is release 14, and 19 is needed" in said
    assert "clang++-21: it does not say which clang it is" in said
    assert "clang++-20: it was built without the target amdgcn" in said
    assert "clang++-19: it finds no lld (Debian, Ubuntu: apt-get install lld-19)" in said
    assert "ziglang: the wheel is not installed" in said
    assert "apt-get install clang-22 lld-22" in caught.value.fix
    (folder / "clang++-21").unlink()
    (folder / "clang++-21").symlink_to(real)
    assert "clang version" in toolchain.identity()


@pytest.mark.parametrize("name", ["no-such-compiler", "hiprtc"])
def test_configured_compiler_that_is_missing_is_an_error_and_not_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hip_compilers, "have_module", lambda _: False)
    with pytest.raises(ToolchainMissingError) as caught:
        HipToolchain([], compiler=name).identity()
    assert (caught.value.field, caught.value.value) == ("hip_compiler", name)
    assert "clear it" in caught.value.fix


def test_helper_that_cannot_be_started_does_not_hide_the_other_compilers(
    toolchain: HipToolchain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hip_compilers, "have_module", lambda _: True)
    monkeypatch.setattr(helper_module, "run_module", lambda *_: ["/nonexistent/python"])
    searching = HipToolchain([])
    assert "hiprtc" not in searching.identity()
    with pytest.raises(ToolchainMissingError) as caught:
        HipToolchain([], compiler="hiprtc").identity()
    assert "its process does not answer" in caught.value.log_tail


def test_upgraded_compiler_has_another_identity(tmp_path: Path) -> None:
    fake, lld = tmp_path / "clang++", tmp_path / "lld"
    lld.write_text("linker")

    def behave(release: str) -> None:
        fresh = tmp_path / "fresh"
        _script(fresh, _answers(release, lld=lld))
        fresh.replace(fake)

    behave("21.1.0")
    toolchain = HipToolchain([], compiler=str(fake))
    first = toolchain.identity()
    behave("22.1.0")
    assert first.startswith("clang version 21.1.0 [")
    assert toolchain.identity().startswith("clang version 22.1.0 [")


def test_compiler_is_given_the_options_that_it_accepts(
    compiler: str, arch: ArchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = hip_compilers._TUNING
    real = HipToolchain([], compiler=compiler).flags(hip_unit(), arch)
    assert all(option[1] in real for option in options)
    monkeypatch.setattr(hip_compilers, "_TUNING", (options[0], ("-mllvm", "-amdgpu-never-heard-of"), options[1]))
    toolchain = HipToolchain([], compiler=compiler)
    assert toolchain.flags(hip_unit(), arch) == real
    toolchain.compile(hip_unit(), tmp_path, arch)


def test_clang_that_knows_no_options_is_given_none(tmp_path: Path, arch: ArchSpec) -> None:
    fake, lld = tmp_path / "clang++", tmp_path / "lld"
    lld.write_text("linker")
    _script(fake, _answers("23.1.0", lld=lld, options="exit 1"))
    assert "-mllvm" not in HipToolchain([], compiler=str(fake)).flags(hip_unit(), arch)


def test_arch_younger_than_the_compiler_is_refused_with_a_fix(tmp_path: Path, arch: ArchSpec) -> None:
    fake, lld = tmp_path / "clang++", tmp_path / "lld"
    lld.write_text("linker")
    _script(fake, _answers("19.1.7", lld=lld))
    toolchain = HipToolchain([], compiler=str(fake))
    with pytest.raises(ToolchainMissingError, match=r"clang 19, and gfx950 needs clang 20 or later") as caught:
        toolchain.compile(hip_unit(), tmp_path, tilewright_arch.load("gfx950"))
    assert (caught.value.field, caught.value.rule) == ("hip_compiler", "toolchain")
    assert "install clang and lld 20 or later" in caught.value.fix
    with pytest.raises(BuildFailedError, match="wrote nothing"):
        toolchain.compile(hip_unit(), tmp_path, arch)


@pytest.mark.parametrize(("answer", "why"), [("clang version 18.1.6", "it is clang 18"), ("nonsense", "does not say")])
def test_wheel_with_an_old_clang_is_refused(
    answer: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "zig"
    _script(fake, f"echo {answer}")
    monkeypatch.setattr(hip_compilers, "zig_binary", lambda: (fake, "zig 0.13.0"))
    with pytest.raises(ToolchainMissingError) as caught:
        HipToolchain([], compiler="ziglang").identity()
    assert why in caught.value.log_tail


def test_compiler_that_writes_nothing_or_nonsense_is_told_apart(tmp_path: Path, arch: ArchSpec) -> None:
    fake, lld = tmp_path / "clang++", tmp_path / "lld"
    lld.write_text("linker")
    for body, reason in (("true", "wrote nothing"), ("echo nonsense > kernel.out", "no AMD code object")):
        fresh = tmp_path / "fresh"
        _script(fresh, _answers("22.1.0", lld=lld, otherwise=body))
        fresh.replace(fake)
        (tmp_path / reason).mkdir()
        with pytest.raises(BuildFailedError, match=reason) as caught:
            HipToolchain([], compiler=str(fake)).compile(hip_unit(), tmp_path / reason, arch)
        assert caught.value.rule == "compiler_failed"


def test_bundles_are_opened() -> None:
    """hiprtc of some releases wraps the image, as clang does unless it is told not to."""
    names = {"host-x86_64-unknown-linux--": b"", "hipv4-amdgcn-amd-amdhsa--gfx90a": b"first"}
    names["hipv4-amdgcn-amd-amdhsa--gfx942:sramecc+:xnack-"] = b"the second"
    head, offset = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", len(names)), 4096
    for name, image in names.items():
        head += struct.pack("<QQQ", offset, len(image), len(name)) + name.encode()
        offset += len(image)
    bundle = head.ljust(4096, b"\0") + b"".join(names.values())
    assert unbundled(bundle, "gfx90a") == b"first"
    assert unbundled(bundle, "gfx942") == b"the second"
    assert unbundled(bundle, "gfx950") == bundle
    assert unbundled(b"\x7fELF", "gfx942") == b"\x7fELF"


def test_importing_the_toolchain_loads_no_driver() -> None:
    module = "tilewright_server.build.toolchains.hip"
    text = f"import sys, {module}; sys.exit(any(n.startswith(('hip.', 'rocm')) for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", text]).returncode == 0
