"""Every check is triggered by a few instructions with the fault, and silent on those without it."""

from __future__ import annotations

import numpy as np
import pytest
from emulator_text import ALL, CDNA, Bench
from emulator_text import program as text_program
from test_control import BARRIERS
from test_memory import BASE, addresses, aligned

from tilewright_emulator.decode.hazards import hazard_of
from tilewright_emulator.errors import (
    EmulationError,
    GlobalRace,
    LdsRace,
    MissingNop,
    MissingWait,
    OutOfBounds,
    UninitialisedLds,
    UninitialisedRegister,
)  # fmt: skip
from tilewright_emulator.isa.arch import ARCHS
from tilewright_emulator.memory.allocations import Memory
from tilewright_emulator.state.run import Checks
from tilewright_emulator.state.traffic import served_together

WRITE, READ = {}, {}
for _arch in ALL:
    WRITE[_arch], READ[_arch] = ("ds_write_b32", "ds_read_b32") if _arch in CDNA else ("ds_store_b32", "ds_load_b32")


def lds_wait(arch: str) -> str:
    return "s_wait_dscnt 0x0" if arch == "gfx1201" else "s_waitcnt lgkmcnt(0)"


def load_wait(arch: str, most: int = 0) -> str:
    return f"s_wait_loadcnt {most:#x}" if arch == "gfx1201" else f"s_waitcnt vmcnt({most})"


def scalar_wait(arch: str) -> str:
    return "s_wait_kmcnt 0x0" if arch == "gfx1201" else "s_waitcnt lgkmcnt(0)"


def bench(arch: str, **more: object) -> Bench:
    """Two waves, LDS and 16 KiB of memory; v1: 4 * item of the workgroup; v2, v3: addresses; s4, s5: their base."""
    memory, lanes = Memory(), 64 if arch in CDNA else 32
    memory.map(BASE, aligned(np.arange(4096, dtype=np.uint32)), "data")
    item = np.arange(2 * lanes).reshape(2, lanes)
    settings: dict[str, object] = {
        "waves": 2, "lds": 4096, "memory": memory,
        "vectors": {**addresses(item * 16), "v1": (item * 4).astype(np.uint32)},
        "scalars": {"s4": BASE & 0xFFFFFFFF, "s5": BASE >> 32, "s0": [0, 1]},
    }  # fmt: skip
    settings.update(more)
    return Bench(arch, **settings)  # type: ignore[arg-type]


def load(arch: str, target: str = "v8", offset: int = 0) -> str:
    return f"global_load_{'dword' if arch in CDNA else 'b32'} {target}, v[2:3], off offset:{offset}"


