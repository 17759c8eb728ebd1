"""The cost of loops: against counting by hand, and the rule that more work never takes less time."""

from __future__ import annotations

import random

import pytest
from amd_listing import ENTRY, function, instructions

import tilewright_arch
from tilewright_arch import Rates
from tilewright_tools.analysis.instructions import AGPRS, Kind, work_of
from tilewright_tools.analysis.loops import find_loops, main_loop
from tilewright_tools.analysis.occupancy import occupancy_of
from tilewright_tools.analysis.roofline import cost_of
from tilewright_tools.analysis.schedule import UnknownRateError, cycles_per_iteration, run


def rates_of(arch: str) -> Rates:
    rates = tilewright_arch.load(arch).rates
    assert rates is not None
    return rates


CDNA3 = rates_of("gfx942")
MFMA = "v_mfma_f32_32x32x8_f16 v[{0}:{1}], v[200:201], v[202:203], v[{0}:{1}]\n"


def mfma(first: int) -> str:
    return MFMA.format(first, first + 15)


def alone(text: str, arch: str = "gfx942") -> float:
    return cycles_per_iteration(instructions(text), rates_of(arch), tilewright_arch.load(arch).wave_size)


# ---- counted by hand ----


def test_independent_matrix_instructions_follow_each_other() -> None:
    """Eight passes of four cycles each, and nothing else to do."""
    assert alone("".join(mfma(16 * index) for index in range(4))) == 4 * 32


def test_a_chain_of_sums_follows_too() -> None:
    assert alone(4 * mfma(0)) == 4 * 32


def test_eight_turns_hide_behind_a_matrix_instruction_and_the_ninth_does_not() -> None:
    assert alone(mfma(0) + 7 * "v_mov_b32_e32 v100, v101\n") == 32
    assert alone(mfma(0) + 8 * "v_mov_b32_e32 v100, v101\n") == 36


def test_whoever_reads_a_matrix_result_waits_for_it() -> None:
    """32 cycles and four passes more, then one turn; the next product can begin while that is awaited, not before."""
    assert alone(mfma(0) + "v_add_f32_e32 v100, v0, v0\n") == 32 + 16 + 4


def test_a_result_that_is_read_as_an_operand_waits_longer_than_a_sum() -> None:
    second = "v_mfma_f32_32x32x8_f16 v[16:31], v[0:1], v[202:203], v[16:31]\n"
    # Once round: the first product, its latency, the second one.
    assert alone(mfma(0) + second) == 32 + 16 + 32


def test_loads_from_lds_are_waited_for() -> None:
    """Eight loads of 1024 bytes take 8 cycles each; the last is back 64 later; then the wait's turn and the product."""
    text = "".join(f"ds_read_b128 v[{4 * index}:{4 * index + 3}], v150\n" for index in range(8))
    text += "s_waitcnt lgkmcnt(0)\n" + mfma(16)
    # The loads begin at 0 and the wait ends at 128; the next round's first load has its turn behind the product's.
    assert alone(text) == 8 * 8 + 64 + 4 + 4


def test_a_wait_that_leaves_later_loads_under_way_is_shorter() -> None:
    loads = "ds_read_b128 v[0:3], v150\n" * 4
    # 4 loads end at 8, 16, 24 and 32. Two may stay under way: 16 + 64.
    steps = next(run(instructions(loads + "s_waitcnt lgkmcnt(2)\n"), CDNA3, 64, 1))
    assert (steps[-1].begin, steps[-1].cause) == (16 + 64, "memory")
    steps = next(run(instructions(loads + "s_waitcnt lgkmcnt(0)\n"), CDNA3, 64, 1))
    assert steps[-1].begin == 32 + 64


