"""Kernels that planners may propose for AMD GPUs build: a part that covers all of them (``proposals.py``), recorded as
kernel sets are (``gated.py``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import batches
import pytest
from batches import faults_of_units, joined
from gated import Kept, gate_of
from proposals import REQUESTS, block_scales, convolutions, cover, narrow_weights, owner, proposed, requests

import tilewright_arch
from tilewright_arch import ArchSpec
from tilewright_kit.contract.source import SourceUnit
from tilewright_kit.types.errors import ToolchainMissingError
from tilewright_native import include_dir
from tilewright_server.build.toolchains import code_object, hip
from tilewright_server.build.toolchains.hip import HipToolchain
from tilewright_server.build.workers.process import Limits

ARCHS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
SAMPLE = 1
"""Kernels of each operation that a compiler compiles of which there is no record."""


def chosen(names: Iterable[str]) -> list[str]:
    """Some of them, always the same, by a hash."""
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:SAMPLE]


@pytest.fixture(scope="module")
def toolchain() -> Iterator[HipToolchain]:
    toolchain = HipToolchain([include_dir()], limits=Limits(timeout_s=1800))
    try:
        toolchain.identity()
    except ToolchainMissingError as error:
        pytest.skip(str(error))
    yield toolchain
    toolchain.close()


def units_of(name: str, arch: ArchSpec) -> dict[str, SourceUnit]:
    """The covering part of an operation's proposals, by name."""
    found = cover(proposed(owner(name), arch, requests(name)))
    return {f"{config.operation} {config.name}": owner(config.operation).generate(config, arch) for config in found}