@pytest.mark.parametrize("arch", ALL)
class TestWaits:
    def test_load_used_before_its_wait(self, arch: str) -> None:
        use = "v_mov_b32_e32 v9, v8"
        with pytest.raises(MissingWait, match=r"`v_mov_b32_e32 v9, v8`.*reads v8"):
            bench(arch).run(f"{load(arch)}\n{use}")
        w = bench(arch).run(f"{load(arch)}\n{load_wait(arch)}\n{use}")
        assert w.u32[9][1, 3] == w.u32[8][1, 3]

    def test_the_oldest_loads_arrive_first(self, arch: str) -> None:
        loads = f"{load(arch, 'v8')}\n{load(arch, 'v9', 4)}\n{load_wait(arch, 1)}\n"
        assert bench(arch).run(f"{loads}v_mov_b32_e32 v10, v8").count == 2
        with pytest.raises(MissingWait, match="reads v9"):
            bench(arch).run(f"{loads}v_mov_b32_e32 v10, v9")

    def test_overwriting_a_register_that_a_load_will_write(self, arch: str) -> None:
        with pytest.raises(MissingWait, match="writes v8"):
            bench(arch).run(f"{load(arch)}\nv_mov_b32_e32 v8, 0")
        assert bench(arch).run(f"{load(arch)}\n{load(arch, offset=4)}\n{load_wait(arch)}").count == 2

    def test_storing_what_has_not_arrived(self, arch: str) -> None:
        store = f"global_store_{'dword' if arch in CDNA else 'b32'} v[2:3], v8, off"
        with pytest.raises(MissingWait, match="reads v8"):
            bench(arch).run(f"{load(arch)}\n{store}")

    def test_lds_load_used_before_its_wait(self, arch: str) -> None:
        start = f"{WRITE[arch]} v1, v0\n{lds_wait(arch)}\n{READ[arch]} v8, v1\n"
        with pytest.raises(MissingWait, match="reads v8"):
            bench(arch).run(f"{start}v_mov_b32_e32 v9, v8")
        with pytest.raises(MissingWait, match="reads v8"):
            bench(arch).run(f"{start}{load_wait(arch)}\nv_mov_b32_e32 v9, v8")
        assert bench(arch).run(f"{start}{lds_wait(arch)}\nv_mov_b32_e32 v9, v8").count == 2

    def test_scalar_load_used_before_its_wait(self, arch: str) -> None:
        name = "s_load_dword" if arch in CDNA else "s_load_b32"
        with pytest.raises(MissingWait, match="reads s8"):
            bench(arch).run(f"{name} s8, s[4:5], 0x10\ns_mov_b32 s9, s8")
        w = bench(arch).run(f"{name} s8, s[4:5], 0x10\n{scalar_wait(arch)}\ns_mov_b32 s9, s8")
        assert w.scalars[:, 9].tolist() == [4, 4]

    def test_a_barrier_does_not_wait(self, arch: str) -> None:
        """What a wave writes to LDS is there for others only if it has waited before the barrier."""
        read = f"v_xor_b32_e32 v5, {256 if arch in CDNA else 128}, v1\n{READ[arch]} v8, v5\n{lds_wait(arch)}"
        with pytest.raises(LdsRace, match="reads what wave"):
            bench(arch).run(f"{WRITE[arch]} v1, v0\n{BARRIERS[arch]}\n{read}")
        w = bench(arch).run(f"{WRITE[arch]} v1, v0\n{lds_wait(arch)}\n{BARRIERS[arch]}\n{read}")
        assert w.u32[8][0, 0] == (64 if arch in CDNA else 32)

    def test_the_check_can_be_turned_off(self, arch: str) -> None:
        w = bench(arch, checks=Checks(waits=False)).run(f"{load(arch)}\nv_mov_b32_e32 v9, v8")
        assert w.u32[9][0, 1] == 4


def test_stores_have_a_counter_of_their_own_on_rdna() -> None:
    """Waiting for stores does not cover loads."""
    for arch, wait in (("gfx1100", "s_waitcnt_vscnt null, 0x0"), ("gfx1201", "s_wait_storecnt 0x0")):
        with pytest.raises(MissingWait, match="reads v8"):
            bench(arch).run(f"{load(arch)}\n{wait}\nv_mov_b32_e32 v9, v8")


def test_scalar_loads_return_in_any_order() -> None:
    text = "s_load_dword s8, s[4:5], 0x0\ns_load_dword s9, s[4:5], 0x4\ns_waitcnt lgkmcnt(1)\ns_mov_b32 s10, s8"
    with pytest.raises(MissingWait, match="reads s8"):
        bench("gfx942").run(text)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