def test_global_loads_prefetched_by_a_round_are_hidden() -> None:
    """512 cycles of products cover the latency of a load that is waited for a round later."""
    load = "buffer_load_dwordx4 v[240:243], v150, s[8:11], 0 offen\n"
    products = "".join(mfma(16 * (index % 4)) for index in range(16))
    assert alone("s_waitcnt vmcnt(0)\n" + load + products) == 16 * 32
    # 1024 bytes take 16 cycles to come, 250 later; the wait, and the products behind it.
    assert alone(load + "s_waitcnt vmcnt(0)\n" + products) == pytest.approx(16 + 250 + 4 + 16 * 32, abs=36)


def test_no_operations_take_as_many_turns_as_they_say() -> None:
    assert alone("s_nop 7\ns_nop 0\n") == (8 + 1) * 4


def test_rdna_issues_every_cycle_and_waits_for_its_vector_unit() -> None:
    different = "".join(f"v_add_f32_e32 v{index}, v20, v21\n" for index in range(10))
    assert alone(different, "gfx1100") == 10
    assert alone("v_add_f32_e32 v1, v1, v3\n" * 10, "gfx1100") == 10 * 5
    wmma = "v_wmma_f32_16x16x16_f16 v[{0}:{1}], v[100:107], v[108:115], v[{0}:{1}]\n"
    products = "".join(wmma.format(8 * index, 8 * index + 7) for index in range(4))
    assert alone(products, "gfx1100") == 4 * 32
    # The matrix instruction runs on the vector unit there, so that nothing hides behind it.
    assert alone(products + "v_mov_b32_e32 v120, v121\n" * 6, "gfx1100") == 4 * 32 + 6


def test_cost_of_a_loop_is_what_its_instructions_add_up_to() -> None:
    text = (
        "again:\n"
        + mfma(0)
        + mfma(16)
        + """
        ds_read_b128 v[40:43], v150
        ds_write_b64 v150, v[40:41] offset:8
        ds_read2_b32 v[40:41], v150 offset0:1 offset1:2
        global_load_dwordx4 v[44:47], v[48:49], off
        buffer_load_ushort v44, v48, s[0:3], 0 offen
        v_exp_f32_e32 v50, v51
        v_add_f32_e32 v50, v50, v51
        s_add_u32 s0, s0, 64
        s_waitcnt vmcnt(2)
        s_barrier
        s_cbranch_scc0 again
    """
    )
    cost = cost_of(instructions(text), CDNA3, 64)
    assert cost.counts == {
        "matrix": 2, "LDS": 3, "global": 2, "vector": 2, "scalar": 1, "control": 2, "branch": 1,
    }  # fmt: skip
    assert cost.flops == 2 * 2 * 32 * 32 * 8
    assert (cost.matrix, cost.vector, cost.scalar) == (64, 2 * 4 + 16 + 4, 4)
    assert cost.lds == (16 + 8 + 8) * 64 / 128
    assert cost.global_ == (16 + 2) * 64 / 64
    assert cost.cycles(waves_per_simd=2, waves=8) == {
        "matrix": 128, "vector": 56, "scalar": 8, "LDS": 8 * cost.lds, "global": 8 * cost.global_, "wave": cost.alone,
    }  # fmt: skip


def test_loads_straight_to_lds_use_both_ways() -> None:
    cost = cost_of(instructions("buffer_load_dwordx4 v1, s[8:11], 0 offen lds\n" + mfma(0)), rates_of("gfx950"), 64)
    assert (cost.lds, cost.global_) == (1024 / 256, 1024 / 64)


def test_a_matrix_instruction_without_a_rate_is_an_error() -> None:
    with pytest.raises(UnknownRateError, match="v_mfma_f64_16x16x4_f64"):
        alone("v_mfma_f64_16x16x4_f64 a[0:7], v[0:1], v[2:3], a[0:7]\n")


# ---- properties ----

FILLERS = {
    Kind.VECTOR: "v_mov_b32_e32 v254, v255",
    Kind.SCALAR: "s_add_u32 s90, s91, s92",
    Kind.CONTROL: "s_nop 1",
    Kind.LDS: "ds_read_b128 v[250:253], v255",
    Kind.GLOBAL: "buffer_load_dwordx4 v[250:253], v255, s[80:83], 0 offen",
    Kind.MATRIX: "v_mfma_f32_16x16x16_f16 v[244:247], v[248:249], v[248:249], v[244:247]",
}


