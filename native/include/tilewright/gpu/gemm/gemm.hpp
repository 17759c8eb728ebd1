// The portable GEMM kernel of GPUs. A generated source unit states a Config and writes TW_GEMM_KERNEL(symbol, Config).
//
// Config: see the template of the GEMM plugin. A workgroup of wave_m x wave_n waves computes tile_m x tile_n results; a
// wave's part of them is tile_m/wave_m x tile_n/wave_n, a multiple of 16 x 8 (on AMD: of the warp tile). For `pipeline`
// and `stages` see gpu/gemm/mainloop.hpp, and gpu/amd/mainloop.hpp for the matrix units of AMD GPUs.
//
// Launch: Gemm::threads threads, Gemm::shared_bytes of dynamic shared memory, tiles * split_k workgroups (persistent:
// any number). Counters and workspace are used only if Config::split_k > 1 (and launch.split_k > 1).
#pragma once
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/gpu/gemm/mainloop.hpp"
#include "tilewright/gpu/blocks/scheduler.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/amd/mainloop.hpp"
#endif

namespace tw::gpu {

template <class Config, class Sources, bool kSimt = kIsSimt<Config>>
struct LoopFor {
  using type = PortableLoop<Config, Sources>;
};
#if defined(__HIP__)
template <class Config, class Sources>
struct LoopFor<Config, Sources, false> {
  using type = AmdLoop<Config, Sources>;
};
#endif

template <class Config, class Sources = MatrixSources>
struct Gemm {
  using Loop = typename LoopFor<Config, Sources>::type;
  using TileA = typename Loop::TileA;
  using TileB = typename Loop::TileB;
  using Atom = typename Loop::Atom;
  static constexpr int waves = Config::wave_m * Config::wave_n, threads = waves * kWave;
  static constexpr int wave_rows = Config::tile_m / Config::wave_m, wave_columns = Config::tile_n / Config::wave_n;
  using Accumulator = typename Atom::Accumulator;
  using Finish = Epilogue<Config, Accumulator, typename Sources::Rows>;
  static_assert(Config::wave_k == 1, "waves do not share k");
  static_assert(Config::tile_m % Config::wave_m == 0 && Config::tile_n % Config::wave_n == 0, "waves share the tile");
  static_assert(Config::reduction == Reduction::none, "Stream-K is for the ws pipeline");

  // ---- shared memory ----

  // cshuffle: every wave stages a strip of its part; of the matrix units of AMD GPUs, whose strips are tall, 64 columns
  // at a time. Rows lie 8 words further apart than they are long, which spreads the fragments' writes over the banks.
  static constexpr bool shuffles = Config::epilogue == EpilogueKind::cshuffle;
  static constexpr bool cuts_strips = !is_same<Loop, PortableLoop<Config, Sources>> && wave_columns % 64 == 0;
  static constexpr int strip_columns = cuts_strips ? 64 : wave_columns, strip_parts = wave_columns / strip_columns;
  static constexpr int strip_ld = strip_columns + 8, strip_bytes = Atom::strip_rows * strip_ld * 4;
  static constexpr int work_bytes = max_of(Loop::bytes, shuffles ? waves * strip_bytes : 0);
  static constexpr int shared_bytes = work_bytes + Loop::flag_bytes;

  // Registers are needed besides the product's: where the work comes from and where its results go.
  static constexpr bool is_simple = Finish::plain && !Config::grouped && !Config::persistent && Config::split_k == 1;
  static constexpr int min_blocks = is_simple && Loop::suits_two ? 2 : 1;

  // Accumulators stand in registers, whose numbers are constants: `use` gets a part's number as one, within a loop over
  // the parts that need not be unrolled. What else such a loop does then exists once.
  template <int kParts, class Use>
  TW_DEVICE static void with_constant(int part, const Use& use) {
    TW_UNROLL
    for (int p = 0; p < kParts; p++)
      if (p == part) use(p);
  }
  static constexpr int parts_at_once(int parts) { return Loop::unrolls ? parts : 1; }

