// The main loop of products whose instructions take exponents of blocks of 32 (gfx950), for tiles that go straight from
// global memory to LDS (comp_async).
//
// Exponents come in rounds of 16 blocks, 512 of k: a thread fetches the 16 bytes of a line or two, sorts them by the
// lanes that need them, and puts them into LDS. A lane reads a round's exponents of each of its lines at once, one or
// two words, of which instructions select a byte (op_sel). So a round costs a fetch of 16 bytes a thread and a read a
// line, whatever strides they have in memory.
//
// Order: a row of products at a time, all columns of it. Meanwhile the fragment of the row after the next is read, a
// share of the next slice's columns, and a share of the tile after the next is asked for. The barrier stands ahead of the
// last two rows of a step, when all of the tile is in registers: the next tile's first fragments are read during these.
// Copies have from there to the next barrier, a whole step.
#pragma once
#include "tilewright/gpu/amd/mainloop.hpp"
#include "tilewright/gpu/gemm/exponents.hpp"

namespace tw::gpu {

// True if the loop below suits: four steps to a round or two, and two or more rows of products a slice.
template <class Loop, bool kTaken = kTakesExponents<typename Loop::Atom>>
constexpr bool kLoopsOverExponents = false;
template <class Loop>
constexpr bool kLoopsOverExponents<Loop, true> =
    Loop::direct && Loop::Atom::rows > 1 &&
    (Loop::slices * Loop::Atom::groups == 4 || Loop::slices * Loop::Atom::groups == 8);

// Loop: the step and its loaders (AmdLoop), whose atom is an ExponentAtom.
template <class Loop, bool kSuits = kLoopsOverExponents<Loop>>
struct ExponentLoop {
  static constexpr int bytes = Loop::bytes;
  // k: where the operands begin.
  template <class Atom, class A, class B>
  TW_DEVICE static void run(Atom& atom, const tw_gemm_problem& problem, int64_t item, int i0, int j0, int k,
                            const A& a, const B& b, const Where& at) {
    atom.begin(problem, item, i0 + at.m0, j0 + at.n0, k, at.lane);
    Loop::run(atom, a, b, at);
  }
};

#if defined(__gfx950__)
// A round's exponents of the lines of one tile: who fetches them, and where they lie in LDS.
// kWide: blocks are neighbours, and rounds begin at multiples of 4 bytes.
template <int kTileM, int kTileN, int kThreads, int kGroups, bool kWide>
struct RoundOfExponents {
  static constexpr int blocks = 16, lines = kTileM + kTileN, per_thread = ceil_div(lines, kThreads);
  static constexpr int bytes = per_thread * kThreads * blocks;
  static constexpr int lane_bytes = blocks / kGroups, words = lane_bytes / 4;  // of a line
  static_assert(kGroups == 2 || kGroups == 4, "a lane has every second or fourth block");

  const uint8_t* line[per_thread];  // the next round's first block
  int64_t step[per_thread];         // from block to block
  uint32_t held[per_thread][kWide ? 4 : blocks];

  // k: where the rounds begin, a multiple of 128. i0, j0: the tile in C.
  TW_DEVICE RoundOfExponents(const tw_gemm_problem& problem, int64_t item, int i0, int j0, int k, int thread) {
    const tw_gemm_operand &a = problem.scale_a, &b = problem.scale_b;
    const uint8_t* const from_a = (const uint8_t*)a.ptr + item * a.batch_stride + k / 32 * a.col_stride;
    const uint8_t* const from_b = (const uint8_t*)b.ptr + item * b.batch_stride + k / 32 * b.col_stride;
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const int id = min_of(thread + j * kThreads, lines - 1);
      const bool of_b = id >= kTileM;
      const int row = of_b ? min_of(j0 + id - kTileM, (int)problem.n - 1) : min_of(i0 + id, (int)problem.m - 1);
      line[j] = (of_b ? from_b : from_a) + row * (of_b ? b.row_stride : a.row_stride);
      step[j] = of_b ? b.col_stride : a.col_stride;
    }
  }
  TW_DEVICE static bool suits(const tw_gemm_problem& problem, int64_t item) {
    const tw_gemm_operand &a = problem.scale_a, &b = problem.scale_b;
    const int64_t begins = ((int64_t)a.ptr + item * a.batch_stride) | ((int64_t)b.ptr + item * b.batch_stride);
    return a.col_stride == 1 && b.col_stride == 1 && ((begins | a.row_stride | b.row_stride) & 3) == 0;
  }

