"""GEMM kernels for AMD GPUs compile without spills, and to the instructions that they are meant to consist of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from amd_cases import ALL, PRODUCTS, SIZE
from amd_config import ARCHS, WAVE, AmdConfig, KernelSet, compile_kernels, missing_tools

import tilewright_arch
from tilewright_tools.analysis.loops import main_loop

# What each GPU's matrix unit does at a time, as the ISA documents list it: for elements and rows of the warp tile, the
# depths (elements), deepest first, and the mnemonic.
SHORT = {32: "f32_32x32x8", 16: "f32_16x16x16", 4: "f32_4x4x4", 64: "f32_4x4x4"}


def instructions(arch: str, a: str, b: str, m: int) -> list[tuple[int, str]]:
    """Depth and mnemonic. The first operand of an instruction is B."""
    if arch == "gfx1100":
        return [(16, "v_wmma_i32_16x16x16_iu8" if a == "int8" else f"v_wmma_f32_16x16x16_{short(a)}")]
    if arch == "gfx1201":
        kind = f"f32_16x16x16_{b}_{a}" if SIZE[a] == 1 else f"f32_16x16x16_{short(a)}"
        return [(16, f"v_wmma_{'i32_16x16x16_iu8' if a == 'int8' else kind}")]
    old = arch == "gfx90a"
    rows = 32 if m == 32 else 16
    if a == "fp32":
        name = "32x32x2" if rows == 32 else "16x16x4"
        return [(2 if rows == 32 else 4, f"v_mfma_f32_{name}{'' if old else '_'}f32")]
    if a == "int8":
        short_form = {32: (8, "32x32x8"), 16: (16, "16x16x16")} if old else {32: (16, "32x32x16"), 16: (32, "16x16x32")}
        deep = [(32, "32x32x32") if rows == 32 else (64, "16x16x64")] if arch == "gfx950" else []
        return [(k, f"v_mfma_i32_{name}{'' if old else '_'}i8") for k, name in [*deep, short_form[rows]]]
    if old and SIZE[a] == 1:  # widened
        a = b = "bf16"
    if SIZE[a] == 1:
        found = [(16 if rows == 32 else 32, f"v_mfma_f32_{'32x32x16' if rows == 32 else '16x16x32'}_{b}_{a}")]
        deep_name = (64, "v_mfma_f32_32x32x64_f8f6f4") if rows == 32 else (128, "v_mfma_f32_16x16x128_f8f6f4")
        return [deep_name, *found] if arch == "gfx950" else found
    depth = {32: 8, 16: 16, 4: 4, 64: 4}[m]
    blocks = "_16b_" if m in (4, 64) and not old else "" if old else "_"
    name = f"v_mfma_{SHORT[m]}{blocks}{short(a)}{'_1k' if old and a == 'bf16' else ''}"
    deep = [(16, f"v_mfma_f32_32x32x16_{short(a)}") if m == 32 else (32, f"v_mfma_f32_16x16x32_{short(a)}")]
    return [*(deep if arch == "gfx950" and m in (16, 32) else []), (depth, name)]


def short(dtype: str) -> str:
    return {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}.get(dtype, dtype)


def expected(config: AmdConfig) -> tuple[int, str]:
    """The deepest instruction that divides the warp tile."""
    fits = instructions(config.arch, config.a, config.b, config.warp_tile[0])
    return next((depth, name) for depth, name in fits if config.warp_tile[2] % depth == 0)


@pytest.fixture(scope="module", autouse=True)
def _tools(build_folder: Path) -> None:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.some(1)
@pytest.mark.extended
def test_every_atom_compiles_to_its_instruction_without_spills(arch: str, build_folder: Path) -> None:
    spec = tilewright_arch.load(arch)
    kernels = KernelSet(build_folder, ALL)
    for config in (config for config in PRODUCTS.values() if config.arch == arch):
        built, name = kernels.built(config)
        facts, (threads, shared) = built.resources(name), built.facts(name)
        assert facts.scratch_bytes == facts.vgpr_spills == 0, config
        assert facts.vgprs <= spec.max_vgprs and shared <= spec.lds_bytes and threads == config.threads, config
        mnemonics = {instruction.mnemonic for instruction in built.function(name).instructions}
        matrix = {each for each in mnemonics if each.startswith(("v_mfma", "v_wmma"))}
        simt = config.a == "fp32" and WAVE[arch] == 32
        assert matrix == (set() if simt else {expected(config)[1]}), config


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.extended
def test_every_barrier_waits_for_shared_memory(arch: str, build_folder: Path) -> None:
    """Ahead of each barrier, with no jump and no operation on LDS in between, a wave waits for all of its own."""
    kernels, barriers = KernelSet(build_folder, ALL), 0
    for config in (config for config in PRODUCTS.values() if config.arch == arch):
        built, name = kernels.built(config)
        instructions, waited = built.function(name).instructions, False
        targets = {instruction.target for instruction in instructions}
        for instruction in instructions:
            mnemonic, operands = instruction.mnemonic, " ".join(instruction.operands)
            if mnemonic.startswith("ds_") or instruction.address in targets:
                waited = False
            if (mnemonic == "s_waitcnt" and "lgkmcnt(0)" in operands) or (
                mnemonic in ("s_wait_dscnt", "s_wait_loadcnt_dscnt") and int(operands, 0) & 63 == 0
            ):
                waited = True
            if mnemonic in ("s_barrier", "s_barrier_signal"):
                assert waited, (config, instruction)
                barriers += 1
    assert barriers > 0


# What is large enough to be worth running: (tile, waves) for 4 waves of 64, and for 8 of 32.
WIDE = {64: ((128, 128, 64), (2, 2)), 32: ((128, 128, 32), (2, 4))}
LOADS = ("buffer_load", "global_load")


def large(arch: str, a: str, b: str, warp_tile: tuple[int, int, int], **changes: object) -> AmdConfig:
    (m, n, k), wave = WIDE[WAVE[arch]]
    base = AmdConfig(arch=arch, wave_size=WAVE[arch], a=a, b=b, c="int32" if a == "int8" else "bf16", wave=wave)
    base = base.replace(tile=(m, n, max(k * 2 // SIZE[a], warp_tile[2])), warp_tile=warp_tile, epilogue="default")
    return base.replace(**changes)  # type: ignore[return-value]


def _large() -> dict[str, AmdConfig]:
    found = {}
    for arch in ARCHS:
        deep = arch == "gfx950"
        if WAVE[arch] == 64:
            half, byte = ((32, 32, 16) if deep else (32, 32, 8)), ((16, 16, 128) if deep else (32, 32, 16))
            found[f"{arch}_fp32"] = large(arch, "fp32", "fp32", (32, 32, 8), c="fp32")
        else:
            half = byte = (16, 16, 16)
        if arch != "gfx1100":
            found[f"{arch}_fp8"] = large(arch, "fp8", "fp8", byte)
        whole = byte if WAVE[arch] == 32 else (32, 32, 16)
        found |= {
            f"{arch}_fp16": large(arch, "fp16", "fp16", half, pipeline="compv4"),
            f"{arch}_bf16_cr": large(arch, "bf16", "bf16", half, a_col=True, b_col=False),
            f"{arch}_int8_rr": large(arch, "int8", "int8", whole, b_col=False),
        }
    return found


LARGE = _large()


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.some(3)
def test_main_loops_multiply_and_move_wide_vectors(name: str, build_folder: Path) -> None:
    config = LARGE[name]
    built = compile_kernels(build_folder, {"kernel": config})
    facts = built.resources("kernel")
    assert facts.scratch_bytes == facts.vgpr_spills == 0
    loop = main_loop(built.function("kernel"))
    assert loop is not None
    count = Counter(instruction.mnemonic for instruction in loop.body)
    depth, mnemonic = expected(config)
    (m, n, k), (wave_m, wave_n), (rows, columns, _) = config.tile, config.wave, config.warp_tile
    step = (m // wave_m // rows) * (n // wave_n // columns) * (k // depth)
    assert count[mnemonic] > 0 and count[mnemonic] % step == 0, (count, step)
    turns = count[mnemonic] // step  # steps along k that the loop takes each time round
    moved = (m + n) * k * SIZE[config.a] // config.threads * turns
    assert sum(bytes_of(name) * count[name] for name in count if name.startswith(LOADS)) == moved, count
    whole = row_major(config)
    least = {"ds_read": 16, "ds_load": 16, "ds_write": 16 if whole else 4, "ds_store": 16 if whole else 4}
    least |= dict.fromkeys(LOADS, 16 if whole else 8)
    assert not [name for name in count for kind in least if name.startswith(kind) and bytes_of(name) < least[kind]], (
        count
    )


def row_major(config: AmdConfig) -> bool:
    """Whether k is contiguous in both operands: nothing is transposed."""
    return not config.a_col and config.b_col


def bytes_of(mnemonic: str) -> int:
    """Bytes that a lane moves."""
    widths = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "b96": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4}
    last = mnemonic.rsplit("_", 1)[1]
    twice = 2 if "read2" in mnemonic or "write2" in mnemonic or "2addr" in mnemonic else 1
    return widths.get(last, 1) * twice


def test_a_warp_tile_without_an_instruction_is_refused_with_a_reason(build_folder: Path) -> None:
    refused = {
        "no matrix instruction for these types": AmdConfig(
            arch="gfx942", a="int8", b="int8", warp_tile=(4, 64, 16), wave=(1, 1), tile=(16, 64, 64)
        ),
        "a multiple of the warp tile's depth": AmdConfig(warp_tile=(16, 16, 32), tile=(64, 64, 16)),
        "a wave's part is a multiple of the warp tile": AmdConfig(
            warp_tile=(32, 32, 8), tile=(32, 64, 32), wave=(2, 1)
        ),
    }
    for reason, config in refused.items():
        with pytest.raises(RuntimeError, match=reason):
            compile_kernels(build_folder, {"kernel": config})
