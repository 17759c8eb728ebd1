// The main loops of the matrix units of AMD GPUs: how tiles get from global memory to the instructions.
//
//   compv4        two tiles in LDS. While one is multiplied, the next one goes from registers to the other, and the one
//                 after it is fetched into registers. One barrier per step, ahead of the last slice of k, so that the
//                 first fragments of the next tile arrive while that slice is multiplied.
//   compv3        one tile in LDS: the next one, in registers, takes its place while the last slice is multiplied.
//   comp_async    two tiles in LDS, filled straight from global memory (gpu/amd/direct.hpp) while the other one is
//                 multiplied. Where k runs across the lines of A or B this is compv4.
//   preshufflev2  A as in compv4; B was packed ahead of time (gpu/amd/packed.hpp) and comes from global memory to the
//                 registers that multiply it, a whole step ahead. intrawave: the order of instructions is laid down;
//                 else the compiler chooses it.
//   mem           one tile in LDS, `stages` steps under way in registers, for problems that wait for memory.
//                 interwave: waves take turns, a whole step at a time; else loads and products alternate within a wave.
//
// Every loop does whole steps of operands that are aligned; what is left (the rest of k, or everything) takes a plain
// loop without prefetch. Shared memory: `bytes`.
#pragma once
#include "tilewright/gpu/amd/schedule.hpp"
#include "tilewright/gpu/amd/step.hpp"

namespace tw::gpu {

// A barrier for what waves write to LDS and read there; loads from global memory stay under way.
TW_DEVICE void lds_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  wait_shared();
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

template <class Config, class Operands = MatrixSources>
struct AmdLoop : AmdStep<Config, Operands> {
  using Step = AmdStep<Config, Operands>;
  using typename Step::TileA, typename Step::TileB, typename Step::LoaderA, typename Step::LoaderB, typename Step::Atom;
  using typename Step::Fragments, typename Step::OperandA, typename Step::OperandB, typename Step::Sources;
  using typename Step::Held, typename Step::SideA, typename Step::SideB;
  using Step::ahead, Step::covering, Step::crowded, Step::direct, Step::fits, Step::held_steps, Step::load;
  using Step::move_parts, Step::ordered, Step::packed, Step::place_b, Step::slice_products, Step::slice_reads;
  using Step::slices, Step::step_fetches, Step::step_writes, Step::threads, Step::tile_bytes, Step::two_tiles;
  static constexpr bool unrolls = true;  // see PortableLoop

  TW_DEVICE static void run_steps(Atom& atom, const Sources& from, const Where& at) {
    if (from.a.steps <= 0) return;
    if constexpr (Config::pipeline == Pipeline::mem) run_stages(atom, from, at);
    else if constexpr (direct) run_direct(atom, from, at);
    else if constexpr (two_tiles && slices == 1 && ordered) run_single_slices(atom, from, at);
    else if constexpr (two_tiles) run_two_tiles(atom, from, at);
    else run_one_tile(atom, from, at);
  }

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const Where& at) {
    int done = 0;
    if constexpr (!Operands::any_alignment) {
      if constexpr (Operands::has_wide)
        if (a.wide) return run_wide(atom, typename SideA::Wide(a), typename SideB::Fast(b), at);
      run_steps(atom, {typename SideA::Fast(a), typename SideB::Fast(b)}, at);
      return;
    } else if constexpr (packed) {
      const bool fast = Source<TileA>::suits(a) && a.k >= Config::tile_k;
      if (fast) run_packed(atom, Source<TileA>(a), b, at);
      run_slowly(atom, a, b, fast ? a.k / Config::tile_k : 0, at);
      return;
    } else if (Source<TileA>::suits(a) && Source<TileB>::suits(b)) {
      const Sources from = {Source<TileA>(a), Source<TileB>(b)};
      done = from.a.steps;
      run_steps(atom, from, at);
    }
    if constexpr (Operands::any_alignment) run_slowly(atom, a, b, done, at);
  }

