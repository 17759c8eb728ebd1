"""Branches, loops, barriers: waves that agree run together, those that do not run apart, and both give the same."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_text import ALL, CDNA, Bench

from tilewright_emulator.errors import BarrierDivergence, InstructionLimit, UnknownInstruction
from tilewright_emulator.state.run import Checks


@pytest.mark.parametrize("arch", ALL)
def test_loops_of_different_lengths(arch: str) -> None:
    """Each wave has a trip count of its own: they part, and meet again behind the loop."""
    trips = [3, 1, 7, 3]
    text = """
      s_mov_b32 s1, 0
      s_mov_b32 s2, 0
    again:
      s_add_u32 s1, s1, s2
      s_add_u32 s2, s2, 1
      s_cmp_lt_u32 s2, s0
      s_cbranch_scc1 again
      s_add_u32 s3, s1, 100
    """
    if arch not in CDNA:
        text = text.replace("s_add_u32", "s_add_co_u32" if arch == "gfx1201" else "s_add_u32")
    bench = Bench(arch, waves=4, scalars={"s0": trips})
    w = bench.run(text)
    assert w.scalars[:, 3].tolist() == [100 + sum(range(trip)) for trip in trips]
    assert bench.executed == sum(2 + 4 * trip + 2 for trip in trips)


@pytest.mark.parametrize("arch", ALL)
def test_lanes_of_a_loop_leave_one_by_one(arch: str) -> None:
    """The compiler's shape of a loop with a trip count for each lane."""
    lanes, wide = (64, "b64") if arch in CDNA else (32, "b32")
    vcc, execs, saved = ("vcc", "exec", "s[4:5]") if arch in CDNA else ("vcc_lo", "exec_lo", "s4")
    andn2 = "s_andn2" if arch in CDNA else "s_and_not1"
    add = "v_add_u32_e32" if arch in CDNA else "v_add_nc_u32_e32"
    text = f"""
      v_mov_b32_e32 v2, 0
      s_mov_{wide} {saved}, {execs}
    again:
      {add} v2, 2, v2
      {add} v1, -1, v1
      v_cmp_eq_u32_e32 {vcc}, 0, v1
      {andn2}_{wide} {execs}, {execs}, {vcc}
      s_cbranch_execnz again
      s_mov_{wide} {execs}, {saved}
    """
    trips = np.arange(1, 2 * lanes + 1, dtype=np.uint32).reshape(2, lanes)
    w = Bench(arch, waves=2, vectors={"v1": trips}).run(text)
    assert np.array_equal(w.u32[2], 2 * trips)
    assert w.full


@pytest.mark.parametrize(
    ("condition", "setup", "taken"),
    [
        ("scc0", "s_cmp_eq_u32 s0, 1", False), ("scc1", "s_cmp_eq_u32 s0, 1", True),
        ("vccz", "s_mov_b64 vcc, 0", True), ("vccz", "s_mov_b64 vcc, 4", False),
        ("vccnz", "s_mov_b64 vcc, 0", False), ("vccnz", "s_mov_b64 vcc, 4", True),
        ("execz", "s_mov_b64 exec, 0", True), ("execnz", "s_mov_b64 exec, 0", False),
    ],
)  # fmt: skip
def test_conditions(condition: str, setup: str, taken: bool) -> None:
    text = f"s_mov_b32 s1, 7\n{setup}\ns_cbranch_{condition} out\ns_mov_b32 s1, 8\nout:\ns_nop 0"
    w = Bench("gfx942", scalars={"s0": 1}).run(text)
    assert int(w.scalars[0, 1]) == (7 if taken else 8)


def test_calls_return_behind_the_call() -> None:
    text = """
      s_mov_b32 s8, 0
      s_getpc_b64 s[4:5]
      s_add_u32 s4, s4, 20
      s_addc_u32 s5, s5, 0
      s_swappc_b64 s[6:7], s[4:5]
      s_add_u32 s8, s8, 1
      s_branch done
      s_add_u32 s8, s8, 10
      s_setpc_b64 s[6:7]
    done:
      s_nop 0
    """
    w = Bench("gfx942", waves=2).run(text)
    assert w.scalars[:, 8].tolist() == [11, 11]