class TestLoadsIntoLds:
    text = """
      s_mov_b32 m0, s6
      s_nop 0
      global_load_lds_dword v[2:3], off
      {wait}
      s_barrier
      ds_read_b32 v8, v5
      s_waitcnt lgkmcnt(0)
    """

    def run(self, arch: str, wait: str, other: bool) -> Bench:
        made = bench(arch)
        made.scalars["s6"] = [0, 256]
        made.vectors["v5"] = made.vectors["v1"] ^ np.uint32(256 if other else 0)
        made.run(self.text.format(wait=wait))
        return made

    @pytest.mark.parametrize("other", [False, True])
    def test_read_before_the_wait(self, arch: str, other: bool) -> None:
        with pytest.raises(MissingWait, match="a load into it has not been waited for"):
            self.run(arch, "s_nop 0", other)
        assert self.run(arch, "s_waitcnt vmcnt(0)", other).launch.lds.data[4] == 4

    def test_others_need_a_barrier_too(self, arch: str) -> None:
        with pytest.raises(LdsRace, match="reads what wave"):
            made = bench(arch)
            made.scalars["s6"] = [0, 256]
            made.vectors["v5"] = made.vectors["v1"] ^ np.uint32(256)
            made.run(self.text.format(wait="s_waitcnt vmcnt(0)").replace("s_barrier", "s_nop 0"))


@pytest.mark.parametrize("arch", ALL)
class TestLds:
    def other(self, arch: str) -> str:
        """v5: the place that the other wave wrote."""
        return f"v_xor_b32_e32 v5, {256 if arch in CDNA else 128}, v1\n"

    def test_reading_what_nobody_wrote(self, arch: str) -> None:
        with pytest.raises(UninitialisedLds, match="LDS 128 has not been written"):
            bench(arch).run(f"v_mov_b32_e32 v5, 0x80\n{READ[arch]} v8, v5")
        assert bench(arch, checks=Checks(uninitialised_lds=False)).run(f"{READ[arch]} v8, v1").count == 2

    def test_reading_without_a_barrier(self, arch: str) -> None:
        start = f"{self.other(arch)}{WRITE[arch]} v1, v0\n{lds_wait(arch)}\n"
        with pytest.raises(LdsRace, match=r"reads what wave [01] wrote with no barrier between"):
            bench(arch).run(f"{start}{READ[arch]} v8, v5")
        assert bench(arch).run(f"{start}{BARRIERS[arch]}\n{READ[arch]} v8, v5").count == 2
        assert bench(arch).run(f"{start}{READ[arch]} v8, v1").count == 2

    def test_writing_what_others_have_read(self, arch: str) -> None:
        start = f"{self.other(arch)}{WRITE[arch]} v1, v0\n{lds_wait(arch)}\n{BARRIERS[arch]}\n"
        start += f"{READ[arch]} v8, v5\n{lds_wait(arch)}\n"
        with pytest.raises(LdsRace, match=r"writes what wave [01] read"):
            bench(arch).run(f"{start}{WRITE[arch]} v1, v0")
        assert bench(arch).run(f"{start}{BARRIERS[arch]}\n{WRITE[arch]} v1, v0").count == 2

    def test_two_waves_write_the_same_place(self, arch: str) -> None:
        with pytest.raises(LdsRace, match=r"writes what wave [01] wrote"):
            bench(arch).run(f"v_mov_b32_e32 v5, 0\n{WRITE[arch]} v5, v0")

    def test_several_readers_then_a_writer(self, arch: str) -> None:
        start = f"v_mov_b32_e32 v5, 0\n{WRITE[arch]} v1, v0\n{lds_wait(arch)}\n{BARRIERS[arch]}\n{READ[arch]} v8, v5\n"
        with pytest.raises(LdsRace, match="writes what wave several read"):
            bench(arch).run(f"{start}{lds_wait(arch)}\n{WRITE[arch]} v1, v0")

    def test_neighbouring_bytes_do_not_race(self, arch: str) -> None:
        narrow = WRITE[arch].replace("b32", "b8")
        item = np.arange(2 * (64 if arch in CDNA else 32), dtype=np.uint32).reshape(2, -1)
        made = bench(arch)
        made.vectors["v5"] = item % np.uint32(item.shape[1]) * np.uint32(2) + item // np.uint32(item.shape[1])
        made.run(f"{narrow} v5, v0")
        assert made.launch.lds.data[:4].tolist() == [0, item.shape[1], 1, item.shape[1] + 1]

    def test_atomics_do_not_race_with_each_other(self, arch: str) -> None:
        start = (
            f"v_mov_b32_e32 v5, 0\nv_mov_b32_e32 v6, 1\ns_cmp_eq_u32 s0, 1\ns_cbranch_scc1 skip\n{WRITE[arch]} v5, v5\n"
        )
        start += f"{lds_wait(arch)}\nskip:\n{BARRIERS[arch]}\nds_add_u32 v5, v6\n{lds_wait(arch)}\n"
        with pytest.raises(LdsRace, match="an atomic"):
            bench(arch).run(f"{start}{READ[arch]} v8, v5")
        w = bench(arch).run(f"{start}{BARRIERS[arch]}\n{READ[arch]} v8, v5\n{lds_wait(arch)}")
        assert (w.u32[8] == 2 * w.lanes).all()

    def test_workgroups_have_lds_of_their_own(self, arch: str) -> None:
        start = f"{self.other(arch)}{WRITE[arch]} v1, v0\n{lds_wait(arch)}\n{BARRIERS[arch]}\n{READ[arch]} v8, v5"
        made = bench(arch, groups=3)
        made.scalars["s0"] = 0
        made.vectors = {name: np.tile(rows, (3, 1)) for name, rows in made.vectors.items()}
        assert made.run(start).count == 6


