// The portable GEMM kernel of GPUs. A generated source unit states a Config and writes TW_GEMM_KERNEL(symbol, Config).
//
// Config: see the template of the GEMM plugin. `stages` is the number of tiles in shared memory (compv4: at least
// 2; compv3: ignored). A workgroup of wave_m x wave_n waves computes tile_m x tile_n results; a wave's part of them is
// tile_m/wave_m x tile_n/wave_n, a multiple of 16 x 8.
//
// Pipelines:
//   compv4  asynchronous copies into `stages` tiles, one barrier per tile.
//   compv3  one tile; the next one waits in registers.
// Memory that is not 16-byte aligned (base, or leading dimension) is found out by every workgroup for its own task and
// takes a detour: see loader.hpp.
//
// Launch: Gemm::threads threads, Gemm::shared_bytes of dynamic shared memory, tiles * split_k workgroups (persistent:
// any number). Counters and workspace are used only if Config::split_k > 1 (and launch.split_k > 1).
#pragma once
#include "tilewright/gpu/atoms.hpp"
#include "tilewright/gpu/epilogue.hpp"
#include "tilewright/gpu/loader.hpp"
#include "tilewright/gpu/scheduler.hpp"

namespace tw::gpu {

template <class Config>
struct Gemm {
  using TileA = OperandTile<typename Config::A, !Config::a_col, Config::tile_m, Config::tile_k>;
  using TileB = OperandTile<typename Config::B, Config::b_col, Config::tile_n, Config::tile_k>;
  static constexpr int waves = Config::wave_m * Config::wave_n, threads = waves * kWave;
  static constexpr int wave_rows = Config::tile_m / Config::wave_m, wave_columns = Config::tile_n / Config::wave_n;
  using Atom = typename AtomFor<Config, TileA, TileB, wave_rows, wave_columns>::type;
  using Accumulator = typename Atom::Accumulator;
  using Finish = Epilogue<Config, Accumulator>;
  using Task = GemmTaskOf<Config>;
  using LoaderA = Loader<TileA, threads>;
  using LoaderB = Loader<TileB, threads>;
  static_assert(Config::wave_k == 1, "waves do not share k");
  static_assert(Config::tile_m % Config::wave_m == 0 && Config::tile_n % Config::wave_n == 0, "waves share the tile");
  static_assert(Config::reduction == Reduction::none, "Stream-K is for the ws pipeline");

  // ---- shared memory ----

  static constexpr bool is_async = Config::pipeline != Pipeline::compv3;
  static constexpr int stages = is_async ? Config::stages : 1;
  static_assert(stages >= (is_async ? 2 : 1), "an asynchronous pipeline has two stages or more");
  static constexpr bool has_raw = TileA::has_raw;
  static constexpr int raw_stages = has_raw ? max_of(2, stages - 1) : stages;
  static constexpr int tile_bytes = TileA::bytes + TileB::bytes, raw_bytes = TileA::raw_bytes + TileB::raw_bytes;
  static constexpr int ring_bytes =
      is_async && has_raw ? max_of(stages * tile_bytes, tile_bytes + raw_stages * raw_bytes) : stages * tile_bytes;
  // cshuffle: every wave stages a strip of its part. Rows lie 8 words further apart than they are long, which spreads
  // the fragments' writes over the banks.
  static constexpr bool shuffles = Config::epilogue == EpilogueKind::cshuffle;
  static constexpr int strip_ld = wave_columns + 8, strip_bytes = Atom::strip_rows * strip_ld * 4;
  static constexpr int work_bytes = max_of(ring_bytes, shuffles ? waves * strip_bytes : 0);
  static constexpr int shared_bytes = work_bytes + 16;  // and a word for what one thread tells the others

  struct Where {
    int thread, lane, m0, n0;  // m0, n0: the wave's part within the tile
    uint32_t shared;
  };

  // ---- main loop ----

  static constexpr bool is_simt = kIsSimt<Config>;
  // What keeps registers busy besides the product: where the work comes from and where its results go.
  static constexpr bool is_simple = Finish::plain && !Config::grouped && !Config::persistent && Config::split_k == 1;
  // Matrix fragments are loaded a step ahead, where registers allow. (8-bit floats take more when they are multiplied.)
  static constexpr bool is_tight = size_of<typename Config::A> == 1 && Atom::is_float;
  static constexpr int fragments_ahead = is_simt || is_tight ? 0 : 1;

  // Workgroups that a multiprocessor should have room for: two where the registers suffice, measured to pay.
  static constexpr int min_blocks =
      is_simt && is_simple && is_async && Atom::depth == 1 && Atom::count <= 64 && threads <= 256 ? 2 : 1;