  // ---- split-K ----

  // Adds the partial tiles of all slices in their order. Whether this workgroup came last and holds the sum; else its
  // part is in the workspace and another will finish.
  TW_DEVICE static bool gather(Atom& atom, const tw_gemm_launch& launch, int tile, int slice, const Where& at) {
    constexpr int kVectors = Atom::count / 4;  // a slot: vectors of 4 sums, thread by thread
    constexpr int64_t kSlot = (int64_t)threads * Atom::count * 4;
    const int slices = (int)launch.split_k;
    char* const slots = (char*)launch.workspace + (int64_t)tile * slices * kSlot + at.thread * 16;
    TW_UNROLL
    for (int v = 0; v < kVectors; v++) {
      Words<4> w;
      TW_UNROLL
      for (int l = 0; l < 4; l++) w.w[l] = word_of(atom.at(v * 4 + l));
      store_coherent(slots + slice * kSlot + v * (threads * 16), w);
    }
    const uint32_t flag = at.shared + (shared_bytes - 16);  // where the main loop's tiles may have been
    barrier();
    if (at.thread == 0) store_shared<1>(flag, {arrive(launch.counters + tile)});
    barrier();
    const bool last = load_shared<1>(flag).w[0] == (uint32_t)slices - 1;
    if (!last) return false;
    if (at.thread == 0) store_coherent<1>(launch.counters + tile, {0});  // as the launch found it
    atom.clear();
    // So many vectors under way at a time as leave room for the sums.
    constexpr int kBatch = min_of(kVectors, kVectors > 16 ? 8 : 16), kBatches = ceil_div(kVectors, kBatch);
    [[maybe_unused]] constexpr int kSlicesAtOnce = max_of(1, 8 / kBatch);
    TW_UNROLL_BY(parts_at_once(kBatches))
    for (int batch = 0; batch < kBatches; batch++) {
      Accumulator sums[kBatch * 4] = {};
      TW_UNROLL_BY(kSlicesAtOnce)
      for (int s = 0; s < slices; s++)
        TW_UNROLL
        for (int v = 0; v < kBatch; v++) {
          if (kVectors % kBatch != 0 && batch * kBatch + v >= kVectors) continue;
          const Words<4> w = load_coherent<4>(slots + s * kSlot + (batch * kBatch + v) * (threads * 16));
          TW_UNROLL
          for (int l = 0; l < 4; l++) sums[v * 4 + l] += sum_of(w.w[l]);
        }
      with_constant<kBatches>(batch, [&](int b) {
        TW_UNROLL
        for (int i = 0; i < kBatch * 4; i++)
          if (b * kBatch * 4 + i < Atom::count) atom.at(b * kBatch * 4 + i) += sums[i];
      });
    }
    return true;
  }
  TW_DEVICE static uint32_t word_of(float x) { return bits_of(x); }
  TW_DEVICE static uint32_t word_of(int32_t x) { return (uint32_t)x; }
  TW_DEVICE static Accumulator sum_of(uint32_t w) {
    if constexpr (is_same<Accumulator, float>) return float_of(w);
    else return (Accumulator)w;
  }

  // ---- epilogue ----