def test_a_split_barrier_covers_only_what_comes_before_its_signal() -> None:
    other, body = "v_xor_b32_e32 v5, 128, v1\n", "s_barrier_wait -1\nds_load_b32 v8, v5\ns_wait_dscnt 0x0"
    with pytest.raises(LdsRace, match="reads what wave"):
        bench("gfx1201").run(f"{other}s_barrier_signal -1\nds_store_b32 v1, v0\ns_wait_dscnt 0x0\n{body}")
    w = bench("gfx1201").run(f"{other}ds_store_b32 v1, v0\ns_wait_dscnt 0x0\ns_barrier_signal -1\n{body}")
    assert w.u32[8][0, 0] == 32


class TestRegisters:
    def test_reading_what_nothing_wrote(self) -> None:
        with pytest.raises(UninitialisedRegister, match="reads v7, which nothing has written"):
            bench("gfx942").run("v_mov_b32_e32 v8, v7")
        with pytest.raises(UninitialisedRegister, match="reads s20"):
            bench("gfx942").run("s_add_u32 s21, s4, s20")
        assert bench("gfx942", checks=Checks(uninitialised_registers=False)).run("v_mov_b32_e32 v8, v7").count == 2

    def test_accumulation_registers(self) -> None:
        with pytest.raises(UninitialisedRegister, match="reads a3"):
            bench("gfx942").run("v_accvgpr_read_b32 v8, a3")
        w = bench("gfx942").run("v_accvgpr_write_b32 a3, 5\nv_accvgpr_read_b32 v8, a3")
        assert (w.u32[8] == 5).all()

    def test_upper_halves_may_stay_undefined_but_not_be_used(self) -> None:
        start = "v_mov_b32_e32 v6, 1\nv_lshlrev_b64 v[8:9], 2, v[6:7]\n"
        assert bench("gfx942").run(f"{start}v_mov_b32_e32 v10, v8").count == 2
        with pytest.raises(UninitialisedRegister, match="reads v9"):
            bench("gfx942").run(f"{start}v_mov_b32_e32 v10, v9")

    def test_copies_of_undefined_pairs_are_undefined(self) -> None:
        start = "v_mov_b32_e32 v7, 1\nv_mov_b64_e32 v[8:9], v[6:7]\n"
        assert bench("gfx942").run(f"{start}v_mov_b32_e32 v10, v9").count == 2
        with pytest.raises(UninitialisedRegister, match="reads v8"):
            bench("gfx942").run(f"{start}v_mov_b32_e32 v10, v8")
        again = "v_mov_b32_e32 v6, 1\nv_mov_b64_e32 v[8:9], v[6:7]\n"
        assert bench("gfx942").run(f"{start}{again}v_mov_b32_e32 v10, v8").count == 2

    def test_spilled_scalars_come_back_as_they_were(self) -> None:
        """Compilers spill whole tuples, of which some registers were never written."""
        spill = "s_mov_b32 s6, 5\nv_writelane_b32 v20, s6, 0\nv_writelane_b32 v20, s7, 1\n"
        back = "v_readlane_b32 s8, v20, 0\nv_readlane_b32 s9, v20, 1\n"
        w = bench("gfx942").run(f"{spill}{back}s_mov_b32 s10, s8")
        assert (w.s_u32[10] == 5).all()
        with pytest.raises(UninitialisedRegister, match="reads s9"):
            bench("gfx942").run(f"{spill}{back}s_mov_b32 s10, s9")
        mended = f"{spill}v_writelane_b32 v20, s6, 1\n"
        assert bench("gfx942").run(f"{mended}{back}s_mov_b32 s10, s9").count == 2

    def test_registers_that_a_branch_did_not_write(self) -> None:
        text = "s_cmp_eq_u32 s0, 1\ns_cbranch_scc1 skip\nv_mov_b32_e32 v8, 0\nskip:\nv_mov_b32_e32 v9, v8"
        with pytest.raises(UninitialisedRegister, match="reads v8"):
            bench("gfx942").run(text)