def _random_loop(seed: int) -> list[str]:
    source = random.Random(seed)
    lines = []
    for _ in range(source.randint(5, 40)):
        first = 16 * source.randrange(6)
        lines.append(
            source.choice(
                (
                    mfma(first).strip(),
                    f"ds_read_b128 v[{200 + 4 * source.randrange(4)}:{203}], v150".replace(":203]", f":{215}]"),
                    f"v_add_f32_e32 v{source.randrange(150)}, v{source.randrange(150)}, v{source.randrange(150)}",
                    f"s_waitcnt lgkmcnt({source.randrange(4)})",
                    f"s_waitcnt vmcnt({source.randrange(3)})",
                    "buffer_load_dwordx4 v[216:219], v150, s[8:11], 0 offen",
                    "v_exp_f32_e32 v151, v152",
                )
            )
        )
    return lines


@pytest.mark.parametrize("seed", range(12))
def test_more_work_never_takes_less_time(seed: int) -> None:
    lines = _random_loop(seed)
    before = cost_of(instructions("\n".join(lines)), CDNA3, 64)
    source = random.Random(1000 + seed)
    for kind, filler in FILLERS.items():
        where = source.randrange(len(lines) + 1)
        after = cost_of(instructions("\n".join([*lines[:where], filler, *lines[where:]])), CDNA3, 64)
        assert work_of(instructions(filler)[0]).kind is kind
        for waves in (4, 8, 16):
            was, now = before.cycles(waves // 4, waves), after.cycles(waves // 4, waves)
            assert all(now[name] >= was[name] - 1e-9 for name in was), (kind, where, was, now)


@pytest.mark.parametrize("seed", range(6))
def test_no_wave_is_faster_than_its_units_and_turns(seed: int) -> None:
    lines = _random_loop(seed)
    cost = cost_of(instructions("\n".join(lines)), CDNA3, 64)
    assert cost.alone >= cost.matrix - 1e-9
    assert cost.alone >= 4 * len(lines) - 1e-9
    assert cycles_per_iteration(instructions("\n".join(lines)), CDNA3, 64, sharers=8) >= cost.alone


# ---- registers ----


def test_registers_read_and_written() -> None:
    cases = {
        "v_mfma_f32_32x32x8_f16 a[0:15], v[20:21], v[22:23], a[0:15]": (
            (20, 21, 22, 23, *range(AGPRS, AGPRS + 16)), tuple(range(AGPRS, AGPRS + 16)),
        ),
        "v_fmac_f32_e32 v1, v2, v3": ((2, 3, 1), (1,)),
        "v_cmp_lt_u32_e32 vcc, v0, v1": ((0, 1), ()),
        "v_accvgpr_read_b32 v5, a7": ((AGPRS + 7,), (5,)),
        "ds_write_b128 v1, v[2:5] offset:16": ((1, 2, 3, 4, 5), ()),
        "ds_read_b64 v[2:3], v1": ((1,), (2, 3)),
        "global_store_dwordx2 v[0:1], v[2:3], off": ((0, 1, 2, 3), ()),
        "global_load_lds_dword v[0:1], off": ((0, 1), ()),
        "v_readfirstlane_b32 s4, v9": ((9,), ()),
    }  # fmt: skip
    for text, expected in cases.items():
        work = work_of(instructions(text)[0])
        assert (work.reads, work.writes) == expected, text


@pytest.mark.parametrize(
    ("text", "waits"),
    [
        ("s_waitcnt vmcnt(3) lgkmcnt(0)", (("vm", 3), ("lgkm", 0))),
        ("s_waitcnt_vscnt null, 0x0", (("vs", 0),)),
        ("s_wait_loadcnt 0x5", (("vm", 5),)),
        ("s_wait_dscnt 0x0", (("lgkm", 0),)),
        ("s_wait_loadcnt_dscnt 0x301", (("vm", 3), ("lgkm", 1))),
    ],
)
def test_waits_of_every_generation(text: str, waits: tuple[tuple[str, int], ...]) -> None:
    assert work_of(instructions(text)[0]).waits == waits


# ---- loops ----

NESTED = f"""
    s_mov_b32 s0, 0
outer:
    {mfma(0).strip()}
    s_cbranch_scc1 skip
    s_branch join
skip:
    s_nop 0
join:
    s_mov_b32 s1, 0
inner:
    {mfma(16).strip()}
    {mfma(32).strip()}
    s_cbranch_vccz over
    v_mov_b32_e32 v100, v101
over:
    s_add_u32 s1, s1, 1
    s_cbranch_scc0 inner
    s_cbranch_scc1 outer
tail:
    v_mov_b32_e32 v100, v101
    s_cbranch_execnz tail
    s_endpgm
"""


def test_the_innermost_loop_with_the_most_products_is_the_main_loop() -> None:
    found = find_loops(function(NESTED))
    assert [(len(loop.body), loop.matrix_instructions, loop.branches) for loop in found] == [
        (12, 3, 3), (6, 2, 1), (2, 0, 0),
    ]  # fmt: skip
    main = main_loop(function(NESTED))
    assert main is not None
    assert (main.header, main.matrix_instructions) == (ENTRY + 8 * 6, 2)


def test_a_branch_back_that_does_not_dominate_is_no_loop() -> None:
    """A block that lies earlier in memory but is not passed on every way to the branch."""
    text = """
        s_cbranch_scc1 late
    early:
        v_mov_b32_e32 v0, v1
        s_endpgm
    late:
        v_mov_b32_e32 v0, v2
        s_branch early
    """
    assert find_loops(function(text)) == ()
    assert main_loop(function(text)) is None


def test_without_matrix_instructions_the_loop_with_the_most_multiply_adds_counts() -> None:
    text = """
    fill:
        ds_write_b32 v0, v1
        v_add_f32_e32 v0, v1, v2
        s_cbranch_scc0 fill
    sum:
        v_fma_f32 v0, v1, v2, v0
        v_dual_fmac_f32 v3, v1, v2 :: v_dual_fmac_f32 v4, v1, v5
        v_pk_fma_f32 v[6:7], v[8:9], v[10:11], v[6:7]
        s_cbranch_scc0 sum
        s_endpgm
    """
    main = main_loop(function(text))
    assert main is not None
    assert (main.header, main.matrix_instructions, main.lane_flops) == (ENTRY + 8 * 3, 0, 2 + 4 + 4)
    assert cost_of(main.body, rates_of("gfx1100"), 32).flops == 32 * 10
    assert main_loop(function(text.replace("fma_f32", "add_f32").replace("fmac_f32", "add_f32"))) is None


# ---- occupancy ----


@pytest.mark.parametrize(
    ("arch", "waves", "vgprs", "lds", "expected"),
    [
        ("gfx942", 4, 512, 65536, (1, 1)),
        ("gfx942", 4, 256, 32768, (2, 2)),
        ("gfx942", 4, 257, 0, (1, 1)),
        ("gfx942", 4, 128, 65536, (1, 1)),
        ("gfx942", 4, 32, 1024, (8, 8)),
        ("gfx90a", 8, 128, 0, (2, 4)),
        ("gfx950", 4, 128, 65536, (2, 2)),
        ("gfx1100", 8, 256, 32768, (1, 4)),
        ("gfx1201", 4, 96, 16384, (4, 8)),
        ("gfx942", 16, 512, 0, (0, 0)),
    ],
)
def test_workgroups_of_a_unit(arch: str, waves: int, vgprs: int, lds: int, expected: tuple[int, int]) -> None:
    found = occupancy_of(tilewright_arch.load(arch), rates_of(arch), waves=waves, vgprs=vgprs, lds_bytes=lds)
    assert (found.workgroups, found.waves_per_simd) == expected