  // i0, j0: the wave's part in C.
  TW_DEVICE static void store_direct(const Atom& atom, const Finish& finish, int i0, int j0, const Where& at) {
    const int m = (int)finish.problem.m, n = (int)finish.problem.n;
    constexpr int kRows = Atom::strip_runs / Atom::runs_per_row;  // of a strip
    TW_UNROLL_BY(parts_at_once(Atom::runs_per_row))
    for (int column = 0; column < Atom::runs_per_row; column++) {
      const int j = j0 + Atom::run_column(at.lane, column), count = min_of(n - j, Atom::run);
      if (count <= 0) continue;
      const auto columns = finish.template columns<Atom::run>(j, count);
      Accumulator x[Atom::strips][kRows][Atom::run];
      with_constant<Atom::runs_per_row>(column, [&](int c) {
        TW_UNROLL
        for (int strip = 0; strip < Atom::strips; strip++)
          TW_UNROLL
          for (int row = 0; row < kRows; row++) atom.get(x[strip][row], strip, row * Atom::runs_per_row + c);
      });
      TW_UNROLL
      for (int strip = 0; strip < Atom::strips; strip++)
        TW_UNROLL
        for (int row = 0; row < kRows; row++) {
          const int i = i0 + strip * Atom::strip_rows + Atom::run_row(at.lane, row * Atom::runs_per_row);
          if (i < m) finish.store(x[strip][row], columns, i, j, count);
        }
    }
  }

  // cshuffle: vectors of kVector columns.
  static constexpr int kVector = min_of(8, 16 / size_of<typename Config::C>), kPerRow = strip_columns / kVector;
  static constexpr int kTotal = Atom::strip_rows * kPerRow, kPasses = ceil_div(kTotal, kWave);
  static constexpr bool kFixed = kWave % kPerRow == 0;  // a lane keeps to its columns

  // One vector of a staged strip whose first row is row i0 of C. kWhole: it exists, and C is aligned.
  template <bool kWhole>
  TW_DEVICE static void store_vector(const Finish& finish, uint32_t strip_at, const Columns<kVector>& fixed, int i0,
                                     int j0, int id) {
    const int row = id / kPerRow, column = id % kPerRow * kVector;
    const int i = i0 + row, j = j0 + column;
    const int count = kWhole ? kVector : min_of((int)finish.problem.n - j, kVector);
    if (kTotal % kWave != 0 && id >= kTotal) return;
    if (!kWhole && (i >= (int)finish.problem.m || count <= 0)) return;
    Accumulator x[kVector];
    TW_UNROLL
    for (int v = 0; v < kVector; v += 4) {
      const Words<4> w = load_shared<4>(strip_at + (row * strip_ld + column + v) * 4);
      TW_UNROLL
      for (int l = 0; l < 4; l++) x[v + l] = sum_of(w.w[l]);
    }
    Columns<kVector> columns = fixed;
    if constexpr (!kFixed) columns = finish.template columns<kVector>(j, count);
    const auto value = finish.finish(x, columns, i, j, count);
    if constexpr (kWhole) store_global(finish.c + (finish.rows(i) + j) * size_of<typename Config::C>, value);
    else finish.put(value, i, j, count);
  }

  // Part `part` of a strip, to shared memory.
  TW_DEVICE static void stage(const Atom& atom, int strip, int part, uint32_t strip_at, int lane) {
    constexpr int kRuns = Atom::strip_runs / strip_parts;
    TW_UNROLL
    for (int index = part * kRuns; index < (part + 1) * kRuns; index++) {
      Accumulator x[Atom::run];
      atom.get(x, strip, index);
      Words<Atom::run> w;
      TW_UNROLL
      for (int e = 0; e < Atom::run; e++) w.w[e] = word_of(x[e]);
      const int column = Atom::run_column(lane, index) - part * strip_columns;
      store_shared(strip_at + (Atom::run_row(lane, index) * strip_ld + column) * 4, w);
    }
  }