  // ---- compv4 ----

  // Slice kk, not the last one, with its part of the moves; the barrier comes after products that cover the last write.
  TW_DEVICE static void schedule_before_barrier(int kk, int writes, int fetches, int reads) {
    if (crowded && kk + 2 < slices) return;
    for (int s = crowded ? 0 : kk; s <= kk; s++)
      schedule_slice(slice_products, slice_products - (s + 2 < slices ? 0 : covering),
                     {reads, share_of(writes, s, slices - 1), share_of(fetches, s, slices - 1)});
    __builtin_amdgcn_sched_barrier(0);
  }

  TW_DEVICE static void run_two_tiles(Atom& atom, const Sources& from, const Where& at) {
    Fragments fragments[2];
    Held held;
    held.fetch(from, 0, at);
    held.put(at.shared, at);
    held.fetch_parts(from, 1, at);
    lds_barrier();
    if constexpr (ahead) load(fragments[0], at.shared, at, 0);
    uint32_t tile = at.shared, other = at.shared + tile_bytes;
    TW_NO_UNROLL
    for (int step = 0; step < from.a.steps; step++) {
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) {
        if (!ahead) load(fragments[kk % 2], tile, at, kk);
        else if (kk + 1 < slices) load(fragments[(kk + 1) % 2], tile, at, kk + 1);
        if (kk < move_parts) {
          held.put(other, at, kk, move_parts);
          held.fetch(from, step + 2, at, kk, move_parts);
        }
        if (kk + 1 == slices) {
          lds_barrier();  // the other tile is complete; this one has been read
          if constexpr (ahead) load(fragments[slices % 2], other, at, 0);
        }
        atom.multiply(fragments[kk % 2]);
        if (ordered && kk + 1 < slices) schedule_before_barrier(kk, step_writes, step_fetches, slice_reads);
      }
      if (ahead && slices % 2 != 0) fragments[0] = fragments[1];
      if constexpr (ordered) schedule_slice(slice_products, slice_products - covering, {slice_reads, 0, 0});
      const uint32_t swap = tile;
      tile = other;
      other = swap;
    }
  }

  // Steps of one slice: the barrier comes half-way through it. Two steps a round, so that fragments keep their place.
  TW_DEVICE static void run_single_slices(Atom& atom, const Sources& from, const Where& at) {
    constexpr int kRows = Atom::rows * Atom::products, kHalf = (kRows + 1) / 2;
    constexpr int kFirst = kHalf * Atom::columns, kRest = slice_products - kFirst;
    Fragments fragments[2];
    Held held;
    held.fetch(from, 0, at);
    held.put(at.shared, at);
    held.fetch(from, 1, at);
    lds_barrier();
    load(fragments[0], at.shared, at, 0);
    int step = 0;
    TW_NO_UNROLL
    while (true) {
      TW_UNROLL
      for (int side = 0; side < 2; side++) {
        const uint32_t other = at.shared + (1 - side) * tile_bytes;
        held.put(other, at);
        held.fetch(from, step + 2, at);
        multiply_rows(atom, fragments[side], 0, kHalf);
        schedule_slice(kFirst, max_of(kFirst - covering, 1), {0, step_writes, step_fetches});
        __builtin_amdgcn_sched_barrier(0);
        lds_barrier();
        load(fragments[1 - side], other, at, 0);
        multiply_rows(atom, fragments[side], kHalf, kRows);
        schedule_slice(kRest, max_of(kRest - covering, 1), {slice_reads, 0, 0});
        if (++step == from.a.steps) return;
      }
    }
  }
  TW_DEVICE static void multiply_rows(Atom& atom, const Fragments& f, int first, int last) {
    TW_UNROLL
    for (int row = first; row < last; row++) atom.multiply_row(f, row / Atom::rows, row % Atom::rows);
  }

  // ---- comp_async ----

  TW_DEVICE static void copy(uint32_t tile, const Sources& from, int step, const Where& at) {
    using ToA = DirectLoader<TileA, threads>;
    using ToB = DirectLoader<TileB, threads>;
    ToA::copy(tile, ToA::buffer_of(from.a, step), from.a.ld, at.thread);
    ToB::copy(tile + place_b, ToB::buffer_of(from.b, step), from.b.ld, at.thread);
  }

  // The compiler cannot be told where such copies belong: a few of them after every row of products.
  TW_DEVICE static void multiply_and_copy(Atom& atom, const Fragments& f, uint32_t tile, const Sources& from, int step,
                                          const Where& at) {
    constexpr int kParts = Atom::rows * Atom::products;
    const auto a = DirectLoader<TileA, threads>::buffer_of(from.a, step);
    const auto b = DirectLoader<TileB, threads>::buffer_of(from.b, step);
    TW_UNROLL
    for (int part = 0; part < kParts; part++) {
      atom.multiply_row(f, part / Atom::rows, part % Atom::rows);
      DirectLoader<TileA, threads>::copy(tile, a, from.a.ld, at.thread, part, kParts);
      DirectLoader<TileB, threads>::copy(tile + place_b, b, from.b.ld, at.thread, part, kParts);
      __builtin_amdgcn_sched_barrier(0);
    }
  }

  TW_DEVICE static void run_direct(Atom& atom, const Sources& from, const Where& at) {
    static_assert(DirectLoader<TileA, threads>::stored_bytes <= LoaderA::stored_bytes &&
                      DirectLoader<TileB, threads>::stored_bytes <= LoaderB::stored_bytes,
                  "a tile has room for what lanes write");
    Fragments fragments[2];
    uint32_t tile = at.shared, other = at.shared + tile_bytes;
    copy(tile, from, 0, at);
    wait_direct();
    lds_barrier();
    copy(other, from, 1, at);
    if constexpr (ahead) load(fragments[0], tile, at, 0);
    TW_NO_UNROLL
    for (int step = 0; step < from.a.steps; step++) {
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) {
        if (!ahead) load(fragments[kk % 2], tile, at, kk);
        if (kk + 1 < slices) {
          if constexpr (ahead) load(fragments[(kk + 1) % 2], tile, at, kk + 1);
          atom.multiply(fragments[kk % 2]);
          if constexpr (ahead) schedule_before_barrier(kk, 0, 0, slice_reads);
        } else {
          wait_direct();
          lds_barrier();  // the other tile is complete; this one has been read
          if constexpr (ahead) load(fragments[slices % 2], other, at, 0);
          multiply_and_copy(atom, fragments[kk % 2], tile, from, step + 2, at);
        }
      }
      if (ahead && slices % 2 != 0) fragments[0] = fragments[1];
      const uint32_t swap = tile;
      tile = other;
      other = swap;
    }
    wait_direct();  // what was copied beyond the end
  }

  // ---- preshufflev2 ----

  using Packed = PackedFragments<Atom, Config::warp_tile_n>;

  TW_DEVICE static void load_a(Fragments& f, uint32_t tile, const Where& at, int kk) {
    Atom::load_a(f, tile, at.m0, at.lane, kk);
  }
  TW_DEVICE static void take_b(Fragments& f, const Packed& b) {
    TW_UNROLL
    for (int j = 0; j < Atom::columns; j++) f.b[j] = b.get(j);
  }

  template <class B>
  TW_DEVICE static void run_packed(Atom& atom, const Source<TileA>& a, const B& b, const Where& at) {
    constexpr bool laid_down = ordered && Config::scheduler == Scheduler::intrawave;
    constexpr int kReads = Atom::rows * Atom::SideA::parts, kFetches = LoaderA::loads + Packed::loads * (slices - 1);
    constexpr int kMoves = laid_down ? move_parts : 1;
    const int panel = at.n0 / Config::warp_tile_n;
    Fragments fragments[2];
    Packed packed_b[slices];
    typename LoaderA::Held held;
    LoaderA::fetch(held, a, 0, at.thread);
    LoaderA::put(held, at.shared, at.thread);
    TW_UNROLL
    for (int part = 0; part < kMoves; part++) {
      LoaderA::fetch(held, a, 1, at.thread, part, kMoves);
      __builtin_amdgcn_sched_barrier(0);  // in the order of the loop, which the counters of waits know
    }
    TW_UNROLL
    for (int kk = 0; kk < slices; kk++) {
      packed_b[kk].fetch(b.at(0), b.panel, panel, at.lane, kk);
      __builtin_amdgcn_sched_barrier(0);
    }
    lds_barrier();
    load_a(fragments[0], at.shared, at, 0);
    uint32_t tile = at.shared, other = at.shared + tile_bytes;
    TW_NO_UNROLL
    for (int step = 0; step < a.steps; step++) {
      const auto next = b.at(step + 1);
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) {
        if (kk + 1 < slices) load_a(fragments[(kk + 1) % 2], tile, at, kk + 1);
        if (kk < kMoves) {
          LoaderA::put(held, other, at.thread, kk, kMoves);
          LoaderA::fetch(held, a, step + 2, at.thread, kk, kMoves);
        }
        if (kk + 1 == slices) {
          lds_barrier();  // the other tile is complete; this one has been read
          load_a(fragments[slices % 2], other, at, 0);
        }
        take_b(fragments[kk % 2], packed_b[kk]);
        atom.multiply(fragments[kk % 2]);
        packed_b[kk].fetch(next, b.panel, panel, at.lane, kk);
        if (laid_down && kk + 1 < slices) schedule_before_barrier(kk, LoaderA::writes, kFetches, kReads);
      }
      if (slices % 2 != 0) fragments[0] = fragments[1];
      if constexpr (laid_down) schedule_slice(slice_products, slice_products - covering, {kReads, 0, 0});
      const uint32_t swap = tile;
      tile = other;
      other = swap;
    }
  }

  // ---- compv3 ----

  TW_DEVICE static void run_one_tile(Atom& atom, const Sources& from, const Where& at) {
    Fragments fragments[2];
    Held held;
    held.fetch(from, 0, at);
    held.put(at.shared, at);
    lds_barrier();
    if constexpr (ahead) load(fragments[0], at.shared, at, 0);
    TW_NO_UNROLL
    for (int step = 0; step < from.a.steps; step++) {
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) {
        if (kk < move_parts) held.fetch(from, step + 1, at, kk, move_parts);
        if (!ahead) load(fragments[kk % 2], at.shared, at, kk);
        if (kk + 1 < slices) {
          if constexpr (ahead) load(fragments[(kk + 1) % 2], at.shared, at, kk + 1);
        } else {
          lds_barrier();  // the tile has been read
          held.put(at.shared, at);
          lds_barrier();
          if constexpr (ahead) load(fragments[slices % 2], at.shared, at, 0);
        }
        atom.multiply(fragments[kk % 2]);
        if (ordered && !crowded && kk + 1 < slices) schedule_before_barrier(kk, 0, step_fetches, slice_reads);
      }
      if (ahead && slices % 2 != 0) fragments[0] = fragments[1];
      if constexpr (ordered) {
        constexpr int kHalf = slice_products / 2;
        for (int kk = 0; crowded && kk + 1 < slices; kk++)
          schedule_slice(slice_products, slice_products, {slice_reads, 0, share_of(step_fetches, kk, slices - 1)});
        schedule_slice(kHalf, kHalf - covering / 2, {0, step_writes, 0});
        schedule_slice(slice_products - kHalf, slice_products - kHalf - covering, {slice_reads, 0, 0});
      }
    }
  }

  // ---- mem ----

  TW_DEVICE static void run_stages(Atom& atom, const Sources& from, const Where& at) {
    Held held[held_steps];
    TW_UNROLL
    for (int s = 0; s < held_steps; s++) {
      held[s].fetch(from, s, at);
      __builtin_amdgcn_sched_barrier(0);  // in this order, which the counters of waits know
    }
    // Whole rounds of all that is held, of which the last may end with empty steps: a way out in between would make the
    // waits of the next round stricter.
    TW_NO_UNROLL
    for (int step = 0; step < from.a.steps; step += held_steps) {
      TW_UNROLL
      for (int s = 0; s < held_steps; s++) {
        held[s].put(at.shared, at);
        held[s].fetch(from, step + s + held_steps, at);
        lds_barrier();
        multiply_tile(atom, at);
        lds_barrier();
      }
    }
  }
  TW_DEVICE static void multiply_tile(Atom& atom, const Where& at) {
    constexpr bool kTurns = Config::scheduler == Scheduler::interwave && fits(slices);
    if constexpr (kTurns) {  // all of the tile, then its products ahead of what other waves have to do
      Fragments fragments[slices];
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) load(fragments[kk], at.shared, at, kk);
      __builtin_amdgcn_sched_barrier(0);
      __builtin_amdgcn_s_setprio(1);
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) atom.multiply(fragments[kk]);
      __builtin_amdgcn_s_setprio(0);
      __builtin_amdgcn_sched_barrier(0);
    } else {
      Fragments fragments[2];
      if constexpr (ahead) load(fragments[0], at.shared, at, 0);
      TW_UNROLL
      for (int kk = 0; kk < slices; kk++) {
        if (!ahead) load(fragments[kk % 2], at.shared, at, kk);
        else if (kk + 1 < slices) load(fragments[(kk + 1) % 2], at.shared, at, kk + 1);
        atom.multiply(fragments[kk % 2]);
      }
    }
  }

  // ---- images under filters of very many taps: by themselves, so that other loops have neither branches for them nor
  //      the scalars that they take ----

  template <class A, class B>
  TW_DEVICE static void run_wide(Atom& atom, const A& a, const B& b, const Where& at) {
    TW_NO_UNROLL
    for (int step = 0; step < a.steps; step++) {
      Held held;
      LoaderA::fetch(held.a, a, step, at.thread);
      LoaderB::fetch(held.b, b, step, at.thread);
      lds_barrier();  // the tile before has been multiplied
      held.put(at.shared, at);
      lds_barrier();
      TW_NO_UNROLL
      for (int kk = 0; kk < slices; kk++) {
        Fragments fragments;
        load(fragments, at.shared, at, kk);
        atom.multiply(fragments);
      }
    }
  }

  // ---- any alignment, and the rest of k ----

  TW_DEVICE static void run_slowly(Atom& atom, const OperandA& a, const OperandB& b, int begin, const Where& at) {
    TW_NO_UNROLL
    for (int step = begin; step * Config::tile_k < a.k; step++) {
      lds_barrier();  // the tile before has been multiplied
      SlowLoader<TileA, threads>::move(at.shared, a.at(step), at.thread);
      if constexpr (!packed) SlowLoader<TileB, threads>::move(at.shared + place_b, b.at(step), at.thread);
      lds_barrier();
      const int left = min_of(ceil_div(a.k - step * Config::tile_k, Atom::depth), slices);
      TW_NO_UNROLL
      for (int kk = 0; kk < left; kk++) {
        Fragments fragments;
        if constexpr (packed) {
          Packed packed_b;
          packed_b.fetch(b.at(step), b.panel, at.n0 / Config::warp_tile_n, at.lane, kk);
          load_a(fragments, at.shared, at, kk);
          take_b(fragments, packed_b);
        } else {
          load(fragments, at.shared, at, kk);
        }
        atom.multiply(fragments);
      }
    }
  }
};

}  // namespace tw::gpu