BARRIERS = dict.fromkeys(ALL, "s_barrier") | {"gfx1201": "s_barrier_signal -1\ns_barrier_wait -1"}


@pytest.mark.parametrize("arch", ALL)
def test_barriers_order_waves_that_have_parted(arch: str) -> None:
    """One wave writes after a longer way; the others read what it wrote."""
    write, read = ("ds_write_b32", "ds_read_b32") if arch in CDNA else ("ds_store_b32", "ds_load_b32")
    wait = "s_wait_dscnt 0x0" if arch == "gfx1201" else "s_waitcnt lgkmcnt(0)"
    text = f"""
      v_mov_b32_e32 v1, 0
      s_cmp_lg_u32 s0, 2
      s_cbranch_scc1 others
      v_mov_b32_e32 v2, 0x1234
      {write} v1, v2
      {wait}
    others:
      {BARRIERS[arch]}
      {read} v3, v1
      {wait}
    """
    w = Bench(arch, waves=4, groups=3, lds=64, scalars={"s0": [0, 1, 2, 3] * 3}).run(text)
    assert (w.u32[3] == 0x1234).all()


@pytest.mark.parametrize("arch", ALL)
def test_a_wave_that_ends_before_the_barrier_is_an_error(arch: str) -> None:
    text = f"s_cmp_eq_u32 s0, 1\ns_cbranch_scc1 out\n{BARRIERS[arch]}\nout:\ns_nop 0"
    with pytest.raises(BarrierDivergence, match="1 of 2 waves have ended"):
        Bench(arch, waves=2, scalars={"s0": [0, 1]}).run(text)
    assert Bench(arch, waves=2, scalars={"s0": [0, 0]}).run(text).count == 2


def test_waves_may_wait_at_different_barriers() -> None:
    text = "s_cmp_eq_u32 s0, 1\ns_cbranch_scc1 b\ns_barrier\ns_branch out\nb:\ns_barrier\nout:\ns_mov_b32 s1, 5"
    w = Bench("gfx942", waves=2, scalars={"s0": [0, 1]}).run(text)
    assert w.scalars[:, 1].tolist() == [5, 5]


def test_a_loop_without_end_is_an_error() -> None:
    with pytest.raises(InstructionLimit, match="more than 100000 instructions"):
        Bench("gfx942").run("again:\ns_nop 0\ns_branch again")


def test_a_wave_that_waits_for_another_lets_it_run() -> None:
    """A wave spins on LDS until another, further on in the program, has written."""
    text = """
      v_mov_b32_e32 v1, 0
      v_mov_b32_e32 v3, 1
      s_cmp_eq_u32 s0, 1
      s_cbranch_scc1 writer
    again:
      ds_add_rtn_u32 v2, v1, v1
      s_waitcnt lgkmcnt(0)
      v_readfirstlane_b32 s1, v2
      s_cmp_eq_u32 s1, 0
      s_cbranch_scc1 again
      s_branch out
    writer:
      ds_add_u32 v1, v3
      s_waitcnt lgkmcnt(0)
    out:
      s_nop 0
    """
    first = "s_mov_b64 exec, 1\nv_mov_b32_e32 v1, 0\nds_write_b32 v1, v1\ns_waitcnt lgkmcnt(0)\ns_barrier\n"
    start = "s_cmp_eq_u32 s0, 1\ns_cbranch_scc1 skip\n" + first.replace("s_barrier\n", "") + "skip:\ns_barrier\n"
    w = Bench("gfx942", waves=2, lds=16, scalars={"s0": [0, 1]}).run(f"{start}s_mov_b64 exec, 1\n{text}")
    assert int(w.scalars[0, 1]) == 1


def test_unknown_instructions_fail_when_they_are_reached() -> None:
    from emulator_text import program

    made = program("s_branch out\nv_frobnicate_b32 v0, v1\nout:\ns_endpgm", "gfx942")
    assert made.unknown() == ["v_frobnicate_b32 v0, v1"]
    with pytest.raises(UnknownInstruction, match="trapped"):
        Bench("gfx942", checks=Checks()).run("s_trap 2")