  TW_DEVICE static void store_shuffled(const Atom& atom, const Finish& finish, int i0, int j0, const Where& at) {
    const uint32_t strip_at = at.shared + at.thread / kWave * strip_bytes;
    const int m = (int)finish.problem.m, n = (int)finish.problem.n;
    const bool aligned = is_aligned(finish.c, 16) && finish.rows.divisible(16 / size_of<typename Config::C>);
    const bool whole = Finish::plain && aligned && i0 + wave_rows <= m && j0 + wave_columns <= n;
    TW_UNROLL
    for (int part = 0; part < strip_parts; part++) {
      const int left = part * strip_columns;
      Columns<kVector> columns = {};
      if constexpr (kFixed) {
        const int j = j0 + left + at.lane % kPerRow * kVector;
        if (j < n) columns = finish.template columns<kVector>(j, min_of(n - j, kVector));
      }
      TW_UNROLL_BY(parts_at_once(Atom::strips))
      for (int strip = 0; strip < Atom::strips; strip++) {
        with_constant<Atom::strips>(strip, [&](int s) { stage(atom, s, part, strip_at, at.lane); });
        wave_barrier();
        const int first = i0 + strip * Atom::strip_rows;
        if (Finish::plain && whole) {
          TW_UNROLL
          for (int pass = 0; pass < kPasses; pass++)
            store_vector<true>(finish, strip_at, columns, first, j0 + left, at.lane + pass * kWave);
        } else {
          TW_NO_UNROLL
          for (int pass = 0; pass < kPasses; pass++)
            store_vector<false>(finish, strip_at, columns, first, j0 + left, at.lane + pass * kWave);
        }
        wave_barrier();
      }
    }
  }

  // ---- one workgroup ----

  TW_DEVICE static void run_work(const GemmParams<Config>& params, int work, const Where& at) {
    const int slices = Config::split_k > 1 ? (int)params.launch.split_k : 1;
    const auto job = find_work<Config>(params, slices > 1 ? work / slices : work);
    const int slice = slices > 1 ? work % slices : 0;
    const tw_gemm_problem& problem = job.task->problem;
    const Slice range = slice_of((int)problem.k, slices, slice, Config::tile_k);
    const int i0 = job.tile.row * Config::tile_m, j0 = job.tile.column * Config::tile_n;
    const typename Loop::OperandA a((const char*)problem.a + job.item * problem.stride_a * TileA::element_bytes,
                                    problem.lda, i0, (int)problem.m, range.begin, range.length);
    const typename Loop::OperandB b((const char*)problem.b + job.item * problem.stride_b * TileB::element_bytes,
                                    problem.ldb, j0, (int)problem.n, range.begin, range.length);
    Atom atom;
    atom.clear();
    Loop::run(atom, a, b, at);
    if constexpr (Config::split_k > 1)
      if (slices > 1 && !gather(atom, params.launch, job.index, slice, at)) return;
    finish_tile(atom, Finish(problem, job.task->operands(), job.item, {problem.ldc}), i0, j0, at);
  }

  // i0, j0: the tile in C.
  TW_DEVICE static void finish_tile(const Atom& atom, const Finish& finish, int i0, int j0, const Where& at) {
    if constexpr (shuffles) {
      barrier();  // the ring is free
      store_shuffled(atom, finish, i0 + at.m0, j0 + at.n0, at);
    } else {
      store_direct(atom, finish, i0 + at.m0, j0 + at.n0, at);
    }
  }

  TW_DEVICE static void run(const GemmParams<Config>& params) {
    const int thread = thread_index(), wave = thread / kWave;
    const Where at = {thread, lane_index(), wave % Config::wave_m * wave_rows, wave / Config::wave_m * wave_columns,
                      shared_base()};
    if constexpr (Config::persistent) {
      const int64_t total = params.launch.tiles * (Config::split_k > 1 ? params.launch.split_k : 1);
      for (int64_t work = block_index(); work < total; work += block_count()) {
        run_work(read_again(params), (int)work, at);
        barrier();  // shared memory is free
      }
    } else {
      run_work(params, block_index(), at);
    }
  }
};

}  // namespace tw::gpu

#define TW_GEMM_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::Gemm<__VA_ARGS__>::threads, tw::gpu::Gemm<__VA_ARGS__>::min_blocks, NAME, \
            tw::GemmParams<__VA_ARGS__>, tw::gpu::Gemm<__VA_ARGS__>::run(params);)
