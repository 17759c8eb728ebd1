// One step of the main loops of AMD GPUs' matrix units: its tiles and what carries them, which instructions it takes,
// and how many of a thread's registers. From these follows what a loop may hold ahead of time, and how it is ordered.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/amd/direct.hpp"
#include "tilewright/gpu/amd/loader.hpp"
#include "tilewright/gpu/gemm/mainloop.hpp"
#include "tilewright/gpu/amd/packed.hpp"

namespace tw::gpu {

template <class Config, class Operands = MatrixSources>
struct AmdStep {
  static constexpr bool direct = Config::pipeline == Pipeline::comp_async && kHasDirect && !Config::a_col &&
                                 Config::b_col && Operands::any_alignment;
  using TileA = LdsTile<typename Config::A, !Config::a_col, Config::tile_m, Config::tile_k, kLdsBanks, direct>;
  using TileB = LdsTile<typename Config::B, Config::b_col, Config::tile_n, Config::tile_k, kLdsBanks, direct>;
  static constexpr int threads = Config::wave_m * Config::wave_n * kWave;
  using Atom = typename AtomFor<Config, TileA, TileB, Config::tile_m / Config::wave_m,
                                Config::tile_n / Config::wave_n>::type;
  using SideA = typename Operands::template A<TileA, threads>;
  using SideB = typename Operands::template B<TileB, threads>;
  using LoaderA = typename SideA::Registers;
  using LoaderB = typename SideB::Registers;
  using Fragments = typename Atom::Fragments;
  static constexpr bool packed = Config::pipeline == Pipeline::preshufflev2;
  static constexpr bool two_tiles =
      Config::pipeline == Pipeline::compv4 || Config::pipeline == Pipeline::comp_async || packed;
  static constexpr int held_steps = Config::pipeline == Pipeline::mem ? max_of(Config::stages, 2) : 1;
  static constexpr int place_b = LoaderA::stored_bytes, tile_bytes = place_b + (packed ? 0 : LoaderB::stored_bytes);
  static constexpr int bytes = (two_tiles ? 2 : 1) * tile_bytes;
  static constexpr int flag_bytes = 0;  // tiles leave room for that word when they have been multiplied
  static constexpr bool suits_two = false;
  static constexpr int slices = Config::tile_k / Atom::depth;

  using OperandA = typename SideA::Place;
  using OperandB = Choose<packed, PackedOperand<typename Config::B, Config::warp_tile_n, Config::tile_k>,
                          typename SideB::Place>;

  struct Sources {
    typename SideA::Fast a;
    typename SideB::Fast b;
  };
  struct Held {
    typename LoaderA::Held a;
    typename LoaderB::Held b;
    // Part `part` of `parts`.
    TW_DEVICE void fetch(const Sources& from, int step, const Where& at, int part = 0, int parts = 1) {
      LoaderA::fetch(a, from.a, step, at.thread, part, parts);
      LoaderB::fetch(b, from.b, step, at.thread, part, parts);
    }
    TW_DEVICE void fetch_parts(const Sources& from, int step, const Where& at) {  // as the loops do
      TW_UNROLL
      for (int part = 0; part < move_parts; part++) {
        fetch(from, step, at, part, move_parts);
        if (move_parts > 1) __builtin_amdgcn_sched_barrier(0);  // the counters of waits know the order
      }
    }
    TW_DEVICE void put(uint32_t tile, const Where& at, int part = 0, int parts = 1) const {
      LoaderA::put(a, tile, at.thread, part, parts);
      LoaderB::put(b, tile + place_b, at.thread, part, parts);
    }
  };
  TW_DEVICE static void load(Fragments& f, uint32_t tile, const Where& at, int kk) {
    Atom::load(f, tile, tile + place_b, at.m0, at.n0, at.lane, kk);
  }

  // ---- what instructions a step takes, for their schedule ----

  static constexpr int slice_products = Atom::rows * Atom::columns * Atom::products;
  static constexpr int slice_reads = Atom::rows * Atom::SideA::parts + Atom::columns * Atom::SideB::parts;
  static constexpr int step_writes = LoaderA::writes + LoaderB::writes, step_fetches = LoaderA::loads + LoaderB::loads;
  // Registers of a thread, and what a main loop keeps in them: sums, fragments, what is on its way to LDS, addresses.
  static constexpr int registers = kWave == 32 ? 256 : min_of(512, 2048 / (threads / kWave));
  static constexpr int fragment_registers = sizeof(Fragments) / 4;
  static constexpr int held_registers = direct ? 0 : held_steps * sizeof(Held) / 4;
  // Bytes are transposed from one set of registers to a second one, by way of a third.
  template <class Tile, class Loader>
  static constexpr int turned_registers_of() {
    return Tile::source_k_major || Tile::element_bytes != 1 ? 0 : 2 * sizeof(typename Loader::Held) / 4;
  }
  static constexpr int turned_registers =
      turned_registers_of<TileA, LoaderA>() + (packed ? 0 : turned_registers_of<TileB, LoaderB>());
  static constexpr bool fits(int fragments) {
    return Atom::count + fragments * fragment_registers + held_registers + turned_registers + 32 <= registers;
  }
  // Fragments are read a slice ahead of their products, where registers allow.
  static constexpr bool ahead = fits(2);
  // Sums that fill half of all registers leave the compiler no room to follow an order.
  static constexpr bool ordered = ahead && Atom::count < 256;
  // Slices are ordered one by one, which is better and compiles sooner. Bytes beside many sums lack the registers.
  static constexpr bool crowded = size_of<typename Config::A> == 1 && Atom::count > 192;
  static constexpr int move_parts = ordered && !crowded ? max_of(slices - 1, 1) : 1;  // of put and fetch
  // Matrix instructions that cover the time which a read or a write of LDS takes.
  static constexpr int covering = max_of(1, min_of(4, slice_products / 4));
};

}  // namespace tw::gpu