  // One tile: `begin` asks for the first fragments, `finish` multiplies.
  struct Multiplication {
    typename Atom::Fragments fragments[fragments_ahead + 1];
    TW_DEVICE void load(uint32_t tile, const Where& at, int kk) {
      Atom::load(fragments[kk % (fragments_ahead + 1)], tile, tile + TileA::bytes, at.m0, at.n0, at.lane, kk);
    }
    TW_DEVICE void begin(uint32_t tile, const Where& at) {
      if constexpr (fragments_ahead > 0) load(tile, at, 0);
    }
    TW_DEVICE void finish(Atom& atom, uint32_t tile, const Where& at) {
      constexpr int kSteps = Config::tile_k / Atom::depth;
      TW_UNROLL_BY(is_tight ? 1 : kSteps)
      for (int kk = 0; kk < kSteps; kk++) {
        if (kk + fragments_ahead < kSteps) load(tile, at, kk + fragments_ahead);
        atom.multiply(fragments[kk % (fragments_ahead + 1)]);
      }
    }
  };

  TW_DEVICE static void fold_after(Atom& atom, int step) {
    if constexpr (is_simt) {
      constexpr int kSteps = max_of(Atom::fold_after / Config::tile_k, 1);
      if (Atom::folds && step % kSteps == kSteps - 1) atom.fold();
    }
  }

  TW_DEVICE static void copy_step(bool aligned, const Operand<TileA>& a, const Operand<TileB>& b, int step, int slot,
                                  const Where& at) {
    const uint32_t place = at.shared + slot * tile_bytes;
    if (aligned) {
      LoaderA::copy_aligned(place, a.at(step), at.thread);
      LoaderB::copy_aligned(place + TileA::bytes, b.at(step), at.thread);
    } else if constexpr (!has_raw) {
      LoaderA::copy_words(place, a.at(step), at.thread);
      LoaderB::copy_words(place + TileA::bytes, b.at(step), at.thread);
    } else {
      const uint32_t to = at.shared + tile_bytes + slot * raw_bytes;
      LoaderA::copy_raw(to, a.at(step), at.thread);
      LoaderB::copy_raw(to + TileA::raw_bytes, b.at(step), at.thread);
    }
  }

  // A tile is multiplied where it arrived in the ring; a raw one is realigned first, into the tile before the ring.
  TW_DEVICE static void run_async(Atom& atom, const Operand<TileA>& a, const Operand<TileB>& b, int steps,
                                  const Where& at) {
    const bool aligned = a.aligned() && b.aligned();
    const int ahead = (aligned ? stages : raw_stages) - 1;
    int slot = 0, next = 0;
    TW_NO_UNROLL
    for (int step = -ahead; step < steps; step++) {  // the first ones only copy
      Multiplication multiplication;
      uint32_t tile = at.shared + slot * tile_bytes;
      if (step >= 0) {
        if (aligned) wait_async<stages - 2>();
        else wait_async<raw_stages - 2>();
        barrier();  // the step has arrived for all, and the slot before it is free
        if (has_raw && !aligned) {
          const uint32_t raw = at.shared + tile_bytes + slot * raw_bytes;
          tile = at.shared;
          LoaderA::realign(raw, tile, a.at(step), at.thread);
          LoaderB::realign(raw + TileA::raw_bytes, tile + TileA::bytes, b.at(step), at.thread);
          barrier();
        }
        multiplication.begin(tile, at);  // ahead of the copies, which share its way to shared memory
      }
      if (step + ahead < steps) copy_step(aligned, a, b, step + ahead, next, at);
      commit_async();
      next = next == ahead ? 0 : next + 1;
      if (step < 0) continue;
      multiplication.finish(atom, tile, at);
      fold_after(atom, step);
      slot = slot == ahead ? 0 : slot + 1;
    }
    wait_async<0>();
  }

