// The main loops of the kernels that multiply with SimtAtom or MmaAtom: how tiles get from global memory to the atom.
//
// Pipelines:
//   compv4  asynchronous copies into `stages` tiles, one barrier per tile. (mem: likewise, but on AMD.)
//   compv3  one tile; the next one waits in registers. (mem: likewise on AMD.)
// Memory that is not 16-byte aligned (base, or leading dimension) is found out by every workgroup for its own task and
// takes a detour: see gpu/blocks/loader.hpp.
#pragma once
#include "tilewright/gpu/blocks/atoms.hpp"
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/gpu/blocks/loader.hpp"

namespace tw::gpu {

// A thread's place in the workgroup, and the workgroup's shared memory.
struct Where {
  int thread, lane, m0, n0;  // m0, n0: the wave's part within the tile
  uint32_t shared;
};

#if defined(__HIP__)
constexpr bool kCopiesWait = true;
#else
constexpr bool kCopiesWait = false;
#endif

#if defined(__HIP__)
template <class Tile>
struct Source;  // gpu/amd/loader.hpp
template <class Tile, int kThreads>
struct RegisterLoader;
#endif

// Operands of a product: matrices. (Convolutions gather one of them from an image: see
// gpu/conv/implicit_gemm.hpp.)
struct MatrixSources {
  static constexpr bool any_alignment = true;  // which every workgroup finds out for its own task
  using Rows = LinearRows;
  template <class Tile, int kThreads>
  struct A {
    using Place = Operand<Tile>;
    using Copy = Loader<Tile, kThreads>;
#if defined(__HIP__)
    using Fast = Source<Tile>;  // for AmdLoop
    using Registers = RegisterLoader<Tile, kThreads>;
#endif
  };
  template <class Tile, int kThreads>
  using B = A<Tile, kThreads>;
};

template <class Config, class Sources = MatrixSources>
struct PortableLoop {
  using TileA = OperandTile<typename Config::A, !Config::a_col, Config::tile_m, Config::tile_k>;
  using TileB = OperandTile<typename Config::B, Config::b_col, Config::tile_n, Config::tile_k>;
  static constexpr int threads = Config::wave_m * Config::wave_n * kWave;
  using Atom = typename AtomFor<Config, TileA, TileB, Config::tile_m / Config::wave_m,
                                Config::tile_n / Config::wave_n>::type;
  using OperandA = typename Sources::template A<TileA, threads>::Place;
  using OperandB = typename Sources::template B<TileB, threads>::Place;
  using LoaderA = typename Sources::template A<TileA, threads>::Copy;
  using LoaderB = typename Sources::template B<TileB, threads>::Copy;

  // ---- shared memory ----

  static constexpr bool is_async =
      Config::pipeline != Pipeline::compv3 && !(kCopiesWait && Config::pipeline == Pipeline::mem);
  static constexpr int stages = is_async ? Config::stages : 1;
  static_assert(stages >= (is_async ? 2 : 1), "an asynchronous pipeline has two stages or more");
  static constexpr bool has_raw = TileA::has_raw && Sources::any_alignment;
  static constexpr int raw_stages = has_raw ? max_of(2, stages - 1) : stages;
  static constexpr int tile_bytes = TileA::bytes + TileB::bytes, raw_bytes = TileA::raw_bytes + TileB::raw_bytes;
  static constexpr int bytes =
      is_async && has_raw ? max_of(stages * tile_bytes, tile_bytes + raw_stages * raw_bytes) : stages * tile_bytes;
  static constexpr int flag_bytes = 16;  // besides, for a word that one thread tells the others

  // ---- registers ----

