// The portable GEMM of GPUs with packed 4-bit weights: bytes wait in registers while the step before is multiplied, and
// become a tile of A's type in shared memory, zero points taken off (exactly). The sums of a group are multiplied with
// the factors of their columns and added to others, in fp32.
#pragma once
#include "tilewright/core/int4.hpp"
#include "tilewright/gpu/blocks/convert.hpp"
#include "tilewright/gpu/gemm/gemm.hpp"

namespace tw {

// The zero points are an operand behind the last D.
template <class C, class Scale, bool kZeros>
struct GemmParams<Int4<C, Scale, kZeros>, false> {
  using Task = GemmTask<C::D::size + kZeros, C::pipeline == Pipeline::ws>;
  tw_gemm_launch launch;
  Task task;
};
template <class C, class Scale, bool kZeros>
struct GemmParams<Int4<C, Scale, kZeros>, true> {
  using Task = GemmTask<C::D::size + kZeros, C::pipeline == Pipeline::ws>;
  tw_gemm_launch launch;
};

}  // namespace tw

namespace tw::gpu {

struct Int4Sources : MatrixSources {};

// ---- values ----

// The code of an integer from -15 to 15 in E4M3.
TW_DEVICE uint32_t small_float_of(int x) {
  const uint32_t n = (uint32_t)(x < 0 ? -x : x);
  // From 8 on the steps are 1; below, one table.
  const uint32_t code = n >= 8 ? 0x48 + n : (uint32_t)(0x4e4c4a4844403800ull >> (n * 8)) & 0xff;
  return code | (x < 0 ? 0x80u : 0u);
}

// 16 bytes of elements of type E from values of 4 bits, the first one lowest, of which a zero point is taken.
template <class E>
TW_DEVICE Words<4> unpack(const Words<2 / size_of<E>>& packed, int zero) {
  Words<4> to;
  TW_UNROLL
  for (int w = 0; w < 4; w++) {
    if constexpr (size_of<E> == 2) {
      const uint32_t pair = packed.w[0] >> (w * 8);
      const int low = (int)(pair & 15) - zero, high = (int)(pair >> 4 & 15) - zero;
      to.w[w] = is_same<E, fp16> ? pack_halves((float)low, (float)high) : pack_bfloats((float)low, (float)high);
    } else {
      const uint32_t four = packed.w[w / 2] >> (w % 2 * 16);
      uint32_t bytes = 0;
      TW_UNROLL
      for (int i = 0; i < 4; i++) {
        const int x = (int)(four >> (i * 4) & 15) - zero;
        bytes |= (is_same<E, int8> ? (uint32_t)x & 0xff : small_float_of(x)) << (i * 8);
      }
      to.w[w] = bytes;
    }
  }
  return to;
}

// ---- B of one output tile ----

template <class Config, class Tile, int kThreads>
struct Int4Loader {
  using E = typename Config::B;
  static constexpr int values = 16 / size_of<E>, words = values / 8;  // of a chunk of the tile; packed, 32 bits each
  static constexpr int total = Tile::extent * (Tile::depth / values), per_thread = ceil_div(total, kThreads);
  static_assert(Tile::k_major, "columns are contiguous");
  static_assert(kInt4Group % Tile::depth == 0, "a group is whole steps");

  const char* base;         // the tile's first column
  int64_t ld;               // bytes from column to column
  int columns, k, k0;       // columns that exist; all of k; where the slice begins
  const char* zeros;        // of the first column
  int64_t zero_column, zero_step;

  TW_DEVICE Int4Loader(const tw_gemm_problem& problem, const tw_gemm_operand* zero, int64_t item, int j0, int begin, const Where&)
      : base((const char*)problem.b + item * problem.stride_b + j0 * problem.ldb),
        ld(problem.ldb),
        columns((int)problem.n - j0),
        k((int)problem.k),
        k0(begin),
        zeros(nullptr) {
    if constexpr (Config::has_zeros) {
      zero_column = zero->row_stride, zero_step = zero->col_stride;
      zeros = (const char*)zero->ptr + item * zero->batch_stride + j0 * zero_column;
    }
  }

  struct Held {
    Words<words> data[per_thread];
  };
  struct Place {
    int column, chunk;
  };
  TW_DEVICE static Place place(int thread, int j) {
    const int id = thread + j * kThreads;
    return {id / (Tile::depth / values), id % (Tile::depth / values)};
  }

