// The GEMM of GPUs whose operands have fewer than 8 bits: packed values wait in registers while the step before is
// multiplied, and become a tile of 8-bit floats in shared memory, exactly. What multiplies them, and their exponents, is
// that of products of 8-bit floats with blocks of 32 (gpu/gemm/scaled.hpp): correct rather than fast. Matrix
// instructions of gfx950 take two operands of as many bits as they lie in memory (gpu/amd/narrow.hpp).
#pragma once
#include "tilewright/core/narrow.hpp"
#include "tilewright/gpu/gemm/scaled.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/amd/narrow.hpp"
#endif

namespace tw::gpu {

struct NarrowSources : MatrixSources {};

// ---- operands ----

// 16 values in E4M3 (8-bit floats: as they are) from so many bits each, the first one lowest.
template <class Form>
TW_DEVICE Words<4> widen(const uint32_t (&packed)[width_of<Form> / 2]) {
  Words<4> to;
  TW_UNROLL
  for (int w = 0; w < 4; w++) {
    if constexpr (width_of<Form> == 8) {
      to.w[w] = packed[w];
    } else {
      uint32_t bytes = 0;
      TW_UNROLL
      for (int i = 0; i < 4; i++) {
        const int bit = (w * 4 + i) * Form::bits, word = bit / 32, shift = bit % 32;
        uint32_t code = packed[word] >> shift;
        if (shift + Form::bits > 32) code |= packed[word + 1] << (32 - shift);
        bytes |= widened<Form>(code & ((1u << Form::bits) - 1)) << (i * 8);
      }
      to.w[w] = bytes;
    }
  }
  return to;
}

// One operand of one output tile. Form: what lies in memory, along k.
template <class Form, class Tile, int kThreads>
struct NarrowLoader {
  static constexpr int words = width_of<Form> / 2;  // of the 16 values of a chunk
  static constexpr int along = Tile::depth / 16, total = Tile::extent * along, per_thread = ceil_div(total, kThreads);
  static_assert(Tile::k_major && Tile::element_bytes == 1 && Tile::depth % 16 == 0, "lines of 8-bit floats along k");

  const char* base;         // the tile's first line
  int64_t ld;               // bytes from line to line
  int lines, k0, bytes;     // lines that exist; where the slice begins; bytes of a line up to the slice's end

  TW_DEVICE NarrowLoader(const void* matrix, int64_t ld_bytes, int first, int total_lines, int begin, int end)
      : base((const char*)matrix + first * ld_bytes),
        ld(ld_bytes),
        lines(total_lines - first),
        k0(begin),
        bytes(ceil_div(end * (words * 2), 8)) {}

  struct Held {
    uint32_t data[per_thread][words];
  };
  TW_DEVICE void fetch(Held& held, int step, int thread) const {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const int id = thread + j * kThreads, line = id / along;
      const int first = (k0 + step * Tile::depth) / 8 * (words * 2) + id % along * (words * 4), left = bytes - first;
      TW_UNROLL
      for (int w = 0; w < words; w++) held.data[j][w] = 0;
      if (line >= min_of(lines, Tile::extent) || left <= 0) continue;
      const char* const from = base + line * ld + first;
      if (left >= words * 4 && ((uintptr_t)from & 3) == 0) {
        TW_UNROLL
        for (int w = 0; w < words; w++) held.data[j][w] = load_constant<uint32_t>(from + w * 4);
      } else {
        TW_UNROLL
        for (int w = 0; w < words; w++)
          TW_NO_UNROLL
          for (int byte = 0; byte < min_of(left - w * 4, 4); byte++)
            held.data[j][w] |= (uint32_t)load_constant<uint8_t>(from + w * 4 + byte) << (byte * 8);
      }
    }
  }
  TW_DEVICE void put(const Held& held, uint32_t to, int thread) const {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const int id = thread + j * kThreads;
      if (total % kThreads != 0 && id >= total) continue;
      Words<4> x = widen<Form>(held.data[j]);
#if defined(__HIP__)
      x = stored_words<Tile>(x);
#endif
      store_shared(to + Tile::offset(id / along, id % along), x);
    }
  }
};

