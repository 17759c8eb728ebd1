// The main loop of convolutions whose channels fill whole steps: that of compv4 (gpu/amd/mainloop.hpp), but for steps of
// one slice. There the barrier stands at the beginning of a step, when the next tile has been written and this one read
// by all waves: so reads of the next fragments, writes of the tile after it and loads of the one after that are dealt
// out over the whole step, and loads have a step and more to arrive in.
//
//   barrier │ products of step s │ read fragments of s + 1 │ registers -> tile s + 2 │ fetch s + 3
#pragma once
#include "tilewright/gpu/amd/conv/sources.hpp"
#include "tilewright/gpu/amd/mainloop.hpp"

namespace tw::gpu {

constexpr int kScheduleVector = 0x002, kScheduleScalar = 0x004;

template <class Config, class Operands>
struct TapLoop : AmdLoop<Config, Operands> {
  using Base = AmdLoop<Config, Operands>;
  using typename Base::Atom, typename Base::Fragments, typename Base::Held, typename Base::OperandA;
  using typename Base::OperandB, typename Base::SideA, typename Base::SideB, typename Base::Sources;
  using typename Base::LoaderA, typename Base::LoaderB;
  using Base::covering, Base::load, Base::ordered, Base::slice_products, Base::slice_reads, Base::slices;
  using Base::step_fetches, Base::step_writes, Base::tile_bytes, Base::two_tiles;

  TW_DEVICE static void run(Atom& atom, const OperandA& a, const OperandB& b, const Where& at) {
    const Sources from = {typename SideA::Fast(a), typename SideB::Fast(b)};
    if (from.a.steps <= 0) return;
    if constexpr (two_tiles && slices == 1 && ordered) run_even(atom, from, at);
    else Base::run_steps(atom, from, at);
  }

  static constexpr bool turns = !Base::TileB::source_k_major;

  struct Next {
    typename OperandA::Step a;
    typename OperandB::Step b;
    int k;
    TW_DEVICE void find(const Sources& from) { a = from.a.at(k), b = from.b.at(k); }
    TW_DEVICE void advance(const Sources& from) {
      k = min_of(k + Config::tile_k, from.a.last);
      find(from);
    }
    TW_DEVICE void settle() { a.settle(), b.settle(); }
  };

  TW_DEVICE static void run_even(Atom& atom, const Sources& from, const Where& at) {
    Fragments fragments[2];
    Held held;
    held.fetch(from, 0, at);
    held.put(at.shared, at);
    held.fetch(from, 1, at);
    lds_barrier();
    load(fragments[0], at.shared, at, 0);
    held.put(at.shared + tile_bytes, at);
    held.fetch(from, 2, at);
    Next next;
    next.k = from.a.k(3);
    next.find(from);
    int step = 0;
    TW_NO_UNROLL
    for (; step + 1 < from.a.steps; step += 2) {  // two steps a round, so that fragments keep their place
      run_step<0>(atom, fragments, held, from, next, at);
      run_step<1>(atom, fragments, held, from, next, at);
    }
    if (step < from.a.steps) run_step<0>(atom, fragments, held, from, next, at);
  }

  template <int kSide>
  TW_DEVICE static void run_step(Atom& atom, Fragments (&fragments)[2], Held& held, const Sources& from, Next& next,
                                 const Where& at) {
    constexpr int kRows = Atom::rows * Atom::products;
    const Next own = next;
    lds_barrier();
    // First of all products: compilers like to find the next step's place before them.
    Base::multiply_rows(atom, fragments[kSide], 0, 1);
    __builtin_amdgcn_sched_barrier(0);
    load(fragments[1 - kSide], at.shared + (1 - kSide) * tile_bytes, at, 0);
    if constexpr (turns) {
      // Operands that are turned in registers wait for their loads, which have half a step more here.
      constexpr int kHalf = (kRows + 1) / 2, kFirst = (kHalf - 1) * Atom::columns;
      next.advance(from);
      Base::multiply_rows(atom, fragments[kSide], 1, kHalf);
      schedule_step<kFirst, kFirst>({slice_reads, 0, 0});
      next.settle();
      __builtin_amdgcn_sched_barrier(0);
      move(held, at.shared + kSide * tile_bytes, from, own, at);
      constexpr int kRest = (kRows - kHalf) * Atom::columns;
      Base::multiply_rows(atom, fragments[kSide], kHalf, kRows);
      schedule_step<kRest, kRest - covering / 2>({0, step_writes, step_fetches});
    } else {
      constexpr int kRest = (kRows - 1) * Atom::columns;
      move(held, at.shared + kSide * tile_bytes, from, own, at);
      Base::multiply_rows(atom, fragments[kSide], 1, kRows);
      next.advance(from);
      schedule_step<kRest, kRest - covering>({slice_reads, step_writes, step_fetches});
      next.settle();
    }
    __builtin_amdgcn_sched_barrier(0);
  }

  // Registers to `tile`, and what `next` says to registers.
  TW_DEVICE static void move(Held& held, uint32_t tile, const Sources& from, const Next& next, const Where& at) {
    held.put(tile, at);
    LoaderA::fetch(held.a, from.a, next.a, at.thread);
    LoaderB::fetch(held.b, from.b, next.b, at.thread);
  }

  // As schedule_slice, and with the first products what finds the place of the next step: three instructions between two
  // products, which is what the issue of one leaves room for.
  template <int kProducts, int kAmong>
  TW_DEVICE static void schedule_step(const Events& events) {
    constexpr int kBetween = 3, kPlaces = 10 + 2 * LoaderA::per_thread;
    const int total = events.count();
    int writes = 0, fetches = 0, places = 0;
    TW_UNROLL
    for (int p = 0; p < kProducts; p++) {
      schedule<kScheduleMatrix>(1);
      const int first = p < kAmong ? p * total / kAmong : total, last = p < kAmong ? (p + 1) * total / kAmong : total;
      TW_UNROLL
      for (int e = first; e < last; e++) {
        if (e < events.reads) schedule<kScheduleRead>(1);
        else if (writes <= fetches && writes < events.writes) schedule<kScheduleWrite>(1), writes++;
        else schedule<kScheduleFetch>(1), fetches++;
      }
      TW_UNROLL
      for (int i = last - first; i < kBetween; i++)
        if (places++ < kPlaces) schedule<kScheduleScalar | kScheduleVector>(1);
    }
  }
};

template <class Config, class Of>
struct LoopFor<Config, TapSources<Of>, false> {
  using type = TapLoop<Config, TapSources<Of>>;
};

}  // namespace tw::gpu