  TW_DEVICE void fetch(Held& held, int step, int thread) const {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const Place at = place(thread, j);
      const int first = (k0 + step * Tile::depth + at.chunk * values) / 2, left = ceil_div(k, 2) - first;
      held.data[j] = {};
      if (at.column >= min_of(columns, Tile::extent) || left <= 0) continue;
      const char* const from = base + at.column * ld + first;
      if (left >= words * 4 && is_aligned(from, words * 4)) {
        held.data[j] = load_constant<Words<words>>(from);
      } else {
        TW_NO_UNROLL
        for (int byte = 0; byte < min_of(left, words * 4); byte++) {
          const uint32_t value = (uint32_t)(uint8_t)load_constant<unsigned char>((const unsigned char*)from + byte);
          if (words == 1 || byte < 4) held.data[j].w[0] |= value << (byte % 4 * 8);
          else held.data[j].w[words - 1] |= value << (byte % 4 * 8);
        }
      }
    }
  }

  // Elements beyond k meet zeros of A.
  TW_DEVICE void put(const Held& held, uint32_t to, int step, int thread) const {
    const int group = (k0 + step * Tile::depth) / kInt4Group;
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const Place at = place(thread, j);
      if (total % kThreads != 0 && at.column >= Tile::extent) continue;
      int zero = kInt4Middle;
      if constexpr (Config::has_zeros)
        if (at.column < columns)
          zero = load_constant<unsigned char>((const unsigned char*)zeros + at.column * zero_column + group * zero_step) & 15;
      Words<4> x = unpack<E>(held.data[j], zero);
#if defined(__HIP__)
      x = stored_words<Tile>(x);
#endif
      store_shared(to + Tile::offset(at.column, at.chunk), x);
    }
  }
};

// ---- sums ----

// The sums of a group, and, in the same order, those of all groups.
template <class Part>
struct Int4Atom : Part {
  using Sums = Part;
  using Accumulator = float;
  using Part::run, Part::strips, Part::strip_runs, Part::runs_per_row;
  static constexpr int count = strips * strip_runs * run, rows_per_strip = strip_runs / runs_per_row;
  float sums[strips][strip_runs][run];

  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < count; i++) at(i) = 0.0f;
  }
  TW_DEVICE void begin() {
    clear();
    Sums::clear();
  }
  TW_DEVICE float& at(int i) { return sums[i / (strip_runs * run)][i / run % strip_runs][i % run]; }
  TW_DEVICE void get(float (&x)[run], int strip, int index) const {
    TW_UNROLL
    for (int e = 0; e < run; e++) x[e] = sums[strip][index][e];
  }

  // The factors of a thread's columns for one group. j0: the wave's first column in C.
  template <class Scale>
  struct Factors {
    using Storage = typename Scale::storage;
    Storage raw[runs_per_row][run];
    TW_DEVICE void load(const tw_gemm_problem& problem, int64_t item, int group, int j0, int lane) {
      const tw_gemm_operand& b = problem.scale_b;
      const Storage* const scales = (const Storage*)b.ptr + item * b.batch_stride + group * b.col_stride;
      TW_UNROLL
      for (int column = 0; column < runs_per_row; column++)
        TW_UNROLL
        for (int e = 0; e < run; e++) {
          const int j = j0 + Part::run_column(lane, column) + e;
          raw[column][e] = load_constant<Storage>(scales + min_of(j, (int)problem.n - 1) * b.row_stride);
        }
    }
  };

  // Adds the sums of a group, and begins the next one's.
  template <class Scale>
  TW_DEVICE void add(const Factors<Scale>& factors) {
    TW_UNROLL
    for (int column = 0; column < runs_per_row; column++) {
      float factor[run];
      TW_UNROLL
      for (int e = 0; e < run; e++) factor[e] = to_float<Scale>(factors.raw[column][e]);
      TW_UNROLL
      for (int strip = 0; strip < strips; strip++)
        TW_UNROLL
        for (int row = 0; row < rows_per_strip; row++) {
          typename Part::Accumulator x[run];
          Part::get(x, strip, row * runs_per_row + column);
          TW_UNROLL
          for (int e = 0; e < run; e++) sums[strip][row * runs_per_row + column][e] += (float)x[e] * factor[e];
        }
    }
    Sums::clear();
  }
};

// After the products of a step: adds the sums of a group that ends with it. begin: of the slice.
template <class Config, class Atom>
TW_DEVICE void add_after_step(Atom& atom, int begin, int step, int steps, const tw_gemm_problem& problem, int64_t item,
                              int j0, int lane) {
  const int end = begin + (step + 1) * Config::tile_k;
  if (end % kInt4Group != 0 && step + 1 < steps) return;
  typename Atom::template Factors<typename Config::GroupScale> factors;
  factors.load(problem, item, (end - 1) / kInt4Group, j0, lane);
  atom.add(factors);
}

// ---- loops: one tile in shared memory ----

