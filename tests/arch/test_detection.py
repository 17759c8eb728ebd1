"""Recognising machines: CPUs from captured texts, GPUs from what their drivers report."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

import tilewright_arch as arch

DATA = Path(__file__).parent / "data"


def captured(name: str) -> str:
    return (DATA / f"cpuinfo-{name}.txt").read_text("utf-8")


@pytest.mark.parametrize(
    ("capture", "machine", "expected"),
    [
        ("x86-v2", "x86_64", "x86-64-v2"),
        ("x86-v3", "x86_64", "x86-64-v3"),
        ("x86-v3", "AMD64", "x86-64-v3"),
        ("x86-v4-bf16-vnni", "x86_64", "x86-64-v4+bf16+vnni"),
        ("aarch64", "aarch64", "aarch64"),
        ("aarch64", "arm64", "aarch64"),
    ],
)
def test_a_cpu_is_detected_with_its_features(capture: str, machine: str, expected: str) -> None:
    assert arch.detect_cpu(captured(capture), machine).id == expected


def test_without_a_feature_flag_the_feature_stays_off() -> None:
    text = captured("x86-v4-bf16-vnni").replace(" avx512_bf16", "")
    assert arch.detect_cpu(text, "x86_64").id == "x86-64-v4+vnni"


def test_only_what_all_cores_have_counts() -> None:
    text = captured("x86-v4-bf16-vnni") + captured("x86-v3")
    assert arch.detect_cpu(text, "x86_64").id == "x86-64-v3"


def test_a_cpu_below_every_level_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(arch.UnsupportedDeviceError, match="sse4_2"):
        arch.detect_cpu(captured("x86-v2").replace(" sse4_2", ""), "x86_64")
    with pytest.raises(arch.UnsupportedDeviceError, match="riscv64"):
        arch.detect_cpu("", "riscv64")


def write_cache(folder: Path, index: int, level: int, kind: str, size: str) -> None:
    entry = folder / f"index{index}"
    entry.mkdir()
    for name, text in {"level": str(level), "type": kind, "size": size, "coherency_line_size": "64"}.items():
        (entry / name).write_text(text + "\n")


def test_real_cache_sizes_replace_the_defaults_and_the_budget_follows(tmp_path: Path) -> None:
    write_cache(tmp_path, 0, 1, "Data", "48K")
    write_cache(tmp_path, 1, 1, "Instruction", "32K")
    write_cache(tmp_path, 2, 2, "Unified", "2M")
    write_cache(tmp_path, 3, 3, "Unified", "32768K")
    spec = arch.detect_cpu(captured("x86-v4-bf16-vnni"), "x86_64", tmp_path)
    assert spec.caches == arch.Caches(64, 48 << 10, 2 << 20, 32 << 20)
    assert spec.lds_bytes == (2 << 20) * 3 // 4
    assert spec.lds_budget("compv3") == spec.lds_bytes


def test_unreadable_caches_keep_the_defaults(tmp_path: Path) -> None:
    write_cache(tmp_path, 0, 2, "Unified", "much")
    spec = arch.detect_cpu(captured("x86-v3"), "x86_64", tmp_path)
    assert spec.caches == arch.load("x86-64-v3").caches


@pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="no spec for this machine")
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="not Linux")
def test_this_machine_is_detected() -> None:
    spec = arch.detect_cpu()
    assert spec.kind == "cpu"
    assert spec.lds_bytes > 0
    assert arch.load(spec.id).toolchain == spec.toolchain


@pytest.mark.parametrize(
    ("reported", "expected"),
    [("gfx942:sramecc+:xnack-", "gfx942"), ("gfx90a", "gfx90a"), ("gfx1201", "gfx1201"), ("gfx950:xnack-", "gfx950")],
)
def test_a_hip_device_is_known_by_its_gcn_arch_name(reported: str, expected: str) -> None:
    assert arch.from_gcn_arch_name(reported) is arch.load(expected)


def test_a_sibling_gets_its_familys_tables_and_its_own_target() -> None:
    spec = arch.from_gcn_arch_name("gfx1101")
    assert spec.id == "gfx1100"
    assert spec.toolchain.flags == ("--offload-arch=gfx1101",)
    assert spec.throughput.units == 0


@pytest.mark.parametrize("name", ["gfx906:xnack-", "gfx940", "gfx1030", ""])
def test_an_unknown_hip_device_is_a_typed_error_without_a_guess(name: str) -> None:
    with pytest.raises(arch.UnsupportedDeviceError) as caught:
        arch.from_gcn_arch_name(name)
    text = str(caught.value)
    assert name.partition(":")[0] in text
    assert "gfx942, gfx950" in text
    assert "did you mean" not in text


@pytest.mark.parametrize(
    ("capability", "expected", "gpu_arch"),
    [
        ((9, 0), "sm_90a", "sm_90a"),
        ((8, 0), "sm_80", "sm_80"),
        ((8, 6), "sm_80", "sm_80"),
        ((8, 9), "sm_80", "sm_80"),
        # Binaries do not cross major versions, and Hopper's own instructions end with it.
        ((10, 0), "sm_80", "sm_100"),
        ((12, 0), "sm_80", "sm_120"),
    ],
)
def test_a_cuda_device_gets_the_best_spec_it_can_run(capability: tuple[int, int], expected: str, gpu_arch: str) -> None:
    spec = arch.from_compute_capability(*capability)
    assert (spec.id, spec.toolchain.gpu_arch) == (expected, gpu_arch)


def test_a_cuda_device_below_the_lowest_spec_is_refused() -> None:
    with pytest.raises(arch.UnsupportedDeviceError, match=r"7\.5 is not supported.*8\.0"):
        arch.from_compute_capability(7, 5)


def test_an_opened_device_replaces_the_defaults() -> None:
    spec = arch.load("sm_80").with_device(lds_bytes=101376, units=84, clock_mhz=1695)
    assert (spec.lds_bytes, spec.throughput.units, spec.throughput.clock_mhz) == (101376, 84, 1695)
    assert spec.throughput.memory_bytes_per_second == arch.load("sm_80").throughput.memory_bytes_per_second
    assert spec.lds_budget("compv4") == 50688