@pytest.mark.parametrize("arch", ALL)
def test_two_workgroups_write_the_same_memory(arch: str) -> None:
    store = f"global_store_{'dword' if arch in CDNA else 'b32'} v[2:3], v0, off"
    made = bench(arch, groups=2)
    made.scalars["s0"] = 0
    apart = {name: np.tile(rows, (2, 1)) for name, rows in made.vectors.items()}
    made.vectors = apart
    with pytest.raises(GlobalRace, match="data, byte 0: two workgroups write it"):
        made.run(store)
    made = bench(arch, groups=2, checks=Checks(global_races=False), vectors=apart)
    made.scalars["s0"] = 0
    assert made.run(store).count == 4
    made = bench(
        arch, groups=2, vectors={**apart, "v2": apart["v2"] + np.repeat([0, 0, 4, 4], 1)[:, None].astype(np.uint32)}
    )
    made.scalars["s0"] = 0
    assert made.run(store).count == 4


@pytest.mark.parametrize("arch", ALL)
def test_messages_say_where(arch: str) -> None:
    made = bench(arch, groups=1, waves=2)
    made.vectors["v1"] = made.vectors["v1"] + np.uint32(4096 - 4 * (made.vectors["v1"].size - 1))
    with pytest.raises(OutOfBounds) as caught:
        made.run(f"s_nop 0\n{WRITE[arch]} v1, v0")
    lane = 63 if arch in CDNA else 31
    assert str(caught.value) == (
        f"text+0x4 `{WRITE[arch]} v1, v0`: workgroup (0, 0, 0) wave 1 lane {lane}: 4 bytes at LDS 4096 of 4096"
    )
    assert isinstance(caught.value, EmulationError)