  // Part `part` of `parts` of the next round's fetches; with the last one on to the round after it, if that exists.
  TW_DEVICE void fetch(bool another, int part = 0, int parts = 1) {
    typedef uint32_t Word4 __attribute__((ext_vector_type(4), aligned(4)));
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      if constexpr (kWide) {
        if (part + 1 < parts) continue;
        const Word4 x = *(const TW_GLOBAL Word4*)line[j];
        TW_UNROLL
        for (int w = 0; w < 4; w++) held[j][w] = x[w];
        line[j] += another ? blocks : 0;
      } else {
        TW_UNROLL
        for (int e = blocks * part / parts; e < blocks * (part + 1) / parts; e++) {
          held[j][e] = load_constant<uint8_t>(line[j]);
          line[j] += e + 1 < blocks || another ? step[j] : (1 - blocks) * step[j];
        }
      }
    }
  }
  TW_DEVICE uint32_t word(int j, int w) const {
    if constexpr (kWide) return held[j][w];
    else
      return held[j][w * 4] | held[j][w * 4 + 1] << 8 | held[j][w * 4 + 2] << 16 | held[j][w * 4 + 3] << 24;
  }
  // Group by group of lanes: blocks g, g + groups, ...
  TW_DEVICE void put(uint32_t to, int thread) const {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const Words<4> x = {{word(j, 0), word(j, 1), word(j, 2), word(j, 3)}};
      Words<4> y;
      if constexpr (kGroups == 4) {
        using Sorted = Transposition<1, 4, 4>;
        const typename Sorted::Input rows = {{{x.w[0]}}, {{x.w[1]}}, {{x.w[2]}}, {{x.w[3]}}};
        TW_UNROLL
        for (int g = 0; g < 4; g++) y.w[g] = Sorted::line(rows, g).w[0];
      } else {
        TW_UNROLL
        for (int g = 0; g < 2; g++)
          TW_UNROLL
          for (int half = 0; half < 2; half++)
            y.w[g * 2 + half] =
                __builtin_amdgcn_perm(x.w[half * 2 + 1], x.w[half * 2], g == 0 ? 0x06040200 : 0x07050301);
      }
      store_shared(to + (uint32_t)(thread + j * kThreads) * blocks, y);
    }
  }
};

template <class Loop>
struct ExponentLoop<Loop, true> : Loop {
  using typename Loop::Atom, typename Loop::TileA, typename Loop::TileB, typename Loop::Sources;
  using typename Loop::OperandA, typename Loop::OperandB;
  using Loop::threads, Loop::slices;
  using SideA = typename Atom::SideA;
  using SideB = typename Atom::SideB;
  using FragmentA = typename SideA::Fragment;
  using FragmentB = typename SideB::Fragment;
  static constexpr int rows = Atom::rows, columns = Atom::columns;
  static constexpr int groups = Atom::groups, lines = Atom::lines, blocks = slices * groups;  // of a step
  template <bool kWide>
  using RoundOf = RoundOfExponents<TileA::extent, TileB::extent, threads, groups, kWide>;
  using Round = RoundOf<true>;
  static constexpr int steps = Round::blocks / blocks;  // of a round
  static constexpr int total = slices * rows;           // rows of products of a step
  static constexpr int copy_rows = max_of(total / 2, 2), fetch_rows = max_of(total - 2, 1);
  // Two waves on a SIMD have no registers for two rounds' exponents, and each multiplies while the other reads its own.
  static constexpr bool late = threads > 4 * kWave;
  static constexpr int place = 2 * Loop::tile_bytes;  // of exponents in LDS
  static constexpr int bytes = place + 2 * Round::bytes;

  struct Factors {
    Vector<uint32_t, Round::words> a[rows], b[columns];
  };

  TW_DEVICE static void read_factors(Factors& f, uint32_t from, const Where& at) {
    const uint32_t group = (uint32_t)Atom::layout().group(at.lane) * Round::lane_bytes;
    const uint32_t a = from + (uint32_t)(at.m0 + Atom::layout().column(at.lane)) * Round::blocks + group;
    const uint32_t b =
        from + (uint32_t)(TileA::extent + at.n0 + Atom::layout().line_of(Atom::layout().row(at.lane))) * Round::blocks +
        group;
    TW_UNROLL
    for (int i = 0; i < rows; i++) f.a[i] = load_shared_vector<Round::words>(a + i * lines * Round::blocks);
    TW_UNROLL
    for (int j = 0; j < columns; j++) f.b[j] = load_shared_vector<Round::words>(b + j * lines * Round::blocks);
  }
  // Row `q` of a step.
  TW_DEVICE static FragmentA read_a(uint32_t tile, int q, const Where& at) {
    return SideA::load(tile, at.m0, Atom::layout().column(at.lane), q % rows * lines, Atom::layout().group(at.lane),
                       q / rows);
  }
  TW_DEVICE static FragmentB read_b(uint32_t tile, int kk, int j, const Where& at) {
    return SideB::load(tile + Loop::place_b, at.n0, Atom::layout().line_of(Atom::layout().row(at.lane)), j * lines,
                       Atom::layout().group(at.lane), kk);
  }
  // Part `part` of the copies of a step's tile.
  TW_DEVICE static void copy(uint32_t tile, const Sources& from, int step, const Where& at, int part, int parts) {
    using ToA = DirectLoader<TileA, threads>;
    using ToB = DirectLoader<TileB, threads>;
    ToA::copy(tile, ToA::buffer_of(from.a, step), from.a.ld, at.thread, part, parts);
    ToB::copy(tile + Loop::place_b, ToB::buffer_of(from.b, step), from.b.ld, at.thread, part, parts);
  }

