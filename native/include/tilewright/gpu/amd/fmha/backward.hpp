// The gradients of q, k and v on MFMA of gfx942 and gfx950, in 16 bits, of heads of 128 with rows of 16-byte multiples.
// The formulas, slices and what is summed where are those of gpu/fmha/backward/backward.hpp.
//
// Four waves, one a SIMD, have 32 keys each, with K, V and a quarter of the columns of K^T in registers, and dK and dV
// of them in accumulators. Q and dO come by 32 rows through registers, which go to LDS twice: as rows, and transposed.
// Scores have queries as rows and keys as columns, so that a lane has P and dS as operands of dV^T = dO^T P and
// dK^T = Q^T dS; only dQ^T = K^T dS^T, a sum over all keys, takes dS through LDS.
//
//   S = Q K^T, dP = dO V^T │ P │ dV^T │ dS │ dK^T ── barrier: dS is there, Q and dO have been read ──
//   dQ^T, and the next rows of Q and dO to LDS ── barrier ── (dQ goes to memory beside the next S, if in order)
//
// Blocks of which every query sees every key, and all of these exist, have a loop of their own that compares nothing.
#pragma once
#include "tilewright/gpu/amd/fmha/backward_blocks.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaBackwardDirect : FmhaBackwardBlocks<Config> {
  using Blocks = FmhaBackwardBlocks<Config>;
  using typename Blocks::X, typename Blocks::Four, typename Blocks::Sums, typename Blocks::Pair, typename Blocks::Keys;
  using typename Blocks::TileKx, typename Blocks::Place, typename Blocks::Places, typename Blocks::Arriving;
  using typename Blocks::Cursor, typename Blocks::Range;
  using Blocks::m0, Blocks::n0, Blocks::hq, Blocks::hv, Blocks::steps, Blocks::parts, Blocks::s_line;
  using Blocks::o_at, Blocks::qx_at, Blocks::ox_at;
  using Blocks::args, Blocks::item, Blocks::b, Blocks::hk, Blocks::thread, Blocks::lane, Blocks::wave, Blocks::shared;
  using Blocks::half, Blocks::place, Blocks::places, Blocks::kept, Blocks::here, Blocks::first_block, Blocks::advance;
  using Blocks::cuts, Blocks::range_of, Blocks::fetch, Blocks::line_of, Blocks::put;

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int pieces = Config::deterministic ? (int)args.splits : (int)args.k_tiles, id = block_index();
    const int piece = id % pieces, hk = id / pieces % (int)args.heads_k, b = id / pieces / (int)args.heads_k;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int room = (int)(Config::varlen ? item.k_rows : args.seq_k), thread = thread_index();
    const FmhaBackwardDirect self = {{args, item, b, hk, thread, lane_index(), thread / kWave, shared_base()}};
    if constexpr (Config::deterministic) {
      TW_NO_UNROLL
      for (int block = piece; block * n0 < room; block += pieces) self.keys(block * n0, room, piece);
    } else {
      if (piece * n0 < room) self.keys(piece * n0, room, 0);
    }
  }

  // ---- a block of keys ----

  // dQ of the block before, on its way to memory: the wave's columns, what they are added to, and where that is.
  struct Added {
    Sums dq;
    Words<4> before[4];
    const char* to;  // of the block's first row
    uint32_t from;   // bytes from there to the lane's
    int rows;
  };
  struct State {
    Four k[steps], v[steps], kx[n0 / 16];
    Sums dk[hq / 32], dv[hv / 32];
    Four q[steps];  // rows of the next block
    Added added;
  };
  TW_DEVICE void keys(int j0, int room, int slice) const {
    State state;
    TW_UNROLL
    for (int j = 0; j < hq / 32; j++) state.dk[j] = Sums(0.0f), state.dv[j] = Sums(0.0f);
    const Range range = range_of(j0);
    if (range.first < range.end) {
      hold_keys(state, j0);
      Arriving next;
      Cursor at = first_block(hk * (int)(args.heads_q / args.heads_k), range.first, slice);
      const Places own = places(at);
      TW_UNROLL
      for (int part = 0; part < steps; part++) fetch(next, at, own, part);
      next.lse = line_of(next, at.i0);
      barrier();  // Kx has been read
      TW_UNROLL
      for (int part = 0; part < parts; part++) put(next, own, part);
      step();
      blocks(state, next, at, own, range, j0);
    }
    const tw_fmha_args& again = read_again(args);
    store(state.dk, again.dk, j0, room, (float)again.scale);
    store(state.dv, again.dv, j0, room, 1.0f);
  }

  TW_DEVICE void blocks(State& state, Arriving& next, Cursor& at, const Places& own, const Range& range, int j0) const {
    int h = at.h, i0 = at.i0, wraps, more = 1;
    const char* dq = at.dq;
    TW_UNROLL
    for (int part = 0; part < 7; part++) advance(at, wraps, range, part);
    state.added.rows = 0, state.added.from = 0, state.added.to = (const char*)args.dq_acc, state.added.dq = Sums(0.0f);
    if constexpr (Config::deterministic)
      TW_UNROLL
      for (int r = 0; r < 4; r++) state.added.before[r] = {};
    barrier();
    read_rows(state, own);
    TW_NO_UNROLL
    do {
      if (cuts(range, i0)) turns<true>(state, next, at, own, range, h, i0, dq, more, j0);
      if (more & ~cuts(range, i0)) turns<false>(state, next, at, own, range, h, i0, dq, more, j0);
    } while (more);
    TW_UNROLL
    for (int i = 0; i < steps; i++) send(state.added, i);
  }
  // Blocks up to the first one of the other kind.
  template <bool kCuts>
  TW_DEVICE void turns(State& state, Arriving& next, Cursor& at, const Places& own, const Range& range, int& h, int& i0,
                       const char*& dq, int& more, int j0) const {
    int goes_on;
    TW_NO_UNROLL
    do {
      int wraps, next_h, next_i0;
      const char* next_dq;
      products<kCuts>(state, next, at, own, i0, j0, [&](int part) {
        if (part == 0) next_h = at.h, next_i0 = at.i0, next_dq = at.dq;
        if (part < 7) advance(at, wraps, range, part);
        if (part == 7) locate(state.added, dq, i0);
        if (part == 8) ask(state.added);
        if (part == 9) {
          more = (next_h ^ h) | (next_i0 ^ i0), goes_on = more & ~(cuts(range, next_i0) ^ (kCuts ? -1 : 0));
          here(more), here(goes_on);
        }
        if (part == 10) next.lse = line_of(next, next_i0);
      });
      meet();  // dS is there, and nobody reads Q and dO any more
      add_queries(state, next, own);
      meet();
      h = next_h, i0 = next_i0, dq = next_dq;
      read_rows(state, own);
    } while (goes_on);
  }
  TW_DEVICE void read_rows(State& state, const Places& own) const {
    step();
    TW_UNROLL
    for (int i = 0; i < steps; i++) state.q[i] = load_shared_vector<4>(own.rows[i]);
    step();
  }

  TW_DEVICE static void meet() {
    wait_shared();
    asm volatile("s_barrier" ::: "memory");
  }

  // K and V of the wave's keys, and K^T of its columns.
  TW_DEVICE void hold_keys(State& state, int j0) const {
    const Place k = place(args.k, hk, item.k_first, item.k_rows), v = place(args.v, hk, item.k_first, item.k_rows);
    barrier();  // nobody reads LDS any more
    Keys held;
    held.fetch(k.at(j0, n0), k.ld, thread);
    const auto keys = k.at(j0, n0), values = v.at(j0, n0);
    TW_UNROLL
    for (int kk = 0; kk < steps; kk++) {
      const uint32_t line = (uint32_t)(wave * 32 + lane % 32), byte = (uint32_t)(kk * 32 + half() * 16);
      state.k[kk] = bits_as<Four>(load_buffer<16>(keys, line * k.ld + byte));
      state.v[kk] = bits_as<Four>(load_buffer<16>(values, line * v.ld + byte));
    }
    held.put(shared, thread);
    barrier();
    TW_UNROLL
    for (int kk = 0; kk < n0 / 16; kk++)
      state.kx[kk] = MatrixSide<TileKx, 32, 2, 16>::load(shared, wave * 32, lane % 32, 0, half(), kk).part[0];
  }

  // ---- a block of queries ----

  TW_DEVICE static void multiply(Sums& to, Four x, Four y) {
#if defined(__gfx950__)
    multiply_matrix<X, X, 32>(to, x, y);
#else
    multiply_matrix<X, X, 32>(to, __builtin_shufflevector(x, x, 0, 1), __builtin_shufflevector(y, y, 0, 1));
    multiply_matrix<X, X, 32>(to, __builtin_shufflevector(x, x, 2, 3), __builtin_shufflevector(y, y, 2, 3));
#endif
  }
  // A line that instructions do not cross: a wave has its SIMD for itself, and its order is the one written here.
  TW_DEVICE static void step() { __builtin_amdgcn_sched_barrier(0); }

  // Each product is issued with what the next but one phase reads from LDS, and with a part of the scores' arithmetic,
  // such that the vector unit has as much to do beside each: P of ten scores of a lane beside dP, of the other six
  // beside dV, where the first half of dS is, the second half beside dK.
  // advance(part): what else is to be made ready, in eleven steps.
  template <bool kCuts, class Advance>
  TW_DEVICE void products(State& state, Arriving& next, const Cursor& then, const Places& own, int i0, int j0,
                          Advance advance) const {
    constexpr bool kMasks = kCuts && Config::mask != FmhaMask::no;
    constexpr int kParts = m0 / 16;
    static_assert(steps == 8 && kParts * hv / 32 == steps, "phases have as many steps");
    const int key = wave * 32 + lane % 32, place = i0 + half() * 4;
    Sums s(0.0f), dp(0.0f);
    Four x[steps], y[steps], p[kParts], ds[kParts];
    Vector<float, 4> lse[4], delta[4];
    step();
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(s, state.q[i], state.k[i]);
      y[i] = load_shared_vector<4>(own.rows[i] + o_at);
      if (i % 2 == 0) lse[i / 2] = numbers(own, 0, i / 2);
      else delta[i / 2] = numbers(own, m0, i / 2);
      fetch(next, then, own, i);
      send(state.added, i);
      step();
    }
    const float factor = (float)args.scale * kLog2E;
    FmhaSeers seers = {};
    if constexpr (kMasks) seers = FmhaGradient<Config>::seers(args, item, j0 + key);
    const auto probability = [&](int e) {
      const float raw = exp2(fma(s[e], factor, lse[e / 4][e % 4]));
      s[e] = !kMasks || seers.have(place + e / 4 * 8 + e % 4) ? raw : 0.0f;
      if (e % 2 == 1) p[e / 8][e / 2 % 4] = fmha_pack_pair<X>(Pair{s[e - 1], s[e]});
    };
    // A key that does not exist has zeros for K and V, and any P: that is not stored, but its dS takes part in dQ.
    const uint32_t exists = !kCuts || j0 + key < (int)item.k_rows ? 0xffffffffu : 0u;
    const auto changes = [&](int pair) {
      TW_UNROLL
      for (int e = pair * 2; e < pair * 2 + 2; e++) {
        const float change = s[e] * (dp[e] - delta[e / 4][e % 4]);
        // A masked one may be anything, infinite too.
        dp[e] = !kMasks || seers.have(place + e / 4 * 8 + e % 4) ? change : 0.0f;
      }
      const uint32_t both = fmha_pack_pair<X>(Pair{dp[pair * 2], dp[pair * 2 + 1]}) & (kMasks ? 0xffffffffu : exists);
      ds[pair / 4][pair % 4] = both;
      const int row = pair / 2 * 8 + pair % 2 * 2;
      TW_UNROLL
      for (int e = 0; e < 2; e++) store_shared_short(own.s_key + (row + e) * s_line, (uint16_t)(both >> (e * 16)));
    };
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(dp, y[i], state.v[i]);
      x[i] = load_shared_vector<4>(own.turned[i] + (ox_at - qx_at));
      TW_UNROLL
      for (int e = i * 5 / 4; e < (i + 1) * 5 / 4; e++) probability(e);
      if (i < 7) advance(i);
      step();
    }
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(state.dv[i % 4], x[i], p[i / 4]);
      y[i] = load_shared_vector<4>(own.turned[i]);
      TW_UNROLL
      for (int e = 10 + i * 3 / 2; e < min_of(10 + (i + 1) * 3 / 2, 16); e++) probability(e);
      if (i >= 4) changes(i - 4);
      if (i == 0) advance(7);
      step();
    }
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(state.dk[i % 4], y[i], ds[i / 4]);
      if (i < 4) changes(4 + i);
      if (i > 4) advance(3 + i);
      step();
    }
  }
  // Numbers of a lane's run of four queries.
  TW_DEVICE Vector<float, 4> numbers(const Places& own, int from, int run) const {
    return bits_as<Vector<float, 4>>(load_shared_vector<4>(own.numbers + (from + run * 8) * 4));
  }

  // Places of the block's dQ; of a row that does not exist the last one's.
  TW_DEVICE void locate(Added& added, const char* dq, int i0) const {
    here(i0);
    added.to = dq + (int64_t)((uint64_t)(uint32_t)i0 * (hq * 4)), here(added.to);
    added.rows = (int)item.q_rows - i0, here(added.rows);
    added.from = kept((uint32_t)(min_of(lane % 32, added.rows - 1) * hq + wave * 32 + half() * 4) * 4);
  }
  TW_DEVICE void ask(Added& added) const {
    if constexpr (Config::deterministic) {
      TW_UNROLL
      for (int r = 0; r < 4; r++) added.before[r] = load_global<Words<4>>(added.to + added.from + r * 32);
    }
  }
  // Step `part` of eight: dQ to memory, of rows that exist.
  TW_DEVICE void send(Added& added, int part) const {
    if constexpr (Config::deterministic) {
      const int r = part / 2;
      if (part % 2 == 1) {
        const Sums& dq = added.dq;
        const Vector<float, 4> own = {dq[r * 4], dq[r * 4 + 1], dq[r * 4 + 2], dq[r * 4 + 3]};
        Vector<float, 4> sum = bits_as<Vector<float, 4>>(added.before[r]) + own;
        asm volatile("" : "+v"(sum));  // here, not where it is stored
        added.before[r] = bits_as<Words<4>>(sum);
      }
      if (part == 7 && lane % 32 < added.rows) {
        TW_UNROLL
        for (int run = 0; run < 4; run++) store_global((char*)added.to + added.from + run * 32, added.before[run]);
      }
    } else if (part % 2 == 1 && lane % 32 < added.rows) {
      float* const to = (float*)(added.to + added.from + part / 2 * 32);
      TW_UNROLL
      for (int e = 0; e < 4; e++) add_global(to + e, added.dq[part / 2 * 4 + e]);
    }
  }
  // The wave's columns of dQ of the block's queries; meanwhile the next ones come to LDS.
  TW_DEVICE void add_queries(State& state, const Arriving& next, const Places& own) const {
    Sums dq(0.0f);
    Four x[n0 / 16];
    const auto dS = [&](int kk) { x[kk] = load_shared_vector<4>(own.s + kk * 32); };
    step();
    TW_UNROLL
    for (int kk = 0; kk < 4; kk++) dS(kk);
    step();
    TW_UNROLL
    for (int r = 0; r < 3; r++) put(next, own, r), put(next, own, 8 + r);
    step();
    TW_UNROLL
    for (int kk = 0; kk < n0 / 16; kk++) {
      multiply(dq, state.kx[kk], x[kk]);
      if (kk < 4) dS(kk + 4);
      if (kk < 5) put(next, own, 3 + kk), put(next, own, 11 + kk);
      if (kk == 5) put(next, own, 16);
      step();
    }
    state.added.dq = dq;
  }

  // A key's row lies in two lanes, in runs of four.
  template <int kBlocks>
  TW_DEVICE void store(const Sums (&sums)[kBlocks], const tw_fmha_tensor& to, int j0, int room, float factor) const {
    const int row = wave * 32 + lane % 32;
    if (j0 + row >= room) return;
    const bool exists = j0 + row < (int)item.k_rows;  // rows between a key's length and the room for it are zero
    char* const line = (char*)to.ptr + ((Config::varlen ? 0 : b * to.batch) + hk * to.head +
                                        (item.k_first + j0 + row) * to.row) * 2;
    TW_UNROLL
    for (int j = 0; j < kBlocks; j++)
      TW_UNROLL
      for (int r = 0; r < 4; r++) {
        float x[4];
        TW_UNROLL
        for (int e = 0; e < 4; e++) x[e] = exists ? sums[j][r * 4 + e] * factor : 0.0f;
        const int column = j * 32 + r * 8 + half() * 4;
        fmha_store_run<X>(line + column * to.col * 2, x, hq - column, to.col);
      }
  }
};

}  // namespace tw::gpu

#define TW_FMHA_BACKWARD_DIRECT_KERNEL(NAME, ...)                                                                  \
  TW_KERNEL(tw::gpu::FmhaBackwardDirect<__VA_ARGS__>::threads, tw::gpu::FmhaBackwardDirect<__VA_ARGS__>::min_blocks, \
            NAME, tw_fmha_args, tw::gpu::FmhaBackwardDirect<__VA_ARGS__>::run(params);)
