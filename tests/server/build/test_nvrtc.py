"""The CUDA compiler: real NVRTC, no GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import BuildFailedError, ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.cache.artifacts import ArtifactCache, artifact_key
from tilewright_server.build.pool import BuildPool, PoolOptions
from tilewright_server.build.toolchains import nvrtc as nvrtc_module
from tilewright_server.build.toolchains.nvrtc import NvrtcToolchain, Resources, performance_warnings, resources_of
from tilewright_server.build.workers import helper as helper_module
from tilewright_server.build.workers.helper import Helper, HelperPool
from tilewright_server.build.workers.process import Limits
from tilewright_server.engine.call import Call

have_nvrtc = importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("cuda.bindings") is not None
needs_nvrtc = pytest.mark.skipif(not have_nvrtc, reason="NVRTC is not installed: pip install 'tilewright[cuda]'")

PLAIN = """
struct Params { const float* x; float* out; long long n; };
extern "C" __global__ void answer(const __grid_constant__ Params p) {
  for (long long i = threadIdx.x; i < p.n; i += blockDim.x) p.out[i] = p.x[i] + NUMBER;
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) answer(const float* x, float* out, int n) {
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[threadIdx.x * 64 + i];
  for (int r = 0; r < n; r++) for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i * 7 + 3) % 64];
  for (int i = 0; i < 64; i++) out[threadIdx.x * 64 + i] = a[i];
}
"""
# Without launch bounds ptxas cannot tell how many registers there are to begin with.
IGNORED = """
extern "C" __global__ void answer(float* out) {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  out[threadIdx.x] = 1;
}
"""
# An accumulator is changed while the matrix unit may still write to it.
SERIALISED = """
extern "C" __global__ void answer(float* out, unsigned long long d, int n) {
  float a[4] = {0, 0, 0, 0};
  for (int i = 0; i < n; i++) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3}, %4, %4, 1, 1, 1, 0, 0;"
                 : "+f"(a[0]), "+f"(a[1]), "+f"(a[2]), "+f"(a[3]) : "l"(d));
    a[0] *= 1.5f;
  }
  out[threadIdx.x] = a[0] + a[1] + a[2] + a[3];
}
"""
# Compiles for a minute and more: every level of the template is instantiated twice.
ENDLESS = """
template <int a, int b> struct F { static constexpr int v = F<a - 1, b>::v + F<a - 1, b + (1 << a)>::v; };
template <int b> struct F<0, b> { static constexpr int v = b & 1; };
extern "C" __global__ void answer(int* out) { *out = F<22, 0>::v; }
"""


def cuda_unit(text: str = PLAIN, number: int = 42, **changes: object) -> SourceUnit:
    record = {
        "name": f"answer_{number}",
        "language": "cuda",
        "text": text.replace("NUMBER", str(number)),
        "entries": {"main": "answer"},
        "plugin_version": "1",
    }
    return SourceUnit(**{**record, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def hopper() -> ArchSpec:
    return tilewright_arch.load("sm_90a")


@pytest.fixture
def toolchain() -> Iterator[NvrtcToolchain]:
    toolchain = NvrtcToolchain([include_dir()])
    yield toolchain
    toolchain.close()


@pytest.fixture
def refused(toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path) -> Callable[..., BuildFailedError]:
    def refused(text: str, **changes: object) -> BuildFailedError:
        with pytest.raises(BuildFailedError) as caught:
            toolchain.compile(cuda_unit(text, **changes), tmp_path, hopper)
        return caught.value

    return refused


@needs_nvrtc
def test_result_is_a_device_binary_and_its_log_tells_resources(
    toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path
) -> None:
    compiled = toolchain.compile(cuda_unit(), tmp_path, hopper)
    assert compiled.binary.name == "kernel.cubin"
    data = compiled.binary.read_bytes()
    assert data.startswith(b"\x7fELF")
    assert b"answer" in data
    (resources,) = resources_of(compiled.log)
    assert resources.function == "answer"
    assert 8 <= resources.registers <= 64
    assert resources.spill_bytes == 0


@needs_nvrtc
def test_equal_sources_give_equal_bytes(toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path) -> None:
    binaries = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        binaries.append(toolchain.compile(cuda_unit(), tmp_path / name, hopper).binary.read_bytes())
    assert binaries[0] == binaries[1]


@needs_nvrtc
@pytest.mark.parametrize("name", ["sm_80", "sm_90a"])
def test_every_nvidia_arch_has_a_compiler(name: str, toolchain: NvrtcToolchain, tmp_path: Path) -> None:
    arch = tilewright_arch.load(name)
    assert toolchain.compile(cuda_unit(), tmp_path, arch).binary.stat().st_size > 1000


@needs_nvrtc
def test_refusal_carries_the_log_and_no_paths(refused: Callable[..., BuildFailedError], tmp_path: Path) -> None:
    error = refused('#include "tilewright/core/integers.hpp"\n#error planted\nint x = tw_nothing();\n')
    assert error.rule == "compiler_failed"
    assert "planted" in error.log_tail
    assert str(include_dir()) not in error.log_tail + str(error)
    assert str(tmp_path) not in error.log_tail + str(error)


@needs_nvrtc
@pytest.mark.parametrize(("text", "code"), [(IGNORED, "C7508"), (SERIALISED, "C75")])
def test_lost_optimisation_fails_the_build(text: str, code: str, refused: Callable[..., BuildFailedError]) -> None:
    error = refused(text)
    assert error.rule == "compiler_warning"
    assert code in error.value
    assert code in error.log_tail


@needs_nvrtc
def test_spills_fail_the_build_unless_the_unit_allows_them(
    refused: Callable[..., BuildFailedError], toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path
) -> None:
    error = refused(SPILLING)
    assert error.rule == "kernel_spills"
    assert int(error.value) > 100
    allowed = toolchain.compile(cuda_unit(SPILLING, defines={"TW_ALLOW_SPILLS": "1"}), tmp_path, hopper)
    assert resources_of(allowed.log)[0].spill_bytes == int(error.value)


@needs_nvrtc
def test_compiler_that_takes_too_long_is_killed_and_the_next_build_works(hopper: ArchSpec, tmp_path: Path) -> None:
    toolchain = NvrtcToolchain([], limits=Limits(timeout_s=2.0))
    toolchain.identity()
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(cuda_unit(ENDLESS), tmp_path, hopper)
    assert caught.value.rule == "compiler_hung"
    assert toolchain._helpers.idle == 0
    assert toolchain.compile(cuda_unit(), tmp_path, hopper).binary.is_file()
    toolchain.close()


@needs_nvrtc
def test_abort_ends_a_build_at_once(toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path) -> None:
    abort = threading.Event()
    threading.Timer(0.5, abort.set).start()
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(cuda_unit(ENDLESS), tmp_path, hopper, abort)
    assert caught.value.rule == "compiler_aborted"


@needs_nvrtc
def test_crash_of_the_compiler_is_told_from_a_refusal(
    toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path
) -> None:
    toolchain.identity()
    helper = toolchain._helpers._idle[0]
    threading.Timer(0.5, os.kill, (helper._process.pid, signal.SIGSEGV)).start()
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(cuda_unit(ENDLESS), tmp_path, hopper)
    assert (caught.value.rule, caught.value.value) == ("compiler_killed", f"signal {signal.SIGSEGV.value}")


@needs_nvrtc
def test_memory_of_the_compiler_is_limited(hopper: ArchSpec, tmp_path: Path) -> None:
    toolchain = NvrtcToolchain([], limits=Limits(timeout_s=60.0, memory_bytes=1 << 30))
    text = ENDLESS.replace("22", "26")
    with pytest.raises(BuildFailedError) as caught:
        toolchain.compile(cuda_unit(text), tmp_path, hopper)
    assert caught.value.rule in ("compiler_failed", "compiler_killed")
    assert str(Path(sys.prefix)) not in caught.value.log_tail
    toolchain.close()


@needs_nvrtc
def test_helper_that_left_while_it_waited_is_replaced(
    toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path
) -> None:
    toolchain.identity()
    helper = toolchain._helpers._idle[0]
    helper._process.kill()
    helper._process.wait()
    assert toolchain.compile(cuda_unit(), tmp_path, hopper).binary.is_file()
    assert toolchain._helpers._idle[0] is not helper


@needs_nvrtc
def test_helper_is_reused_and_replaced_after_many_builds(
    hopper: ArchSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helper_module, "_LAST_COMPILE", 3)
    toolchain = NvrtcToolchain([])
    toolchain.identity()
    first = toolchain._helpers._idle[0]
    toolchain.compile(cuda_unit(), tmp_path, hopper)
    assert toolchain._helpers._idle == [first]
    toolchain.compile(cuda_unit(), tmp_path, hopper)
    assert toolchain._helpers.idle == 0
    assert not first.alive


@needs_nvrtc
def test_builds_run_in_parallel_each_in_a_process_of_its_own(tmp_path: Path, hopper: ArchSpec) -> None:
    toolchain = NvrtcToolchain([include_dir()])
    pool = BuildPool(ArtifactCache(tmp_path / "cache"), {"cuda": toolchain}, PoolOptions(workers=4))
    builds = [pool.submit(cuda_unit(number=number), hopper) for number in range(24)]
    for build in builds:
        build.wait(Call.within(60))
    assert 2 <= toolchain._helpers.idle <= 5, "one of each worker, and a less nice one that said the version"
    assert {build.state for build in builds} == {"built"}
    pool.close()
    assert toolchain._helpers.idle == 0


@needs_nvrtc
def test_key_follows_compiler_flags_and_headers(tmp_path: Path, hopper: ArchSpec, toolchain: NvrtcToolchain) -> None:
    header = tmp_path / "own.hpp"
    header.write_text("constexpr int one = 1;\n")
    own = NvrtcToolchain([tmp_path])
    unit = cuda_unit('#include "own.hpp"\n' + PLAIN)
    before = artifact_key(unit, hopper, own)
    assert before == artifact_key(unit, hopper, own)
    assert before != artifact_key(unit, tilewright_arch.load("sm_80"), own)
    assert before != artifact_key(cuda_unit(unit.text, defines={"X": "1"}), hopper, own)
    assert own.compile(unit, tmp_path, hopper).binary.is_file()
    header.write_text("constexpr int one = 2;\n")
    assert before != artifact_key(unit, hopper, own)
    assert own.identity() == toolchain.identity()
    assert own.identity().startswith("NVRTC 13.0 [")
    own.close()


@needs_nvrtc
def test_many_threads_share_the_helpers(toolchain: NvrtcToolchain, hopper: ArchSpec, tmp_path: Path) -> None:
    toolchain.identity()

    def work(number: int) -> bytes:
        folder = tmp_path / str(number)
        folder.mkdir()
        return toolchain.compile(cuda_unit(number=number % 4), folder, hopper).binary.read_bytes()

    with ThreadPoolExecutor(4) as threads:
        binaries = list(threads.map(work, range(16)))
    assert len(set(binaries)) == 4


def test_missing_packages_are_refused_with_the_way_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_module, "have_module", lambda module: False)
    with pytest.raises(ToolchainMissingError) as caught:
        NvrtcToolchain([]).identity()
    assert "pip install 'tilewright[cuda]'" in caught.value.fix


def test_library_that_cannot_be_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_module, "have_module", lambda module: True)
    monkeypatch.setattr(HelperPool, "ask", lambda self, record: ({"state": "missing", "reason": "no libnvrtc"}, b""))
    with pytest.raises(ToolchainMissingError) as caught:
        NvrtcToolchain([]).identity()
    assert caught.value.log_tail == "no libnvrtc"


def test_helper_that_cannot_be_started_is_a_missing_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_module, "have_module", lambda module: True)
    monkeypatch.setattr(helper_module, "run_module", lambda *_: ["/nonexistent/python"])
    with pytest.raises(ToolchainMissingError, match="cannot be started"):
        NvrtcToolchain([]).identity()


def test_frames_survive_any_split() -> None:
    helper = Helper("tilewright_server.build.workers.nvrtc_worker", Limits(timeout_s=10.0))
    large = cuda_unit(PLAIN + "// " + "x" * 300_000)
    answer, _ = helper.ask({"ask": "identity", "padding": large.text})
    assert answer["state"] in ("ok", "missing")
    assert json.dumps(answer)
    helper.end()
    helper.end()
    assert not helper.alive


def test_resources_are_read_from_what_ptxas_says() -> None:
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     272 bytes stack frame, 532 bytes spill stores, 576 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 272 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Function properties for other
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 0 barriers
"""
    assert resources_of(log) == (Resources("k", 32, 272, 1108, 1024), Resources("other", 168))
    assert performance_warnings(log) == ()
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert performance_warnings(f"a\n{warning}\nb") == (warning,)