// ---- loops: the tile in shared memory is multiplied ----

template <class Config>
struct PortableLoop<Config, NarrowSources> : PortableLoop<Config, ScaledSources> {
  using Base = PortableLoop<Config, ScaledSources>;
  using Sums = typename Base::Atom::Sums;
  static_assert(!Base::is_async, "narrow values go through registers");
  static constexpr int place_b = Base::TileA::bytes;
  TW_DEVICE static void multiply(Sums& atom, const Where& at) {
    typename Base::Multiplication multiplication;
    multiplication.begin(at.shared, at);
    multiplication.finish(atom, at.shared, at);
  }
};
#if defined(__HIP__)
template <class Config>
struct AmdLoop<Config, NarrowSources> : AmdLoop<Config, ScaledSources> {
  using Base = AmdLoop<Config, ScaledSources>;
  using Sums = typename Base::Part;
  TW_DEVICE static void multiply(Sums& atom, const Where& at) {
    TW_NO_UNROLL
    for (int kk = 0; kk < Base::slices; kk++) {
      typename Base::Fragments fragments;
      Base::load(fragments, at.shared, at, kk);
      atom.multiply(fragments);
    }
  }
};
#else
template <class C, class FormA, class FormB>
constexpr bool kTakesNarrow = false;
#endif

// ---- one workgroup ----

template <class C, class FormA, class FormB>
struct WidenedGemm : Gemm<Narrow<C, FormA, FormB>, NarrowSources> {
  using Config = Narrow<C, FormA, FormB>;
  using Base = Gemm<Config, NarrowSources>;
  using typename Base::Atom, typename Base::Loop;
  using OperandA = NarrowLoader<FormA, typename Base::TileA, Base::threads>;
  using OperandB = NarrowLoader<FormB, typename Base::TileB, Base::threads>;
  static constexpr int block = Config::scale_depth;
  static constexpr bool at_once = kTakesExponents<Atom>;
  static_assert(at_once || block % Config::tile_k == 0, "a block of k is whole steps");

  TW_DEVICE static void multiply(Atom& atom, const tw_gemm_problem& problem, int64_t item, int i0, int j0, int begin,
                                 int end, const Where& at) {
    const OperandA a((const char*)problem.a + item * problem.stride_a, problem.lda, i0, (int)problem.m, begin, end);
    const OperandB b((const char*)problem.b + item * problem.stride_b, problem.ldb, j0, (int)problem.n, begin, end);
    typename OperandA::Held held_a;
    typename OperandB::Held held_b;
    a.fetch(held_a, 0, at.thread);
    b.fetch(held_b, 0, at.thread);
    if constexpr (at_once) atom.begin(problem, item, i0 + at.m0, j0 + at.n0, begin, at.lane);
    TW_NO_UNROLL
    for (int step = 0; begin + step * Config::tile_k < end; step++) {
      barrier();  // the tile before has been multiplied
      a.put(held_a, at.shared, at.thread);
      b.put(held_b, at.shared + Loop::place_b, at.thread);
      barrier();
      a.fetch(held_a, step + 1, at.thread);
      b.fetch(held_b, step + 1, at.thread);
      if constexpr (at_once) {
        Loop::multiply(atom, at);
      } else {
        const int k = begin + step * Config::tile_k, next = k + Config::tile_k;
        auto& sums = static_cast<typename Loop::Sums&>(atom);
        if (step == 0 || k % block == 0) sums.clear();
        Loop::multiply(sums, at);
        if (next % block == 0 || next >= end)
          atom.template add<1>(problem, item, k / block, i0 + at.m0, j0 + at.n0, at.lane);
      }
    }
  }
};

#if defined(__HIP__)
struct PackedSources : MatrixSources {};

