"""The portable GPU kernels compile for NVIDIA GPUs without spills and with the instructions they are made for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_config import GpuConfig, compile_text
from native_harness import INCLUDE

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the packages of the extra `cuda`")

WIDE = ((128, 128, 64), (2, 2))
KERNELS: dict[str, tuple[GpuConfig, str]] = {
    "bf16_rc": (GpuConfig(a="bf16", b="bf16", c="bf16", tile=WIDE[0], wave=WIDE[1]), "m16n8k16.row.col.f32.bf16"),
    "fp16_cr": (GpuConfig(a_col=True, b_col=False, tile=WIDE[0], wave=WIDE[1]), "m16n8k16.row.col.f32.f16"),
    "fp16_rr_registers": (
        GpuConfig(b_col=False, tile=(128, 128, 32), wave=(2, 4), pipeline="compv3", epilogue="default"),
        "ldmatrix.sync.aligned.m8n8.x4.trans",
    ),
    "int8_rr": (
        GpuConfig(a="int8", b="int8", c="int32", b_col=False, tile=(128, 128, 64), wave=WIDE[1]),
        "m16n8k32.row.col.s32.s8.s8.s32",
    ),
    "int8_cc_scaled": (
        GpuConfig(a="int8", b="int8", c="bf16", a_col=True, tile=(64, 64, 64), scale_a="row", scale_b="column"),
        "m16n8k32.row.col.s32.s8.s8.s32",
    ),
    "fp32_rr": (
        GpuConfig(a="fp32", b="fp32", c="fp32", b_col=False, tile=(128, 128, 16), wave=(2, 4)),
        "fma.rn.f32",
    ),
    "fp32_cr": (
        GpuConfig(a="fp32", b="fp32", c="fp32", a_col=True, b_col=False, tile=(128, 128, 16), wave=(2, 4)),
        "cp.async.cg.shared.global",
    ),
    "everything": (
        GpuConfig(
            tile=(64, 64, 64), bias="fp32", d=("fp16", "bf16"), binary="Add", unary="Gelu", scale_a="row",
            scale_b="column", split_k=4, persistent=True, grouped=True,
        ),
        "atom.global.acq_rel.gpu.add.u32",
    ),
    "everything_wide": (
        GpuConfig(
            a="bf16", b="bf16", c="bf16", a_col=True, b_col=False, tile=(128, 128, 64), bias="fp32", d=("fp32", "fp16"),
            binary="MultiDAdd", unary="Gelu", scale_a="row", scale_b="column", split_k=4, persistent=True, grouped=True,
        ),
        "ld.global.cg.v4.b32",
    ),
    "decode": (
        GpuConfig(a="bf16", b="bf16", c="bf16", tile=(16, 64, 128), wave=(1, 4), stages=5, pipeline="mem", split_k=8),
        "cp.async.wait_group",
    ),
}  # fmt: skip
EIGHT_BIT: dict[str, tuple[GpuConfig, str]] = {
    f"{a}_{b}": (
        GpuConfig(a=a, b=b, c="bf16", a_col=a == "bf8", b_col=b == "fp8", tile=(128, 128, 64), wave=(2, 4)),
        f"m16n8k32.row.col.f32.{name[a]}.{name[b]}.f32",
    )
    for name in ({"fp8": "e4m3", "bf8": "e5m2"},)
    for a in name
    for b in name
}
CASES = [
    *((name, "sm_90a") for name in (*KERNELS, *EIGHT_BIT)),
    *((name, "sm_80") for name in ("bf16_rc", "int8_rr", "fp32_rr", "everything")),
]


@pytest.mark.parametrize(("name", "arch"), CASES)
@pytest.mark.some(3)
def test_kernels_compile_without_spills_or_warnings(name: str, arch: str) -> None:
    config, instruction = {**KERNELS, **EIGHT_BIT}[name]
    built = compile_text(config.unit("kernel"), arch)
    assert instruction in built.ptx
    assert built.spilled_bytes == 0, built.log
    assert re.findall(r"C75\d\d|warning", built.log) == []
    assert built.registers * config.threads <= 65536


@pytest.mark.extended
def test_shared_memory_is_as_documented() -> None:
    """Python's formula and the template's own constant agree (the compiler checks)."""
    for config, _ in {**KERNELS, **EIGHT_BIT}.values():
        for changed in (config, config.replace(pipeline="compv3"), config.replace(epilogue="default", stages=5)):
            text = changed.unit("kernel").replace(
                "TW_GEMM_KERNEL(",
                f"static_assert(tw::gpu::Gemm<Config_kernel>::shared_bytes == {changed.shared_bytes});\n"
                f"static_assert(tw::gpu::Gemm<Config_kernel>::threads == {changed.threads});\n//",
            )
            compile_text(text, "sm_90a")


def test_eight_bit_floats_need_a_later_gpu() -> None:
    with pytest.raises(RuntimeError, match="no matrix instruction for 8-bit floats"):
        compile_text(EIGHT_BIT["fp8_fp8"][0].unit("kernel"), "sm_80")


def test_invalid_configurations_are_refused_with_a_reason() -> None:
    refused = {
        "is a multiple of 16 x 8 x 32 B": GpuConfig(tile=(64, 64, 16), wave=(8, 1)),
        "two stages or more": GpuConfig(stages=1),
        "a multiple of 16": GpuConfig(a="int8", b="int8", c="int32", b_col=False, tile=(32, 32, 64), wave=(1, 4)),
        "an int32 result needs int8 operands": GpuConfig(c="int32"),
    }
    for reason, config in refused.items():
        with pytest.raises(RuntimeError, match=reason):
            compile_text(config.unit("kernel"))


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100", "gfx1201"])
def test_the_same_source_compiles_for_amd_gpus(arch: str, tmp_path: Path) -> None:
    """fp32, whose atom is plain C++; to assembly, so that no linker is needed."""
    pytest.importorskip("ziglang")
    config = GpuConfig(
        a="fp32", b="fp32", c="bf16", bias="fp32", d=("fp16",), binary="Add", unary="Gelu", tile=(64, 64, 16),
        pipeline="compv3", split_k=2, grouped=True, scale_a="row",
    )  # fmt: skip
    source, output = tmp_path / "unit.hip", tmp_path / "unit.s"
    source.write_text(config.unit("kernel"))
    flags = ["-x", "hip", "--offload-device-only", f"--offload-arch={arch}", "-nogpuinc", "-nogpulib", "-nostdinc"]
    flags += ["--no-gpu-bundle-output", "-O3", "-std=c++17", f"-I{INCLUDE}", "-Wall", "-Werror", "-S"]
    command = [sys.executable, "-m", "ziglang", "clang", *flags, str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    text = output.read_text()
    assert re.search(r"v_(pk_)?fmac?_f32", text)
    assert re.search(r"\.vgpr_spill_count: +0\b", text)