  TW_DEVICE static void run_registers(Atom& atom, const Operand<TileA>& a, const Operand<TileB>& b, int steps,
                                      const Where& at) {
    const bool aligned = a.aligned() && b.aligned();
    const uint32_t tile_a = at.shared, tile_b = at.shared + TileA::bytes;
    Multiplication multiplication;
    typename LoaderA::Held held_a;
    typename LoaderB::Held held_b;
    if (aligned && steps > 0) {
      LoaderA::fetch(held_a, a.at(0), at.thread);
      LoaderB::fetch(held_b, b.at(0), at.thread);
    }
    TW_NO_UNROLL
    for (int step = 0; step < steps; step++) {
      const Panel panel_a = a.at(step), panel_b = b.at(step);
      if (step > 0) barrier();  // the tile before has been multiplied
      if (aligned) {
        LoaderA::put(held_a, tile_a, panel_a, at.thread);
        LoaderB::put(held_b, tile_b, panel_b, at.thread);
      } else {
        LoaderA::move(tile_a, panel_a, at.thread);
        LoaderB::move(tile_b, panel_b, at.thread);
      }
      barrier();
      if (aligned && step + 1 < steps) {
        LoaderA::fetch(held_a, a.at(step + 1), at.thread);
        LoaderB::fetch(held_b, b.at(step + 1), at.thread);
      }
      multiplication.begin(at.shared, at);
      multiplication.finish(atom, at.shared, at);
      fold_after(atom, step);
    }
  }

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
    const uint32_t flag = at.shared + work_bytes;
    barrier();
    if (at.thread == 0) store_shared<1>(flag, {arrive(launch.counters + tile)});
    barrier();
    const bool last = load_shared<1>(flag).w[0] == (uint32_t)slices - 1;
    if (!last) return false;
    if (at.thread == 0) store_coherent<1>(launch.counters + tile, {0});  // as the launch found it
    atom.clear();
    // So many vectors under way at a time as leave room for the sums.
    constexpr int kBatch = min_of(kVectors, kVectors > 16 ? 8 : 16);
    [[maybe_unused]] constexpr int kSlicesAtOnce = max_of(1, 8 / kBatch);
    TW_UNROLL
    for (int v0 = 0; v0 < kVectors; v0 += kBatch) {
      TW_UNROLL_BY(kSlicesAtOnce)
      for (int s = 0; s < slices; s++)
        TW_UNROLL
        for (int v = v0; v < min_of(v0 + kBatch, kVectors); v++) {
          const Words<4> w = load_coherent<4>(slots + s * kSlot + v * (threads * 16));
          TW_UNROLL
          for (int l = 0; l < 4; l++) atom.at(v * 4 + l) += sum_of(w.w[l]);
        }
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
    TW_UNROLL
    for (int column = 0; column < Atom::runs_per_row; column++) {
      const int j = j0 + Atom::run_column(at.lane, column), count = min_of(n - j, Atom::run);
      if (count <= 0) continue;
      const auto columns = finish.template columns<Atom::run>(j, count);
      TW_UNROLL
      for (int strip = 0; strip < Atom::strips; strip++)
        TW_UNROLL
        for (int index = column; index < Atom::strip_runs; index += Atom::runs_per_row) {
          const int i = i0 + strip * Atom::strip_rows + Atom::run_row(at.lane, index);
          Accumulator x[Atom::run];
          atom.get(x, strip, index);
          if (i < m) finish.store(x, columns, i, j, count);
        }
    }
  }

  // cshuffle: vectors of kVector columns.
  static constexpr int kVector = min_of(8, 16 / size_of<typename Config::C>), kPerRow = wave_columns / kVector;
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
    if constexpr (kWhole) store_global(finish.c + (i * finish.ldc + j) * size_of<typename Config::C>, value);
    else finish.put(value, i, j, count);
  }

  TW_DEVICE static void store_shuffled(const Atom& atom, const Finish& finish, int i0, int j0, const Where& at) {
    const uint32_t strip_at = at.shared + at.thread / kWave * strip_bytes;
    const int m = (int)finish.problem.m, n = (int)finish.problem.n;
    const bool aligned = is_aligned(finish.c, 16) && finish.ldc % (16 / size_of<typename Config::C>) == 0;
    const bool whole = Finish::plain && aligned && i0 + wave_rows <= m && j0 + wave_columns <= n;
    Columns<kVector> columns = {};
    if constexpr (kFixed) {
      const int j = j0 + at.lane % kPerRow * kVector;
      if (j < n) columns = finish.template columns<kVector>(j, min_of(n - j, kVector));
    }
    TW_UNROLL
    for (int strip = 0; strip < Atom::strips; strip++) {
      TW_UNROLL
      for (int index = 0; index < Atom::strip_runs; index++) {
        Accumulator x[Atom::run];
        atom.get(x, strip, index);
        Words<Atom::run> w;
        TW_UNROLL
        for (int e = 0; e < Atom::run; e++) w.w[e] = word_of(x[e]);
        store_shared(strip_at + (Atom::run_row(at.lane, index) * strip_ld + Atom::run_column(at.lane, index)) * 4, w);
      }
      wave_barrier();
      const int first = i0 + strip * Atom::strip_rows;
      if (Finish::plain && whole) {
        TW_UNROLL
        for (int pass = 0; pass < kPasses; pass++)
          store_vector<true>(finish, strip_at, columns, first, j0, at.lane + pass * kWave);
      } else {
        TW_NO_UNROLL
        for (int pass = 0; pass < kPasses; pass++)
          store_vector<false>(finish, strip_at, columns, first, j0, at.lane + pass * kWave);
      }
      wave_barrier();
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
    const Operand<TileA> a((const char*)problem.a + job.item * problem.stride_a * TileA::element_bytes, problem.lda, i0,
                           (int)problem.m, range.begin, range.length);
    const Operand<TileB> b((const char*)problem.b + job.item * problem.stride_b * TileB::element_bytes, problem.ldb, j0,
                           (int)problem.n, range.begin, range.length);
    Atom atom;
    atom.clear();
    const int steps = ceil_div(range.length, Config::tile_k);
    if constexpr (is_async) run_async(atom, a, b, steps, at);
    else run_registers(atom, a, b, steps, at);
    if constexpr (is_simt) atom.unfold();
    if constexpr (Config::split_k > 1)
      if (slices > 1 && !gather(atom, params.launch, job.index, slice, at)) return;
    const Finish finish(problem, job.task->operands(), job.item);
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
        run_work(params, (int)work, at);
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