class TestTraffic:
    def conflicts(self, arch: str, stride: int, kind: str = "b32", reads: bool = False) -> int:
        lanes = 64 if arch in CDNA else 32
        vectors = {"v1": (np.arange(lanes) * stride).astype(np.uint32), "v2": np.zeros(lanes, np.uint32)}
        vectors |= {f"v{i}": vectors["v2"] for i in range(3, 6)}
        made = Bench(arch, lds=65536, vectors=vectors, checks=Checks(traffic=True))
        name = ("ds_write_" if arch in CDNA else "ds_store_") + kind
        text = f"{name} v1, v[2:5]"
        if reads:
            made.checks = Checks(traffic=True, uninitialised_lds=False)
            text = f"{READ[arch].replace('b32', kind)} v[2:5], v1"
        made.run(text)
        return made.launch.traffic.lds_conflicts

    @pytest.mark.parametrize("arch", ALL)
    def test_bank_conflicts(self, arch: str) -> None:
        assert self.conflicts(arch, 4) == 0
        assert self.conflicts(arch, 0) == 0  # all lanes at one word: it is broadcast
        assert self.conflicts(arch, 256) > 16
        assert self.conflicts(arch, 16, "b128") == 0
        assert self.conflicts(arch, 256, "b128") > 16

    @pytest.mark.parametrize("arch", CDNA)
    def test_long_reads_are_served_in_another_order(self, arch: str) -> None:
        """Lines of 64 or 128 bytes with a key that suits neighbouring lanes does not suit these groups."""
        assert self.conflicts(arch, 16, "b128", reads=True) == 0
        line = 128 if arch == "gfx950" else 64
        assert self.conflicts(arch, line, "b128", reads=True) > 0
        groups = served_together(ARCHS[arch], 16, reads=True)
        assert sorted(int(lane) for group in groups for lane in group) == list(range(64))
        assert {group.size for group in groups} == {ARCHS[arch].banks // 4}

    @pytest.mark.parametrize("arch", ALL)
    def test_lines_of_global_memory(self, arch: str) -> None:
        made = bench(arch, checks=Checks(traffic=True))
        lanes = 64 if arch in CDNA else 32
        made.run(f"{load(arch)}\n{load_wait(arch)}")
        assert made.launch.traffic.global_accesses == 2
        assert made.launch.traffic.lines == 2 * lanes * 16 // 128


class TestWaitStates:
    """Wait states that CDNA leaves to the program, unseen by compilers inside inline assembly."""

    def refused(self, text: str) -> None:
        with pytest.raises(MissingNop, match="wait states"):
            bench("gfx942").run(text)

    def test_m0_ahead_of_a_load_into_lds(self) -> None:
        load = "buffer_load_dword v0, s[4:7], 0 offen lds"
        program = text_program(f"s_mov_b32 m0, s0\n{load}", "gfx942")
        assert "m0" in hazard_of(program.instructions, 1, (), ARCHS["gfx942"])
        program = text_program(f"s_mov_b32 m0, s0\ns_nop 0\n{load}", "gfx942")
        assert hazard_of(program.instructions, 2, (), ARCHS["gfx942"]) == ""

    def test_scalars_of_the_vector_unit_ahead_of_memory(self) -> None:
        for states, lacks in ((3, True), (4, False)):
            text = f"v_readfirstlane_b32 s4, v0\ns_nop {states}\nbuffer_load_dword v1, v0, s[4:7], 0 offen"
            program = text_program(text, "gfx942")
            assert bool(hazard_of(program.instructions, 2, (), ARCHS["gfx942"])) is lacks
            assert hazard_of(program.instructions, 2, (), ARCHS["gfx1100"]) == ""
            assert hazard_of(program.instructions, 2, {program.instructions[2].address}, ARCHS["gfx942"]) == ""

    def test_results_of_matrix_instructions(self) -> None:
        zero = "\n".join(f"v_mov_b32_e32 v{i}, 0" for i in range(8, 16))
        product = f"{zero}\nv_mfma_f32_16x16x16_f16 v[12:15], v[8:9], v[10:11], v[12:15]\n"
        self.refused(f"{product}v_mov_b32_e32 v1, v12")
        self.refused(f"{product}s_nop 4\nv_mov_b32_e32 v1, v12")
        assert bench("gfx942").run(f"{product}s_nop 7\nv_mov_b32_e32 v1, v12").count == 2
        assert bench("gfx942").run(f"{product}v_mfma_f32_16x16x16_f16 v[12:15], v[8:9], v[10:11], v[12:15]").count == 2
