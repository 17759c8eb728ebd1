// Parts shared by the attention kernels: types of products, tiles and atoms, and how faults of lengths and tables
// are reported. See core/args/fmha.h for the only parameter.
#pragma once
#include "tilewright/core/philox.hpp"
#include "tilewright/gpu/blocks/atoms.hpp"
#include "tilewright/gpu/blocks/convert.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/amd/loader.hpp"
#endif

namespace tw::gpu {

constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.693147180559945309f;
TW_DEVICE float minus_infinity() { return float_of(0xff800000u); }

// The operand type of the matrix unit: 8-bit floats are widened, exactly, on their way to shared memory, so that
// probabilities keep more than three bits. gfx90a takes subnormal fp16 values for zero.
template <class Q>
struct FmhaProduct {
  using type = Q;
};
template <>
struct FmhaProduct<fp8> {
#if defined(__gfx90a__)
  using type = bf16;
#else
  using type = fp16;
#endif
};

// A launch may overlap the end of the one before (programmatic dependent launch, which a plan asks for where it pays):
// the later kernel waits until all that the earlier one wrote is there, and the earlier one tells when the later one's
// workgroups may take their places. Neither does anything elsewhere.
TW_DEVICE void fmha_wait_for_previous() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
TW_DEVICE void fmha_release_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Which atom multiplies elements of type X, in warp tiles of kM x kN x kK.
template <class X, int kM, int kN, int kK>
struct FmhaAtoms {
  static constexpr bool simt = is_same<X, fp32> && !(kMultipliesFp32 && kM == kN);
#if defined(__HIP__)
  static constexpr bool k_major_only = !simt;  // tiles of both operands
  template <bool kKMajor, int kExtent, int kDepth, bool kSimt, class Void = void>
  struct TileOf {
    using type = OperandTile<X, kKMajor, kExtent, kDepth>;
  };
  template <bool kKMajor, int kExtent, int kDepth, class Void>
  struct TileOf<kKMajor, kExtent, kDepth, false, Void> {
    using type = LdsTile<X, kKMajor, kExtent, kDepth>;
  };
  template <class A, class B, int kRows, int kColumns, bool kSimt, class Void = void>
  struct AtomOf {
    using type = SimtAtom<A, B, kRows, kColumns>;
  };
  template <class A, class B, int kRows, int kColumns, class Void>
  struct AtomOf<A, B, kRows, kColumns, false, Void> {
    using type = MatrixAtom<A, B, kRows, kColumns, kM, kN, kK>;
  };
#else
  static constexpr bool k_major_only = false;
  template <bool kKMajor, int kExtent, int kDepth, bool kSimt>
  struct TileOf {
    using type = OperandTile<X, kKMajor, kExtent, kDepth>;
  };
  template <class A, class B, int kRows, int kColumns, bool kSimt, class Void = void>
  struct AtomOf {
    using type = SimtAtom<A, B, kRows, kColumns>;
  };
  template <class A, class B, int kRows, int kColumns, class Void>
  struct AtomOf<A, B, kRows, kColumns, false, Void> {
    using type = MmaAtom<A, B, kRows, kColumns>;
  };
#endif
  template <bool kKMajor, int kExtent, int kDepth>
  using Tile = typename TileOf<kKMajor, kExtent, kDepth, simt>::type;
  template <class A, class B, int kRows, int kColumns>
  using Atom = typename AtomOf<A, B, kRows, kColumns, simt>::type;
};

// All lanes of a wave take part in an instruction of the matrix unit. Not every compiler knows that of WMMA: what only
// some lanes use, it would compute in these lanes alone.
template <class Atom>
TW_DEVICE void fmha_settle(Atom&) {}
#if defined(__HIP__)
template <class TileA, class TileB, int kM, int kN, int kTileM, int kTileN, int kTileK>
TW_DEVICE void fmha_settle(MatrixAtom<TileA, TileB, kM, kN, kTileM, kTileN, kTileK>& atom) {
  TW_UNROLL
  for (int i = 0; i < atom.rows; i++)
    TW_UNROLL
    for (int j = 0; j < atom.columns; j++) asm volatile("" : "+v"(atom.acc[i][j]));
}
#endif

// The product of two tiles in shared memory, added to the atom: the wave's part from row m0 and column n0 on.
template <class Atom, class TileA>
TW_DEVICE void fmha_multiply(Atom& atom, uint32_t a, uint32_t b, int m0, int n0, int lane) {
  constexpr int kSteps = TileA::depth / Atom::depth;
  // The remainder of an odd number of steps would make compilers unroll all of them, with all their operands at once.
  TW_UNROLL_BY(Atom::depth <= 4 || kSteps % 2 != 0 ? 1 : 2)
  for (int kk = 0; kk < kSteps; kk++) {
    typename Atom::Fragments f;
    Atom::load(f, a, b, m0, n0, lane, kk);
    atom.multiply(f);
  }
  fmha_settle(atom);
}

// Results of 8-bit operands are scaled on some GPUs; these are never 8-bit.
template <class Atom, class F>
TW_DEVICE void fmha_each_run(Atom& atom, F f) {
  TW_UNROLL
  for (int strip = 0; strip < Atom::strips; strip++)
    TW_UNROLL
    for (int index = 0; index < Atom::strip_runs; index++) {
      float x[Atom::run];
      atom.get(x, strip, index);
      f(x, strip * (Atom::strip_runs / Atom::runs_per_row) + index / Atom::runs_per_row, strip, index);
    }
}

// The larger one; x if y is NaN.
TW_DEVICE float fmha_larger(float x, float y) {
#if defined(__CUDA_ARCH__)
  asm("max.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
  return x;
#else
  return y > x ? y : x;
#endif
}

// Over the lanes that hold results of one row.
template <class Atom>
TW_DEVICE float fmha_row_max(float x) {
  TW_UNROLL
  for (int mask = kWave / 2; mask > 0; mask /= 2)
    if ((Atom::row_bits & mask) != 0) x = fmha_larger(x, shuffle_xor(x, mask));
  return x;
}
template <class Atom>
TW_DEVICE float fmha_row_sum(float x) {
  TW_UNROLL
  for (int mask = kWave / 2; mask > 0; mask /= 2)
    if ((Atom::row_bits & mask) != 0) x += shuffle_xor(x, mask);
  return x;
}

// A factor of 8-bit floats; one that is not given is 1.
TW_DEVICE float fmha_scale_at(const tw_fmha_scale& scale, int64_t b, int64_t h, int64_t row) {
  if (!scale.ptr) return 1.0f;
  const int64_t block = scale.block_rows ? row / scale.block_rows * scale.block : 0;
  return load_constant<float>(scale.ptr + b * scale.batch + h * scale.head + block);
}

// A run of neighbouring elements of a row, of which those below `count` exist, `step` elements apart.
template <class E, int kRun>
TW_DEVICE void fmha_store_run(char* to, const float (&x)[kRun], int count, int64_t step) {
  constexpr int kBytes = kRun * size_of<E>;
  if constexpr (kBytes % 4 == 0 && kBytes <= 16) {
    if (count >= kRun && step == 1 && ((uintptr_t)to & (kBytes - 1)) == 0) {
      store_global(to, pack<E, kRun>(x));
      return;
    }
  }
  if constexpr (kBytes > 16 && kRun % 2 == 0) {
    float low[kRun / 2], high[kRun / 2];
    TW_UNROLL
    for (int e = 0; e < kRun / 2; e++) low[e] = x[e], high[e] = x[kRun / 2 + e];
    fmha_store_run<E, kRun / 2>(to, low, count, step);
    fmha_store_run<E, kRun / 2>(to + kRun / 2 * step * size_of<E>, high, count - kRun / 2, step);
  } else {
    TW_UNROLL
    for (int e = 0; e < kRun; e++)
      if (e < count) store_global<typename E::storage>(to + e * step * size_of<E>, from_float<E>(x[e]));
  }
}

// As vectors of at most 16 bytes.
template <class E, int kRun>
TW_DEVICE void fmha_store_vectors(char* to, const float (&x)[kRun]) {
  if constexpr (kRun * size_of<E> <= 16) {
    store_global(to, pack<E, kRun>(x));
  } else {
    float low[kRun / 2], high[kRun / 2];
    TW_UNROLL
    for (int e = 0; e < kRun / 2; e++) low[e] = x[e], high[e] = x[kRun / 2 + e];
    fmha_store_vectors<E>(to, low), fmha_store_vectors<E>(to + kRun / 2 * size_of<E>, high);
  }
}

// Runs of every lane lie as those of lane 0 do, moved.
template <class Atom>
constexpr bool fmha_runs_move() {
  for (int index = 0; index < Atom::runs_per_row; index++)
    for (int lane = 1; lane < kWave; lane *= 2)
      if (Atom::run_column(lane, index) - Atom::run_column(lane, 0) !=
          Atom::run_column(0, index) - Atom::run_column(0, 0))
        return false;
  return true;
}

// The atom's results, rows whole: slot s begins at to[s] (null: there is no such row), of which `hdim` elements exist,
// a multiple of 8, `step` elements apart. What can be stored as runs is asked once, not for every run.
template <class E, class Atom>
TW_DEVICE void fmha_store_results(Atom& atom, char* const (&to)[Atom::slots], int lane, int hdim, int64_t step) {
  constexpr int kRun = Atom::run, kBytes = kRun * size_of<E>, kVector = kBytes < 16 ? kBytes : 16;
  static_assert(8 % kRun == 0, "a run exists as a whole, or not at all");
  static_assert(fmha_runs_move<Atom>(), "instructions add constants to an address and to what is left of a row");
  const int first = Atom::run_column(lane, 0);
  bool whole = kBytes % 4 == 0 && step == 1;
  int left[Atom::slots];
  char* at[Atom::slots];
  TW_UNROLL
  for (int s = 0; s < Atom::slots; s++) {
    whole &= ((uintptr_t)to[s] & (kVector - 1)) == 0;
    left[s] = to[s] ? hdim - first : 0;
    at[s] = to[s] + first * step * size_of<E>;
  }
  if (whole) {
    if constexpr (kBytes % 4 == 0)
      fmha_each_run(atom, [&](float (&x)[kRun], int slot, int, int index) {
        const int c = Atom::run_column(0, index) - Atom::run_column(0, 0);
        if (left[slot] > c) fmha_store_vectors<E>(at[slot] + c * size_of<E>, x);
      });
    return;
  }
  fmha_each_run(atom, [&](float (&x)[kRun], int slot, int, int index) {
    const int c = Atom::run_column(0, index) - Atom::run_column(0, 0);
    if (left[slot] <= c) return;
    TW_UNROLL
    for (int e = 0; e < kRun; e++)
      store_global<typename E::storage>(at[slot] + (c + e) * step * size_of<E>, from_float<E>(x[e]));
  });
}

// Results of a wave on their way through shared memory: rows of kElements of type E, one after the other.
template <class E, int kElements>
struct FmhaStagedRows {
  static constexpr int size = size_of<E>, bytes = kElements * size + 16;  // neighbouring rows begin in different banks
  static constexpr int vector = 16 / size, vectors = kElements / vector;
  static_assert(kElements % vector == 0, "rows are whole vectors");

  template <class Atom>
  TW_DEVICE static void stage(Atom& atom, uint32_t to, int lane) {
    fmha_each_run(atom, [&](float (&x)[Atom::run], int slot, int, int index) {
      store_shared(to + Atom::row_at(lane, slot) * bytes + Atom::run_column(lane, index) * size,
                   pack<E, Atom::run>(x).data);
    });
    wave_barrier();
  }

  // The first `count` rows, to where row(r) says; `hdim` elements of each exist, `step` elements apart.
  template <class Row>
  TW_DEVICE static void store(uint32_t from, int lane, int count, int hdim, int64_t step, Row row) {
    TW_NO_UNROLL
    for (int id = lane; id < count * vectors; id += kWave) {
      const int r = id / vectors, column = id % vectors * vector;
      if (column >= hdim) continue;
      const Words<4> x = load_shared<4>(from + r * bytes + column * size);
      char* const to = row(r) + column * step * size;
      if (step == 1 && ((uintptr_t)to & 15) == 0) {  // vectors exist as a whole, or not at all
        store_global(to, x);
        continue;
      }
      TW_UNROLL
      for (int e = 0; e < vector; e++) {
        if constexpr (size == 4) store_global(to + e * step * 4, x.w[e]);
        else store_global(to + e * step * 2, (uint16_t)(x.w[e / 2] >> (e % 2 * 16)));
      }
    }
  }
};

// ---- what was wrong with lengths and tables ----

// counters[0]: workgroups that are done; [1]: bits; [2] and [3]: the first item concerned and its length or page.
TW_DEVICE void fmha_tell(const tw_fmha_args& args, int32_t bits, int64_t b, int64_t culprit) {
  if (!bits || !args.status) return;
  or_global(args.counters + 1, (uint32_t)bits);
  max_global((uint64_t*)(args.counters + 2), (uint64_t)(0x7fffffff - b) << 32 | (uint32_t)culprit);
}

// All threads of every workgroup call this, once, at the end; the last workgroup runs `last` and writes the status.
template <class Last>
TW_DEVICE void fmha_publish(const tw_fmha_args& args, int thread, Last last) {
  if (!args.status && !args.lens_out) return;
  barrier();
  if (thread != 0) return;
  if (arrive(args.counters) + 1 != (uint32_t)block_count()) return;
  last();
  const uint32_t bits = load_coherent<1>(args.counters + 1).w[0];
  const Words<2> first = load_coherent<2>(args.counters + 2);
  if (args.status) {
    int32_t* const to = args.status;
    store_global<int32_t>(to, (int32_t)bits);
    store_global<int32_t>(to + 1, bits ? (int32_t)(0x7fffffffu - first.w[1]) : 0);
    store_global<int32_t>(to + 2, bits ? (int32_t)first.w[0] : 0);
    store_global<int32_t>(to + 3, 0);
  }
  store_coherent(args.counters, Words<1>{0});
  store_coherent(args.counters + 1, Words<1>{0});
  store_coherent(args.counters + 2, Words<2>{0, 0});
}

}  // namespace tw::gpu