@pytest.mark.slow
@pytest.mark.extended
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("arch", ARCHS)
def test_proposals_build_within_their_registers_as_shipped_sets_do(
    arch: str, name: str, toolchain: HipToolchain, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    spec = tilewright_arch.load(arch)
    units = units_of(name, spec)
    assert units
    gate = gate_of(f"proposals/{name}/{arch}", units.values(), spec, toolchain, [Path(batches.__file__)])

    def faults(whole: bool) -> list[str]:
        if not whole:
            return faults_of_units({key: units[key] for key in chosen(units)}, spec, toolchain, tmp_path)
        kept = Kept([Path(batches.__file__), Path(code_object.__file__), Path(hip.__file__)], spec, toolchain)
        return kept.faults(units, lambda some, at: faults_of_units(some, spec, toolchain, tmp_path / str(at)))

    # What has changed since the record was made is compiled whole by ``make gates`` only: that takes long.
    again = pytestconfig.getoption("--gates")
    gate.require(lambda _whole: faults(again), again)


def test_a_gate_that_was_stopped_goes_on_where_it_was(
    toolchain: HipToolchain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And judges again what failed, and what has changed since it passed."""
    spec = tilewright_arch.load("gfx90a")
    units = units_of("kv_append", spec)
    first, *others = units
    monkeypatch.setattr(Kept, "FILE", tmp_path / "build" / "passed.txt")
    monkeypatch.setattr(Kept, "TOGETHER", 1)
    judged: list[str] = []

    def judge(some: Mapping[str, SourceUnit], _before: int) -> list[str]:
        judged.extend(some)
        if len(judged) == 3:
            raise KeyboardInterrupt
        return [f"{first}: it spills"] if first in some else []

    with pytest.raises(KeyboardInterrupt):
        Kept([], spec, toolchain).faults(units, judge)
    stopped = len(judged)
    assert Kept([], spec, toolchain).faults(units, judge) == [f"{first}: it spills"]
    passed = {name for name in judged[: stopped - 1] if name != first}
    assert set(judged[stopped:]) == set(units) - passed
    changed = units | {others[0]: replace(units[others[0]], text=units[others[0]].text + "\n")}
    judged[:] = [""] * 9
    Kept([], spec, toolchain).faults(changed, judge)
    assert set(judged[9:]) == {first, others[0]}
    judged[:] = [""] * 9
    Kept([Path(__file__)], spec, toolchain).faults(units, judge)  # another judge
    assert set(judged[9:]) == set(units)


def test_the_covering_part_has_every_shape_with_each_type_and_layout() -> None:
    spec = tilewright_arch.load("gfx1201")
    every = proposed(owner("gemm"), spec, requests("gemm"))
    part = cover(every)
    assert set(part) < set(every) and len(part) * 4 < len(every)

    def shapes(configs: object, field: str) -> set[object]:
        return {(item.pipeline, item.tile, item.wave, item.warp_tile, getattr(item, field)) for item in configs}  # type: ignore[attr-defined]

    for field in ("dtype_a", "layout"):
        assert shapes(part, field) == shapes(every, field)
    for field in ("epilogue", "scale_b", "dtype_c"):
        assert {getattr(item, field) for item in part} == {getattr(item, field) for item in every}
    assert any(item.split_k > 1 for item in part) and any(item.int4 for item in part)  # type: ignore[attr-defined]


@pytest.mark.extended
def test_proposals_have_kernels_of_every_kind_of_stage() -> None:
    spec = tilewright_arch.load("gfx942")
    found = {
        str(item.to_dict()["family"]) for item in proposed(owner("attention"), spec, requests("attention"))
    }  # fmt: skip
    assert found >= {"fwd", "fwd_splitkv", "fwd_splitkv_combine", "scores"}
    appended = proposed(owner("kv_append"), spec, requests("kv_append"))
    assert {item.to_dict()["dtype"] for item in appended} >= {"fp32", "fp16", "bf16"}
    assert any(item.to_dict()["qscale"] != "no" for item in appended)


def test_a_kernel_among_several_that_spills_is_found(toolchain: HipToolchain, tmp_path: Path) -> None:
    spec = tilewright_arch.load("gfx942")
    every = units_of("kv_append", spec)
    units = dict([(name, unit) for name, unit in every.items() if "fmha/append.hpp" in unit.text][:3])
    assert not faults_of_units(units, spec, toolchain, tmp_path / "right")
    name, unit = next(iter(units.items()))
    (symbol,) = unit.entries.values()
    wrong = """
extern "C" __attribute__((global)) void SYMBOL(int* x, int n) {
  volatile int kept[64];
  for (int i = 0; i < 64; i++) kept[i] = x[i];
  x[n] = kept[n];
}
"""
    head = "".join(line for line in unit.text.splitlines(True) if line.startswith("#include"))
    text = head + wrong.replace("SYMBOL", symbol)
    broken = SourceUnit(unit.name, unit.language, text, unit.entries, flags=unit.flags, defines=unit.defines)
    (fault,) = faults_of_units(units | {name: broken}, spec, toolchain, tmp_path / "wrong")
    assert fault.startswith(f"{name}: kernel_spills")
    assert len(joined(list(units.values())).entries) == 3


@pytest.mark.extended
def test_sums_of_blocks_and_of_groups_have_room_beside_their_factors() -> None:
    """Measured with clang 22: tiles of 128x128 with 4-bit weights spill 9 registers on gfx1100, of ``ccr`` with blocks
    of 32 up to 39 on gfx1201; tiles of 256x192 up to 180 on gfx942, and of 128x256 up to 48 but for ``rcr``.
    """
    for arch, kinds, large, small in (
        ("gfx1100", narrow_weights, (128, 128), (64, 128)), ("gfx1201", block_scales, (128, 128), (64, 128)),
        ("gfx942", block_scales, (128, 256), (128, 128)), ("gfx942", narrow_weights, (256, 192), (128, 128)),
    ):  # fmt: skip
        found = [item.to_dict() for item in proposed(owner("gemm"), tilewright_arch.load(arch), kinds())]
        tiles = {tuple(item["tile"][:2]) for item in found if kinds is narrow_weights or item["layout"] != "rcr"}
        assert large not in tiles and small in tiles


def test_steps_of_experts_that_registers_do_not_hold_are_not_proposed() -> None:
    found = [
        item.to_dict() for item in proposed(owner("moe_gemm"), tilewright_arch.load("gfx1100"), requests("moe_gemm"))
    ]
    steps = {(item["dtype_a"], tuple(item["tile"])) for item in found if item["pipeline"] == "mem"}
    assert ("fp32", (64, 64, 32)) in steps and ("bf16", (32, 128, 64)) in steps
    assert not steps & {("fp32", (64, 64, 64)), ("bf16", (32, 128, 128))}


@pytest.mark.extended
@pytest.mark.parametrize("arch", ["gfx1100", "gfx1201"])
def test_rows_that_are_turned_in_halves_and_appended_to_pages_build(
    arch: str, toolchain: HipToolchain, tmp_path: Path
) -> None:
    """Clang 22 sets memory aside for scalar registers of these kernels, which no instruction uses."""
    names = {
        name: unit for name, unit in units_of("kv_append", tilewright_arch.load(arch)).items() if "ropehalf" in name
    }
    assert names and not faults_of_units(names, tilewright_arch.load(arch), toolchain, tmp_path)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("direction", ["conv", "conv_backward_data"])
def test_small_groups_keep_the_weights_that_registers_hold(arch: str, direction: str) -> None:
    """Measured with clang 22: 16 weights of 9 taps for two rows of pixels take 352 registers, for one 169; 64 of them
    about 1100. RDNA has 256 a lane, CDNA 512.
    """
    spec = tilewright_arch.load(arch)
    room = spec.registers_per_thread(4 * spec.wave_size)
    requests = [item for item in convolutions(direction) if item.attributes["groups"] == 16]
    kernels = [item.to_dict() for item in proposed(owner(direction), spec, requests[::2])]
    small = [item for item in kernels if item.get("specialization") == "direct" and item["filter"][2]]
    assert small
    for item in small:
        weights = item["vector_sizes"][0] ** 2 * item["filter"][1] * item["filter"][2]
        assert weights * item["pixel_tile"][1] + 72 <= room, item


@pytest.mark.parametrize(("direction", "arch"), [("conv", "gfx90a"), ("conv_backward_data", "gfx950")])
def test_filters_of_49_taps_leave_room_for_the_lines_that_two_rows_of_pixels_meet(direction: str, arch: str) -> None:
    """Measured with clang 22: vectors of two in fp32 take 530 and 561 registers for two rows of two and four pixels and
    spill, 330 for one row, and 490 in bf16, whose lines take half as many.
    """
    requests = [
        item for item in convolutions(direction) if item.attributes["groups"] == 16 and item.inputs["w"].shape[2] == 7
    ]
    kernels = [item.to_dict() for item in proposed(owner(direction), tilewright_arch.load(arch), requests[::2])]
    found = {
        (item["dtype_in"], tuple(item["pixel_tile"]))
        for item in kernels
        if tuple(item.get("filter", ())) == (1, 7, 7) and item["vector_sizes"][0] == 2
    }
    assert {("fp32", (1, 1, 4)), ("bf16", (1, 2, 4)), ("bf16", (1, 2, 2))} <= found
    assert not found & {("fp32", (1, 2, 4)), ("fp32", (1, 2, 2))}


def test_gradients_of_one_wave_and_many_keys_are_not_proposed_where_they_spill() -> None:
    """Measured with clang 22: 128 keys and heads of 64 on one wave take more than 512 registers, on two 311."""
    spec = tilewright_arch.load("gfx950")
    requests = [item for item in REQUESTS["attention_backward"]() if item.inputs["q"].shape[3] == 64]
    found = proposed(owner("attention_backward"), spec, requests)
    cuts = {(item.to_dict()["wave"][1], tuple(item.to_dict()["tile"][:2])) for item in found if "h64x64" in item.name}
    assert (2, (32, 128)) in cuts and (1, (32, 128)) not in cuts


def test_tall_tiles_with_both_operands_in_columns_are_proposed_where_they_fit() -> None:
    """Measured with clang 22 for gfx1201: tiles of 256x128 take 256 registers and spill one in ``compv4``, but neither
    tiles of 128x256, nor ``compv3``, nor slices of K.
    """
    requests = [item for item in REQUESTS["gemm"]() if item.inputs["a"].dtype.value == "fp16"]
    found = proposed(owner("gemm"), tilewright_arch.load("gfx1201"), requests)
    names = [item.name for item in found if item.name.startswith("gemm_fp16_ccr_")]

    def has(*words: str, split: bool = False) -> bool:
        return any(all(word in name for word in words) and ("splitk" in name) == split for name in names)

    assert not has("compv4", "_256x128x32_")
    assert has("compv3", "_256x128x32_") and has("compv4", "_128x256x32_") and has("compv4", "_256x128x32_", split=True)