template <class C, class FormA, class FormB>
struct AmdLoop<NarrowBytes<C, FormA, FormB>, PackedSources> : AmdLoop<NarrowBytes<C, FormA, FormB>, MatrixSources> {
  using Rounds = ExponentLoop<AmdLoop<NarrowBytes<C, FormA, FormB>, MatrixSources>>;
  static constexpr int bytes = Rounds::bytes;
};

// As the instructions take them: the main loops of plain products, with bytes for elements.
template <class C, class FormA, class FormB>
struct PackedGemm : Gemm<NarrowBytes<C, FormA, FormB>, PackedSources> {
  using Config = Narrow<C, FormA, FormB>;
  using Base = Gemm<NarrowBytes<C, FormA, FormB>, PackedSources>;
  using typename Base::Atom, typename Base::Loop;

  TW_DEVICE static void multiply(Atom& atom, const tw_gemm_problem& problem, int64_t item, int i0, int j0, int begin,
                                 int end, const Where& at) {
    constexpr int kBits = width_of<FormA>;
    const int first = begin / 8 * kBits, bytes = ceil_div(end * kBits, 8) - first;
    const typename Loop::OperandA a((const char*)problem.a + item * problem.stride_a, problem.lda, i0, (int)problem.m,
                                    first, bytes);
    const typename Loop::OperandB b((const char*)problem.b + item * problem.stride_b, problem.ldb, j0, (int)problem.n,
                                    first, bytes);
    if (end > begin) Loop::Rounds::run(atom, problem, item, i0, j0, begin, a, b, at);
  }
};
#else
template <class C, class FormA, class FormB>
struct PackedGemm;
#endif

template <class C, class FormA, class FormB>
struct Gemm<Narrow<C, FormA, FormB>, MatrixSources>
    : Choose<kTakesNarrow<C, FormA, FormB>, PackedGemm<C, FormA, FormB>, WidenedGemm<C, FormA, FormB>> {
  using Config = Narrow<C, FormA, FormB>;
  using Own = Choose<kTakesNarrow<C, FormA, FormB>, PackedGemm<C, FormA, FormB>, WidenedGemm<C, FormA, FormB>>;
  using Base = typename Own::Base;
  using typename Base::Atom, typename Base::Finish;

  TW_DEVICE static void run_work(const GemmParams<Config>& params, int work, const Where& at) {
    const int slices = Config::split_k > 1 ? (int)params.launch.split_k : 1;
    const auto job = find_work<Config>(params, slices > 1 ? work / slices : work);
    const int slice = slices > 1 ? work % slices : 0;
    const tw_gemm_problem& problem = job.task->problem;
    const Slice range = slice_of((int)problem.k, slices, slice, Config::tile_k);
    const int i0 = job.tile.row * Config::tile_m, j0 = job.tile.column * Config::tile_n;
    Atom atom;
    atom.clear();
    Own::multiply(atom, problem, job.item, i0, j0, range.begin, range.begin + range.length, at);
    if constexpr (Config::split_k > 1)
      if (slices > 1 && !Base::gather(atom, params.launch, job.index, slice, at)) return;
    Base::finish_tile(atom, Finish(problem, job.task->operands(), job.item, {problem.ldc}), i0, j0, at);
  }

  TW_DEVICE static void run(const GemmParams<Config>& params) {
    const int thread = thread_index(), wave = thread / kWave;
    const Where at = {thread, lane_index(), wave % Config::wave_m * Base::wave_rows,
                      wave / Config::wave_m * Base::wave_columns, shared_base()};
    const int64_t total = params.launch.tiles * (Config::split_k > 1 ? params.launch.split_k : 1);
    TW_NO_UNROLL
    for (int64_t work = block_index(); work < total; work += Config::persistent ? (int64_t)block_count() : total) {
      run_work(read_again(params), (int)work, at);
      if constexpr (Config::persistent) barrier();  // shared memory is free
    }
  }
};

}  // namespace tw::gpu