  static constexpr bool is_simt = kIsSimt<Config>;
  // Matrix fragments are loaded a step ahead, where registers allow. (8-bit floats take more when they are multiplied.)
  static constexpr bool is_tight = size_of<typename Config::A> == 1 && Atom::is_float;
  static constexpr int fragments_ahead = is_simt || is_tight ? 0 : 1;
  // Workgroups that a multiprocessor should have room for: two where the registers suffice, measured to pay.
  static constexpr bool suits_two = is_simt && is_async && Atom::depth == 1 && Atom::count <= 64 && threads <= 256;
  // True if the work on every accumulator is unrolled as a whole. Loops compile in half to three quarters of the
  // time; but products of matrices are up to 6 % slower with them, and they cost some registers, which two large
  // workgroups do not have. (AMD: always unrolled.)
  static constexpr bool unrolls = kCopiesWait || Sources::any_alignment || (suits_two && threads > 128);
  // Steps of the vector unit that stand side by side: all, or so many multiply-adds that the end of a loop is hidden.
  static constexpr int steps_at_once =
      unrolls || Atom::count * Config::tile_k <= 1024 ? Config::tile_k : max_of(1, 512 / (Atom::count * Atom::depth));

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
      TW_UNROLL_BY(is_tight ? 1 : is_simt ? min_of(kSteps, steps_at_once) : kSteps)
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

  TW_DEVICE static bool are_aligned(const OperandA& a, const OperandB& b) {
    if constexpr (Sources::any_alignment) return a.aligned() && b.aligned();
    return true;
  }

  TW_DEVICE static void copy_step(bool aligned, const OperandA& a, const OperandB& b, int step, int slot,
                                  const Where& at) {
    const uint32_t place = at.shared + slot * tile_bytes;
    if (aligned) {
      LoaderA::copy_aligned(place, a.at(step), at.thread);
      LoaderB::copy_aligned(place + TileA::bytes, b.at(step), at.thread);
      return;
    }
    if constexpr (has_raw) {
      const uint32_t to = at.shared + tile_bytes + slot * raw_bytes;
      LoaderA::copy_raw(to, a.at(step), at.thread);
      LoaderB::copy_raw(to + TileA::raw_bytes, b.at(step), at.thread);
    } else if constexpr (Sources::any_alignment) {
      LoaderA::copy_words(place, a.at(step), at.thread);
      LoaderB::copy_words(place + TileA::bytes, b.at(step), at.thread);
    }
  }

  // From a raw copy to the tile before the ring.
  template <class PanelA, class PanelB>
  TW_DEVICE static uint32_t realign(uint32_t raw, const PanelA& a, const PanelB& b, const Where& at) {
    LoaderA::realign(raw, at.shared, a, at.thread);
    LoaderB::realign(raw + TileA::raw_bytes, at.shared + TileA::bytes, b, at.thread);
    barrier();
    return at.shared;
  }

  // A tile is multiplied where it arrived in the ring; a raw one is realigned first, into the tile before the ring.
  TW_DEVICE static void run_async(Atom& atom, const OperandA& a, const OperandB& b, int steps,
                                  const Where& at) {
    const bool aligned = are_aligned(a, b);
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
        if constexpr (has_raw)
          if (!aligned) tile = realign(at.shared + tile_bytes + slot * raw_bytes, a.at(step), b.at(step), at);
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

  TW_DEVICE static void run_registers(Atom& atom, const OperandA& a, const OperandB& b, int steps,
                                      const Where& at) {
    const bool aligned = are_aligned(a, b);
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
      const auto panel_a = a.at(step);
      const auto panel_b = b.at(step);
      if (step > 0) barrier();  // the tile before has been multiplied
      if (aligned) {
        LoaderA::put(held_a, tile_a, panel_a, at.thread);
        LoaderB::put(held_b, tile_b, panel_b, at.thread);
      } else if constexpr (Sources::any_alignment) {
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

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const Where& at) {
    const int steps = a.steps();
    if constexpr (is_async) run_async(atom, a, b, steps, at);
    else run_registers(atom, a, b, steps, at);
    if constexpr (is_simt) atom.unfold();
  }
};

}  // namespace tw::gpu
