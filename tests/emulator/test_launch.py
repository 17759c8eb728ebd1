"""Launches of compiled kernels: what the command processor sets up, and what compilers make of C++."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulator_compile import load, run, zeros
from emulator_text import ALL, CDNA

from tilewright_emulator import Checks, CodeObject
from tilewright_emulator.errors import BadCodeObject, BarrierDivergence, GlobalRace, OutOfBounds, UninitialisedLds
from tilewright_emulator.launch import launch as launching

PLACES = """
KERNEL(256) places(u32* out) {
  const u32 item = (__builtin_amdgcn_workitem_id_z() * 2 + __builtin_amdgcn_workitem_id_y()) * 5 + thread();
  const u32 group = (__builtin_amdgcn_workgroup_id_z() * 3 + __builtin_amdgcn_workgroup_id_y()) * 2 + block();
  out[group * 40 + item] = group << 16 | item;
}
KERNEL(256) builtins(u32* out) {
  const u32 y = __builtin_amdgcn_workgroup_id_y(), z = __builtin_amdgcn_workgroup_id_z();
  if (thread() == 0 && block() == 1 && y == 1 && z == 0) {
    out[0] = __builtin_amdgcn_grid_size_x(); out[1] = __builtin_amdgcn_grid_size_y();
    out[2] = __builtin_amdgcn_workgroup_size_x(); out[3] = __builtin_amdgcn_workgroup_size_y();
    out[4] = __builtin_amdgcn_grid_size_z(); out[5] = __builtin_amdgcn_workgroup_size_z();
  }
}
KERNEL(256) by_value(u32 a, u64 b, u16 c, float d, u32* out) {
  if (thread() == 0) { out[0] = a; out[1] = (u32)b; out[2] = (u32)(b >> 32); out[3] = c; out[4] = (u32)(d * 4); }
}
KERNEL(256) dynamic_lds(u32* out, u32 count) {
  extern SHARED u32 words[];
  SHARED static u32 fixed[64];
  fixed[thread() % 64] = 7;
  for (u32 i = thread(); i < count; i += 64) words[i] = i * 3;
  barrier();
  for (u32 i = thread(); i < count; i += 64) out[i] = words[count - 1 - i] + fixed[(i + 1) % 64];
}
"""

CODE = """
NOINLINE u32 fibonacci(u32 n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
KERNEL(64) recursive(u32* out) { out[thread()] = fibonacci(thread() % 8); }
KERNEL(64) private_array(u32* out, const u32* index) {
  u32 kept[16];
  for (u32 i = 0; i < 16; i++) kept[i] = i * thread();
  kept[index[thread()]] += 1000;
  out[thread()] = kept[index[thread() + 1]] + kept[index[thread()]];
}
__attribute__((constant)) const u32 table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
KERNEL(64) constants(u32* out) { out[thread()] = table[thread() % 8]; }
KERNEL(64) switches(u32* out) {
  u32 x = thread();
  switch (x % 5) {
    case 0: x = x * 3; break;
    case 1: x = x + 100; break;
    case 2: for (u32 i = 0; i < x; i++) x ^= i; break;
    case 3: if (x > 20) x = 1; else x = 2; break;
    default: x = 0;
  }
  out[thread()] = x;
}
KERNEL(64) doubles(double* out, const double* in) { out[thread()] = in[thread()] * 1.5 + in[63 - thread()] / 3.0; }
KERNEL(64) wide_integers(u64* out, const u64* in) {
  const u64 a = in[thread()], b = in[63 - thread()];
  const u64 shifted = (a >> (b & 63)) ^ (u64)((long long)a >> 7);
  out[thread()] = (a * b) ^ shifted ^ (a / (b | 1)) ^ (a % (b | 3)) ^ (a < b ? a - b : a + b);
}
KERNEL(64) bytes(u8* out, const u8* in, u16* halves) {
  out[thread()] = in[63 - thread()] + 1;
  halves[thread()] = (u16)(in[thread()] * 257 + (signed char)in[thread()]);
}
"""

ATOMICS = """
KERNEL(256) counters(u32* c, u64* w, float* f) {
  const u32 t = block() * 256 + thread();
  __hip_atomic_fetch_add(c + 0, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_max(c + 1, t, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_min((int*)c + 2, -(int)t, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_or(c + 3, 1u << (t % 32), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  __hip_atomic_fetch_add(w, (u64)t << 20, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  c[16 + __hip_atomic_fetch_add(c + 4, 1u, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT)] = t;
  u32 seen = __hip_atomic_load(c + 5, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  while (!__hip_atomic_compare_exchange_strong(c + 5, &seen, seen + 2, __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                               __HIP_MEMORY_SCOPE_AGENT)) {}
  __hip_atomic_fetch_add(f, 0.5f, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
KERNEL(256) histogram(u32* out, const u8* in) {
  SHARED static u32 bins[256];
  bins[thread()] = 0;
  barrier();
  __hip_atomic_fetch_add(bins + in[block() * 256 + thread()], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
  barrier();
  __hip_atomic_fetch_add(out + thread(), bins[thread()], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
"""

HANDOVER = """
#ifdef __GFX9__
#define WAIT_FOR_STORES asm volatile("s_waitcnt vmcnt(0)" ::: "memory")
#else
#define WAIT_FOR_STORES
#endif
DEVICE void all_have_stored() { WAIT_FOR_STORES; barrier(); }
#define ARRIVE(ORDER, SCOPE) __hip_atomic_fetch_add(counter, 1u, __ATOMIC_##ORDER, __HIP_MEMORY_SCOPE_##SCOPE)
#define HAND_OVER(NAME, STORED, ARRIVED)                                                        \\
  KERNEL(256) NAME(u32* out, u32* slots, u32* counter) {                                        \\
    SHARED static u32 last;                                                                     \\
    const u32 groups = __builtin_amdgcn_grid_size_x() / 256;                                    \\
    slots[block() * 256 + thread()] = block() + thread();                                       \\
    STORED;                                                                                     \\
    if (thread() == 0) last = ARRIVED == groups - 1;                                            \\
    barrier();                                                                                  \\
    if (!last) return;                                                                          \\
    u32 sum = 0;                                                                                \\
    for (u32 i = 0; i < groups; i++) sum += slots[i * 256 + thread()];                          \\
    out[thread()] = sum;                                                                        \\
  }
HAND_OVER(in_order, all_have_stored(), ARRIVE(ACQ_REL, AGENT))
HAND_OVER(too_early, , ARRIVE(ACQ_REL, AGENT))
HAND_OVER(not_waited, barrier(), ARRIVE(ACQ_REL, AGENT))
HAND_OVER(too_near, all_have_stored(), ARRIVE(ACQ_REL, WORKGROUP))
HAND_OVER(not_written_back, all_have_stored(), ARRIVE(ACQUIRE, AGENT))
HAND_OVER(from_a_cache, all_have_stored(), ARRIVE(RELEASE, AGENT))
KERNEL(256) unannounced(u32* out, u32* slots) {
  slots[block() * 256 + thread()] = thread();
  out[block() * 256 + thread()] = slots[thread()];
}
"""

FAULTS = """
KERNEL(256) past_end(u32* out, u32 n) { if (thread() <= n) out[thread()] = thread(); }
KERNEL(256) early_exit(u32* out) {
  SHARED static u32 s[256];
  s[thread()] = thread();
  if (thread() >= 128) return;
  barrier();
  out[thread()] = s[thread() ^ 1];
}
KERNEL(256) not_filled(u32* out) {
  SHARED static u32 s[256];
  if (thread() < 255) s[thread()] = thread();
  barrier();
  out[thread()] = s[255 - thread()];
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.parametrize("arch", ALL)
class TestSetup:
    def test_indices_in_three_dimensions(self, folder: Path, arch: str) -> None:
        out = zeros(12 * 40)
        report = run(load(folder, PLACES, arch), "places", out, grid=(2, 3, 2), block=(5, 2, 4))
        assert out.tolist() == [group << 16 | item for group in range(12) for item in range(40)]
        assert report.by_class["global"] == 12 * (1 if arch in CDNA else 2)

    def test_sizes(self, folder: Path, arch: str) -> None:
        out = zeros(6)
        run(load(folder, PLACES, arch), "builtins", out, grid=(3, 2, 4), block=(32, 2, 1))
        assert out.tolist() == [96, 4, 32, 2, 4, 1]

    def test_arguments_by_value(self, folder: Path, arch: str) -> None:
        import ctypes

        out, code = zeros(8), load(folder, PLACES, arch)
        values = (77, ctypes.c_uint64(0x1234_5678_9ABC_DEF0), ctypes.c_uint16(513), 2.5)
        run(code, "by_value", *values, out)
        assert out.tolist() == [77, 0x9ABCDEF0, 0x12345678, 513, 10, 0, 0, 0]
        with pytest.raises(BadCodeObject, match="takes 32 bytes of arguments, not 4"):
            run(code, "by_value", 77)

    def test_dynamic_lds(self, folder: Path, arch: str) -> None:
        out, code = zeros(500), load(folder, PLACES, arch)
        run(code, "dynamic_lds", out, 500, dynamic_lds=2000)
        assert out.tolist() == [3 * (499 - i) + 7 for i in range(500)]
        with pytest.raises(OutOfBounds, match=r"LDS 12\d\d of 1256"):
            run(code, "dynamic_lds", out, 500, dynamic_lds=1000)
        with pytest.raises(OutOfBounds, match="bytes of LDS"):
            run(code, "dynamic_lds", out, 500, dynamic_lds=1 << 20)


@pytest.mark.parametrize("arch", CDNA)
def test_preloaded_arguments(folder: Path, arch: str) -> None:
    """CDNA GPUs can hand the first arguments over in registers."""
    out = zeros(8)
    options = ("-mllvm", "-amdgpu-kernarg-preload-count=4")
    text = "KERNEL(64) sums(u32 a, u32 b, u32* out, u32 c) { if (thread() == 0) out[0] = a + 2 * b + 4 * c; }"
    code = load(folder, text, arch, *options)
    assert code.kernel("sums").descriptor.preload & 127 == 5  # words
    run(code, "sums", 1, 2, out, 5)
    assert out.tolist() == [25, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("arch", ALL)
class TestCode:
    def test_calls_with_a_stack(self, folder: Path, arch: str) -> None:
        out = zeros(64)
        run(load(folder, CODE, arch), "recursive", out)
        assert out.tolist() == [0, 1, 1, 2, 3, 5, 8, 13] * 8

    def test_private_memory(self, folder: Path, arch: str) -> None:
        out, index = zeros(64), zeros(65)
        index[:] = np.random.default_rng(2).integers(0, 16, 65)
        run(load(folder, CODE, arch), "private_array", out, index)
        kept = [[i * t + (1000 if i == index[t] else 0) for i in range(16)] for t in range(64)]
        assert out.tolist() == [kept[t][index[t + 1]] + kept[t][index[t]] for t in range(64)]

    def test_constants(self, folder: Path, arch: str) -> None:
        out = zeros(64)
        run(load(folder, CODE, arch), "constants", out)
        assert out.tolist() == [3, 1, 4, 1, 5, 9, 2, 6] * 8

    def test_divergent_branches(self, folder: Path, arch: str) -> None:
        def want(x: int) -> int:
            kind = x % 5
            if kind == 2:
                i = 0
                while i < x:
                    x ^= i
                    i += 1
                return x
            return [x * 3, x + 100, 0, 1 if x > 20 else 2, 0][kind]

        out = zeros(64)
        run(load(folder, CODE, arch), "switches", out)
        assert out.tolist() == [want(x) for x in range(64)]

    def test_double_precision(self, folder: Path, arch: str) -> None:
        out, given = zeros(64, np.float64), zeros(64, np.float64)
        given[:] = np.random.default_rng(3).standard_normal(64)
        run(load(folder, CODE, arch), "doubles", out, given)
        assert np.allclose(out, given * 1.5 + given[::-1] / 3.0, rtol=1e-15, atol=1e-15)

    def test_wide_integers(self, folder: Path, arch: str) -> None:
        out, given = zeros(64, np.uint64), zeros(64, np.uint64)
        given[:] = np.random.default_rng(4).integers(0, 1 << 63, 64, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        run(load(folder, CODE, arch), "wide_integers", out, given)
        assert out.tolist() == [wide_integers(int(a), int(b)) for a, b in zip(given, given[::-1], strict=True)]

    def test_bytes(self, folder: Path, arch: str) -> None:
        out, given, halves = zeros(64, np.uint8), zeros(64, np.uint8), zeros(64, np.uint16)
        given[:] = np.random.default_rng(5).integers(0, 256, 64)
        run(load(folder, CODE, arch), "bytes", out, given, halves)
        assert out.tolist() == [(int(x) + 1) % 256 for x in given[::-1]]
        signed = given.view(np.int8)
        assert halves.tolist() == [(int(x) * 257 + int(y)) % 65536 for x, y in zip(given, signed, strict=True)]


def wide_integers(a: int, b: int) -> int:
    mask = (1 << 64) - 1
    signed = a - (1 << 64) if a >> 63 else a
    last = a - b if a < b else a + b
    return (a * b & mask) ^ (a >> (b & 63)) ^ (signed >> 7 & mask) ^ (a // (b | 1)) ^ (a % (b | 3)) ^ (last & mask)


@pytest.mark.parametrize("arch", ALL)
class TestAtomics:
    @pytest.mark.extended
    def test_counters(self, folder: Path, arch: str) -> None:
        c, w, f = zeros(16 + 1024), zeros(1, np.uint64), zeros(1, np.float32)
        checks = Checks(global_races=False)
        run(load(folder, ATOMICS, arch), "counters", c, w, f, grid=(4, 1, 1), block=(256, 1, 1), checks=checks)
        assert c[:2].tolist() == [1024, 1023]
        assert int(c.view(np.int32)[2]) == -1023
        assert c[3:6].tolist() == [0xFFFFFFFF, 1024, 2048]
        assert sorted(c[16:].tolist()) == list(range(1024))
        assert int(w[0]) == sum(range(1024)) << 20
        assert float(f[0]) == 512.0

    def test_histogram(self, folder: Path, arch: str) -> None:
        out, given = zeros(256), zeros(1024, np.uint8)
        given[:] = np.random.default_rng(6).integers(0, 50, 1024)
        run(load(folder, ATOMICS, arch), "histogram", out, given, grid=(4, 1, 1), block=(256, 1, 1))
        assert np.array_equal(out, np.bincount(given, minlength=256))


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("groups", [3, 40])
class TestPublication:
    """What workgroups hand over to one another; 40 do not run at the same time."""

    def test_behind_a_barrier_and_an_atomic(self, folder: Path, arch: str, groups: int) -> None:
        out, slots, counter = zeros(256), zeros(256 * groups), zeros(1)
        code = load(folder, HANDOVER, arch)

        def start(name: str, *arguments: Any) -> None:
            counter[:] = 0
            checks = Checks(publication=True)
            run(code, name, *arguments, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)

        start("in_order", out, slots, counter)
        assert out.tolist() == [groups * t + groups * (groups - 1) // 2 for t in range(256)]
        with pytest.raises(GlobalRace, match=r"argument 1, byte .* wrote it and has not"):
            start("too_early", out, slots, counter)
        with pytest.raises(GlobalRace, match="workgroup 0 wrote it and has not"):
            start("unannounced", zeros(256 * groups), slots)
        with pytest.raises(GlobalRace, match="this load may find what a cache held before"):
            start("from_a_cache", out, slots, counter)

    def test_a_barrier_waits_for_stores_only_where_its_fence_does(self, folder: Path, arch: str, groups: int) -> None:
        arguments = zeros(256), zeros(256 * groups), zeros(1)
        code, checks = load(folder, HANDOVER, arch), Checks(publication=True)
        if arch.startswith("gfx9"):
            with pytest.raises(GlobalRace, match="has not waited for it"):
                run(code, "not_waited", *arguments, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)
        else:
            run(code, "not_waited", *arguments, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)
            assert arguments[0].tolist() == [groups * t + groups * (groups - 1) // 2 for t in range(256)]

    def test_as_far_as_the_device(self, folder: Path, arch: str, groups: int) -> None:
        arguments = zeros(256), zeros(256 * groups), zeros(1)
        code, checks = load(folder, HANDOVER, arch), Checks(publication=True)
        several = arch in ("gfx942", "gfx950")  # dies, each with its L2 cache
        said = "has not written it back" if several else "this load may find what a cache held before"
        said = "meet in an atomic, and that of . does not reach the device" if arch == "gfx1201" else said
        with pytest.raises(GlobalRace, match=said):
            run(code, "too_near", *arguments, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)
        if several:
            arguments[2][:] = 0
            with pytest.raises(GlobalRace, match="has not written it back"):
                run(code, "not_written_back", *arguments, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)


@pytest.mark.parametrize("arch", ALL)
class TestFaults:
    def test_past_the_end(self, folder: Path, arch: str) -> None:
        code, out = load(folder, FAULTS, arch), zeros(100)
        with pytest.raises(OutOfBounds, match="end 4 bytes past argument 0"):
            run(code, "past_end", out, 100, block=(256, 1, 1))
        run(code, "past_end", out, 99, block=(256, 1, 1))
        assert out.tolist() == list(range(100))

    def test_early_exit(self, folder: Path, arch: str) -> None:
        with pytest.raises(BarrierDivergence):
            run(load(folder, FAULTS, arch), "early_exit", zeros(256), block=(256, 1, 1))

    def test_not_filled(self, folder: Path, arch: str) -> None:
        with pytest.raises(UninitialisedLds, match="LDS 1020 has not been written"):
            run(load(folder, FAULTS, arch), "not_filled", zeros(256), block=(256, 1, 1))


def test_code_objects_are_read_once(folder: Path) -> None:
    image = load(folder, PLACES, "gfx942").elf.image
    assert CodeObject.load(image) is CodeObject.load(bytes(image))
    assert all(CodeObject.load(image).kernel(name) for name in ("places", "builtins", "by_value", "dynamic_lds"))
    with pytest.raises(BadCodeObject, match="no kernel nothing; there are: builtins"):
        CodeObject.load(image).kernel("nothing")
    with pytest.raises(BadCodeObject, match="257 work-items"):
        run(CodeObject.load(image), "places", zeros(1), block=(257, 1, 1))


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x02\x01" + bytes(60), b"__CLANG_OFFLOAD_BUNDLE__" + bytes(64)])
def test_what_is_no_code_object(image: Any) -> None:
    with pytest.raises(BadCodeObject):
        CodeObject.load(image)


@pytest.mark.parametrize(("order", "last"), [(0, 39), (-1, 0), (5, None)])
def test_workgroups_run_in_the_order_that_is_asked_for(folder: Path, order: int, last: int | None) -> None:
    """Their atomics, too: the slots that ``in_order`` hands over come to the same whoever is last."""
    groups = 40
    out, slots, counter = zeros(256), zeros(256 * groups), zeros(1)
    code, seen = load(folder, HANDOVER, "gfx942"), []
    plain = launching._ordered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launching, "_ordered", lambda *given: seen.append(plain(*given)) or seen[-1])
        checks = Checks(order=order)
        run(code, "in_order", out, slots, counter, grid=(groups, 1, 1), block=(256, 1, 1), checks=checks)
    assert out.tolist() == [groups * t + groups * (groups - 1) // 2 for t in range(256)]
    assert sorted(seen[0].tolist()) == list(range(groups))
    assert last is None or seen[0][-1] == last
    assert list(plain(groups, 5)) != list(plain(groups, 6))