  template <bool kWide>
  TW_DEVICE static void run_rounds(Atom& atom, const Sources& from, RoundOf<kWide> round, int rounds,
                                   const Where& at) {
    FragmentA a[4];
    FragmentB b[2][columns];
    Factors factors;
    round.fetch(rounds > 1);
    copy(at.shared, from, 0, at, 0, 1);
    wait_direct();
    round.put(at.shared + place, at.thread);
    lds_barrier();
    copy(at.shared + Loop::tile_bytes, from, 1, at, 0, copy_rows);
    copy(at.shared + Loop::tile_bytes, from, 1, at, 1, copy_rows);
    read_factors(factors, at.shared + place, at);
    TW_UNROLL
    for (int j = 0; j < columns; j++) b[0][j] = read_b(at.shared, 0, j, at);
    TW_UNROLL
    for (int q = 0; q < 2; q++) a[q] = read_a(at.shared, q, at);
    uint32_t next_exponents = at.shared + place + Round::bytes, exponents = at.shared + place;
    TW_NO_UNROLL
    for (int number = 0; number < rounds; number++) {
      Factors next;
      TW_UNROLL
      for (int s = 0; s < steps; s++) {
        const uint32_t tile = at.shared + s % 2 * Loop::tile_bytes, other = at.shared + (1 - s % 2) * Loop::tile_bytes;
        TW_UNROLL
        for (int q = 0; q < total; q++) {
          const int kk = q / rows, i = q % rows, now = s * total + q, beyond = q - (total - 2);
          if (beyond == 0) {
            wait_direct();
            if (s == steps - 2) round.put(next_exponents, at.thread);
            lds_barrier();  // the other tile is complete; this one has been read
            if (!late && s == steps - 1) read_factors(next, next_exponents, at);
          }
          a[(now + 2) % 4] = beyond < 0 ? read_a(tile, q + 2, at) : read_a(other, beyond, at);
          TW_UNROLL
          for (int j = 0; j < columns; j++) {
            const int slice = s * slices + kk + 1;
            if (kk + 1 < slices ? j * rows / columns == i : beyond >= 0 && j * 2 / columns == beyond)
              b[slice % 2][j] = kk + 1 < slices ? read_b(tile, kk + 1, j, at) : read_b(other, 0, j, at);
          }
          if (s == 0 && q < fetch_rows) round.fetch(number + 2 < rounds, q, fetch_rows);
          __builtin_amdgcn_sched_barrier(0);
          const int part = (q + 2) % total;
          TW_UNROLL
          for (int j = 0; j < columns; j++) {
            const int turn = s * slices + kk;
            atom.multiply_one(i, j, a[now % 4], b[turn % 2][j], factors.a[i][turn / 4], factors.b[j][turn / 4],
                              turn % 4);
            if (j == 0 && part < copy_rows) {
              __builtin_amdgcn_sched_barrier(0);
              copy(beyond >= 0 ? tile : other, from, number * steps + s + (beyond >= 0 ? 2 : 1), at, part, copy_rows);
            }
          }
          __builtin_amdgcn_sched_barrier(0);
        }
      }
      if constexpr (late) read_factors(factors, next_exponents, at);
      else factors = next;
      const uint32_t swap = exponents;
      exponents = next_exponents;
      next_exponents = swap;
    }
    wait_direct();  // what was copied beyond the end
  }

  TW_DEVICE static void run(Atom& atom, const tw_gemm_problem& problem, int64_t item, int i0, int j0, int k,
                            const OperandA& a, const OperandB& b, const Where& at) {
    int done = 0;
    if (Source<TileA>::suits(a) && Source<TileB>::suits(b)) {
      const Sources from = {Source<TileA>(a), Source<TileB>(b)};
      const int rounds = from.a.steps / steps;
      done = rounds * steps;
      if (rounds > 0) {
        if (__builtin_expect(Round::suits(problem, item), 1))
          run_rounds<true>(atom, from, Round(problem, item, i0, j0, k, at.thread), rounds, at);
        else run_rounds<false>(atom, from, RoundOf<false>(problem, item, i0, j0, k, at.thread), rounds, at);
      }
    }
    if (done * TileA::depth >= a.k) return;
    atom.begin(problem, item, i0 + at.m0, j0 + at.n0, k + done * blocks * 32, at.lane);
    Loop::run_slowly(atom, a, b, done, at);
  }
};

#endif

}  // namespace tw::gpu
