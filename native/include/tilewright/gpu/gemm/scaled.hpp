// The portable GEMM of GPUs with block scales: the main loop runs over one block of k at a time, whose sums are
// multiplied with the factors of their row and column and added to others, in fp32. Where the matrix unit takes the
// factors itself (gpu/gemm/exponents.hpp), the main loop runs over all of k.
#pragma once
#include "tilewright/core/block_scales.hpp"
#include "tilewright/gpu/gemm/gemm.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/gemm/exponent_loop.hpp"
#endif

namespace tw::gpu {

struct ScaledSources : MatrixSources {};

template <class Factor>
TW_DEVICE float load_factor(const Factor* from) {
  if constexpr (is_same<Factor, float>) return load_constant<float>(from);
  else return float_of(exponent_word(e8m0{load_constant<uint8_t>(from)}));
}

// The sums of a block, and, in the same order, those of all blocks.
template <class Part, class Factor>
struct ScaledAtom : Part {
  using Sums = Part;
  using Part::run, Part::strips, Part::strip_runs, Part::runs_per_row;
  static constexpr int count = strips * strip_runs * run, rows_per_strip = strip_runs / runs_per_row;
  float sums[strips][strip_runs][run];

  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < count; i++) at(i) = 0.0f;
  }
  TW_DEVICE float& at(int i) { return sums[i / (strip_runs * run)][i / run % strip_runs][i % run]; }
  TW_DEVICE void get(float (&x)[run], int strip, int index) const {
    TW_UNROLL
    for (int e = 0; e < run; e++) x[e] = sums[strip][index][e];
  }

  // Adds the sums of block `block`. i0, j0: the wave's part in C.
  template <int kColumns>
  TW_DEVICE void add(const tw_gemm_problem& problem, int64_t item, int block, int i0, int j0, int lane) {
    const tw_gemm_operand &a = problem.scale_a, &b = problem.scale_b;
    const Factor* const of_a = (const Factor*)a.ptr + item * a.batch_stride + block * a.col_stride;
    const Factor* const of_b = (const Factor*)b.ptr + item * b.batch_stride + block * b.col_stride;
    float row_factor[strips][rows_per_strip];
    TW_UNROLL
    for (int strip = 0; strip < strips; strip++)
      TW_UNROLL
      for (int row = 0; row < rows_per_strip; row++) {
        const int i = i0 + strip * Part::strip_rows + Part::run_row(lane, row * runs_per_row);
        row_factor[strip][row] = load_factor(of_a + min_of(i, (int)problem.m - 1) * a.row_stride);
      }
    TW_UNROLL
    for (int column = 0; column < runs_per_row; column++) {
      const int j = j0 + Part::run_column(lane, column);
      float factor[run];
      TW_UNROLL
      for (int e = 0; e < run; e++)  // runs do not cross blocks of columns
        factor[e] = kColumns > 1 && e > 0 ? factor[0]
                                          : load_factor(of_b + min_of(j + e, (int)problem.n - 1) / kColumns * b.row_stride);
      TW_UNROLL
      for (int strip = 0; strip < strips; strip++)
        TW_UNROLL
        for (int row = 0; row < rows_per_strip; row++) {
          float x[run];
          Part::get(x, strip, row * runs_per_row + column);
          TW_UNROLL
          for (int e = 0; e < run; e++)
            sums[strip][row * runs_per_row + column][e] += x[e] * (row_factor[strip][row] * factor[e]);
        }
    }
  }
};

// The loop of matrices, with the sums of all blocks beside its own.
template <class Config>
struct PortableLoop<Config, ScaledSources> : PortableLoop<Config, MatrixSources> {
  using Atom = ScaledAtom<typename PortableLoop<Config, MatrixSources>::Atom, typename Config::Factor>;
};
#if defined(__HIP__)
template <class Config>
struct AmdLoop<Config, ScaledSources> : AmdLoop<Config, MatrixSources> {
  using Part = typename AmdLoop<Config, MatrixSources>::Atom;
  using Atom = Choose<kTakesExponents<Part>, Part, ScaledAtom<Part, typename Config::Factor>>;
  using Rounds = ExponentLoop<AmdLoop<Config, MatrixSources>>;
  static constexpr int bytes = Rounds::bytes;
};
#else
template <class Atom>
constexpr bool kTakesExponents = false;
#endif

template <class C, int kColumns, int kBlock, class Given>
struct Gemm<BlockScaled<C, kColumns, kBlock, Given>, MatrixSources>
    : Gemm<BlockScaled<C, kColumns, kBlock, Given>, ScaledSources> {
  using Config = BlockScaled<C, kColumns, kBlock, Given>;
  using Base = Gemm<Config, ScaledSources>;
  using typename Base::Atom, typename Base::Finish, typename Base::Loop, typename Base::TileA, typename Base::TileB;
  static_assert(is_same<typename Base::Accumulator, float>, "8-bit floats");
  static constexpr bool at_once = kTakesExponents<Atom>;
  static_assert(at_once || kBlock % Config::tile_k == 0, "a block of k is whole steps");

  TW_DEVICE static void run_work(const GemmParams<Config>& params, int work, const Where& at) {
    const int slices = Config::split_k > 1 ? (int)params.launch.split_k : 1;
    const auto job = find_work<Config>(params, slices > 1 ? work / slices : work);
    const int slice = slices > 1 ? work % slices : 0;
    const tw_gemm_problem& problem = job.task->problem;
    const Slice range = slice_of((int)problem.k, slices, slice, Config::tile_k);
    const int i0 = job.tile.row * Config::tile_m, j0 = job.tile.column * Config::tile_n;
    const char* const a_item = (const char*)problem.a + job.item * problem.stride_a * TileA::element_bytes;
    const char* const b_item = (const char*)problem.b + job.item * problem.stride_b * TileB::element_bytes;
    Atom atom;
    atom.clear();
    const int end = range.begin + range.length;
    if constexpr (at_once) {
      const typename Loop::OperandA a(a_item, problem.lda, i0, (int)problem.m, range.begin, range.length);
      const typename Loop::OperandB b(b_item, problem.ldb, j0, (int)problem.n, range.begin, range.length);
      if (range.length > 0) Loop::Rounds::run(atom, problem, job.item, i0, j0, range.begin, a, b, at);
    } else {
      add_blocks(atom, problem, job.item, range.begin, end, a_item, b_item, i0, j0, at);
    }
    if constexpr (Config::split_k > 1)
      if (slices > 1 && !Base::gather(atom, params.launch, job.index, slice, at)) return;
    Base::finish_tile(atom, Finish(problem, job.task->operands(), job.item, {problem.ldc}), i0, j0, at);
  }

  TW_DEVICE static void add_blocks(Atom& atom, const tw_gemm_problem& problem, int64_t item, int begin, int end,
                                   const char* a_item, const char* b_item, int i0, int j0, const Where& at) {
    TW_NO_UNROLL
    for (int k = begin; k < end;) {
      const int block = k / kBlock, length = min_of((block + 1) * kBlock, end) - k;
      const typename Loop::OperandA a(a_item, problem.lda, i0, (int)problem.m, k, length);
      const typename Loop::OperandB b(b_item, problem.ldb, j0, (int)problem.n, k, length);
      if (k > begin) barrier();  // the block before has been multiplied
      static_cast<typename Atom::Sums&>(atom).clear();
      Loop::run(atom, a, b, at);
      atom.template add<kColumns>(problem, item, block, i0 + at.m0, j0 + at.n0, at.lane);
      k += length;
    }
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