template <class Config>
struct Int4Registers : PortableLoop<Config, MatrixSources> {
  using Base = PortableLoop<Config, MatrixSources>;
  using typename Base::LoaderA, typename Base::Multiplication, typename Base::OperandA, typename Base::TileA;
  using typename Base::TileB;
  using Atom = Int4Atom<typename Base::Atom>;
  using OperandB = Int4Loader<Config, TileB, Base::threads>;
  static_assert(!Base::is_async, "packed weights go through registers");

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const tw_gemm_problem& problem,
                            int64_t item, int j0, const Where& at, const tw_gemm_operand*) {
    const bool aligned = a.aligned();
    const int steps = a.steps();
    const uint32_t tile_a = at.shared, tile_b = at.shared + TileA::bytes;
    Multiplication multiplication;
    typename LoaderA::Held held_a;
    typename OperandB::Held held_b;
    if (steps > 0) {
      if (aligned) LoaderA::fetch(held_a, a.at(0), at.thread);
      b.fetch(held_b, 0, at.thread);
    }
    TW_NO_UNROLL
    for (int step = 0; step < steps; step++) {
      if (step > 0) barrier();  // the tile before has been multiplied
      if (aligned) LoaderA::put(held_a, tile_a, a.at(step), at.thread);
      else LoaderA::move(tile_a, a.at(step), at.thread);
      b.put(held_b, tile_b, step, at.thread);
      barrier();
      if (step + 1 < steps) {
        if (aligned) LoaderA::fetch(held_a, a.at(step + 1), at.thread);
        b.fetch(held_b, step + 1, at.thread);
      }
      multiplication.begin(at.shared, at);
      multiplication.finish(atom, at.shared, at);
      add_after_step<Config>(atom, b.k0, step, steps, problem, item, j0, at.lane);
    }
  }
};

#if defined(__HIP__)
template <class Config>
struct AmdLoop<Config, Int4Sources> : AmdLoop<Config, MatrixSources> {
  using Base = AmdLoop<Config, MatrixSources>;
  using typename Base::Fragments, typename Base::OperandA, typename Base::TileA, typename Base::TileB;
  using Atom = Int4Atom<typename Base::Atom>;
  using OperandB = Int4Loader<Config, TileB, Base::threads>;

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const tw_gemm_problem& problem,
                            int64_t item, int j0, const Where& at, const tw_gemm_operand*) {
    const int steps = a.steps();
    typename OperandB::Held held;
    if (steps > 0) b.fetch(held, 0, at.thread);
    TW_NO_UNROLL
    for (int step = 0; step < steps; step++) {
      lds_barrier();  // the tile before has been multiplied
      SlowLoader<TileA, Base::threads>::move(at.shared, a.at(step), at.thread);
      b.put(held, at.shared + Base::place_b, step, at.thread);
      lds_barrier();
      if (step + 1 < steps) b.fetch(held, step + 1, at.thread);
      TW_NO_UNROLL
      for (int kk = 0; kk < Base::slices; kk++) {
        Fragments fragments;
        Base::load(fragments, at.shared, at, kk);
        atom.multiply(fragments);
      }
      add_after_step<Config>(atom, b.k0, step, steps, problem, item, j0, at.lane);
    }
  }
};
#endif

template <class Config>
struct Int4Ring;  // gpu/gemm/int4_ring.hpp

template <class Config>
struct PortableLoop<Config, Int4Sources>
    : Choose<Config::pipeline == Pipeline::compv4, Int4Ring<Config>, Int4Registers<Config>> {};

template <class C, class Scale, bool kZeros>
struct Gemm<Int4<C, Scale, kZeros>, MatrixSources> : Gemm<Int4<C, Scale, kZeros>, Int4Sources> {
  using Config = Int4<C, Scale, kZeros>;
  using Base = Gemm<Config, Int4Sources>;
  using typename Base::Atom, typename Base::Finish, typename Base::Loop, typename Base::TileA;

  TW_DEVICE static void run_work(const GemmParams<Config>& params, int work, const Where& at) {
    const int slices = Config::split_k > 1 ? (int)params.launch.split_k : 1;
    const auto job = find_work<Config>(params, slices > 1 ? work / slices : work);
    const int slice = slices > 1 ? work % slices : 0;
    const tw_gemm_problem& problem = job.task->problem;
    const Slice range = slice_of((int)problem.k, slices, slice, Config::tile_k);
    const int i0 = job.tile.row * Config::tile_m, j0 = job.tile.column * Config::tile_n;
    const typename Loop::OperandA a((const char*)problem.a + job.item * problem.stride_a * TileA::element_bytes,
                                    problem.lda, i0, (int)problem.m, range.begin, range.length);
    const tw_gemm_operand* zero = nullptr;
    if constexpr (kZeros) zero = job.task->operands() + C::D::size;
    const typename Loop::OperandB b(problem, zero, job.item, j0, range.begin, at);
    Atom atom;
    atom.begin();
    Loop::run(atom, a, b, problem, job.item, j0 + at.n0, at, zero);
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
