// The gradients of q, k and v on MFMA of gfx942 and gfx950, in 16 bits, of heads of 128 with rows of 16-byte multiples.
// The formulas, slices and what is summed where are those of gpu/fmha/backward/backward.hpp.
//
// Four waves, one a SIMD, have 32 keys each, with K, V and a quarter of the columns of K^T in registers, and dK and dV
// of them in accumulators. Q and dO come by 32 rows through registers, which go to LDS twice: as rows, and transposed.
// Scores have queries as rows and keys as columns, so that a lane has P and dS as operands of dV^T = dO^T P and
// dK^T = Q^T dS; only dQ^T = K^T dS^T, a sum over all keys, takes dS through LDS.
//
//   S = Q K^T, dP = dO V^T │ P │ dV^T │ dS │ dK^T ── barrier: dS is there, Q and dO have been read ──
//   dQ^T, and the next rows of Q and dO to LDS ── barrier ──
#pragma once
#include "tilewright/gpu/amd/fmha/turned.hpp"
#include "tilewright/gpu/fmha/backward/gradient.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaBackwardDirect {
  using X = typename Config::Q;
  static constexpr int waves = 4, threads = waves * kWave, min_blocks = 1, m0 = Config::m0, n0 = Config::n0;
  static constexpr int hq = Config::hdim_q, hv = Config::hdim_v, steps = hq / 16;
  static_assert(size_of<X> == 2 && m0 == 32 && n0 == 128 && hq == 128 && hv == 128 && Config::wave_n0 == waves,
                "a wave has 32 keys, and 32 columns of dQ");
  using TileQ = LdsTile<X, true, m0, hq>;   // also that of dO
  using TileQx = LdsTile<X, false, hq, m0>;
  using TileS = LdsTile<X, true, m0, n0>;   // dS, keys in the order of Kx
  using TileKx = LdsTile<X, false, hq, n0>;
  using Rows = MatrixSide<TileQ, 32, 2, 16>;
  using Turned = MatrixSide<TileQx, 32, 2, 16>;
  using Queries = FmhaTurnedValues<TileQx, threads>;
  using Keys = FmhaTurnedValues<TileKx, threads>;
  static_assert(Queries::per_thread == 1, "a block of 4 x 4 for every thread");
  using Four = Vector<uint32_t, 4>;
  using Sums = Vector<float, 16>;
  using Pair = Vector<float, 2>;

  static constexpr int o_at = TileQ::bytes, qx_at = o_at + TileQ::bytes, ox_at = qx_at + TileQx::bytes;
  static constexpr int s_at = ox_at + TileQx::bytes, lines_at = s_at + TileS::bytes;
  static constexpr int shared_bytes = max_of(lines_at + 2 * m0 * 4, TileKx::bytes);

  const tw_fmha_args& args;
  const FmhaItem& item;
  const int b, hk, thread, lane, wave;
  const uint32_t shared;

  TW_DEVICE int half() const { return lane / 32; }

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int pieces = Config::deterministic ? (int)args.splits : (int)args.k_tiles, id = block_index();
    const int piece = id % pieces, hk = id / pieces % (int)args.heads_k, b = id / pieces / (int)args.heads_k;
    const FmhaItem item = fmha_item<Config>(args, b);
    const int room = (int)(Config::varlen ? item.k_rows : args.seq_k), thread = thread_index();
    const FmhaBackwardDirect self = {args, item, b, hk, thread, lane_index(), thread / kWave, shared_base()};
    if constexpr (Config::deterministic) {
      TW_NO_UNROLL
      for (int block = piece; block * n0 < room; block += pieces) self.keys(block * n0, room, piece);
    } else {
      if (piece * n0 < room) self.keys(piece * n0, room, 0);
    }
  }

  // ---- rows of memory, as buffers that end with them ----

  struct Place {
    const char* base;  // of row 0 of a head
    uint32_t ld;
    int count;
    TW_DEVICE __amdgpu_buffer_rsrc_t at(int row, int rows) const {
      const int left = min_of(count - row, rows);
      const uint32_t records = uniform(left > 0 ? (uint32_t)(left - 1) * ld + hq * 2 : 0);
      return __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base + (int64_t)row * ld), 0, (int)records, kBufferFlags);
    }
  };
  TW_DEVICE Place place(const tw_fmha_tensor& tensor, int h, int64_t first, int64_t count) const {
    const int64_t at = (Config::varlen ? 0 : b * tensor.batch) + h * tensor.head + first * tensor.row;
    return {uniform((const char*)tensor.ptr + at * 2), uniform((uint32_t)tensor.row * 2), (int)count};
  }

  // ---- a block of keys ----

  struct State {
    Four k[steps], v[steps], kx[n0 / 16];
    Sums dk[hq / 32], dv[hv / 32];
  };
  // A block of queries on its way.
  struct Arriving {
    Queries q, o;
    uint32_t lse, delta;  // as they are in memory; zeros beyond the rows
  };
  // The next block of queries: i0 and those of its head, in buffers that end with its rows.
  struct Cursor {
    const char *q, *o, *lse, *delta;
    uint32_t q_ld, o_ld, lse_ld;  // bytes from row to row
    int h, i0;
  };
  TW_DEVICE Cursor first_block(int h, int i0) const {
    const int64_t row = item.q_first, lse = (Config::varlen ? 0 : b * args.lse.batch) + h * args.lse.head;
    return {place(args.q, h, row, 0).base,
            place(args.d_o, h, row, 0).base,
            uniform((const char*)args.lse.ptr + (lse + row * args.lse.row) * 4),
            uniform((const char*)(args.delta + fmha_line_of<Config>(args, item, b, h, 0))),
            uniform((uint32_t)args.q.row * 2),
            uniform((uint32_t)args.d_o.row * 2),
            uniform((uint32_t)args.lse.row * 4),
            (int)uniform((uint32_t)h),
            (int)uniform((uint32_t)i0)};
  }
  // Is made where it stands, not where it is used.
  TW_DEVICE static void here(int& x) {
    x = (int)uniform((uint32_t)x);
    asm volatile("" : "+s"(x));
  }
  TW_DEVICE static void here(const char*& x) {
    x = uniform(x);
    asm volatile("" : "+s"(x));
  }
  // Step `part` of five from one block to the next; the last one is asked for again.
  TW_DEVICE void advance(Cursor& at, bool& wraps, int first, int end, int last_h, int part) const {
    if (part == 0) {
      wraps = at.i0 + m0 >= end;
      const bool more = !wraps | (at.h + 1 < last_h);
      at.i0 = more ? wraps ? first : at.i0 + m0 : at.i0;
      wraps = wraps & more;
      at.h = wraps ? at.h + 1 : at.h;
      here(at.i0), here(at.h);
    }
    if (part == 1) at.q += wraps ? args.q.head * 2 : 0, here(at.q);
    if (part == 2) at.o += wraps ? args.d_o.head * 2 : 0, here(at.o);
    if (part == 3) at.lse += wraps ? args.lse.head * 4 : 0, here(at.lse);
    if (part == 4) at.delta += wraps ? (Config::varlen ? args.total_q : args.seq_q) * 4 : 0, here(at.delta);
  }

  TW_DEVICE void keys(int j0, int room, int slice) const {
    const int group = (int)(args.heads_q / args.heads_k), last_h = hk * group + group;
    const int count = max_of(min_of((int)item.k_rows - j0, n0), 0);
    State state;
    TW_UNROLL
    for (int j = 0; j < hq / 32; j++) state.dk[j] = Sums(0.0f), state.dv[j] = Sums(0.0f);
    int first = 0, end = 0;  // of the queries that see any of the keys, whole blocks
    if (count > 0) {
      first = (int)fmha_min(FmhaGradient<Config>::first_seer(args, item, j0), item.q_rows) / m0 * m0;
      end = (int)FmhaGradient<Config>::last_seer(args, item, j0 + count - 1) + 1;
    }
    if (first < end) {
      hold_keys(state, j0);
      Arriving next;
      Cursor at = first_block(hk * group, first);
      TW_UNROLL
      for (int part = 0; part < steps; part++) fetch(next, at, part);
      barrier();  // Kx has been read
      TW_UNROLL
      for (int part = 0; part < parts; part++) put(next, at.i0, part);
      step();
      blocks(state, next, at, (int)uniform((uint32_t)first), (int)uniform((uint32_t)end),
             (int)uniform((uint32_t)last_h), j0, slice);
    }
    const tw_fmha_args& again = read_again(args);
    store(state.dk, again.dk, j0, room, (float)again.scale);
    store(state.dv, again.dv, j0, room, 1.0f);
  }

  TW_DEVICE void blocks(State& state, Arriving& next, Cursor& at, int first, int end, int last_h, int j0,
                        int slice) const {
    int h = at.h, i0 = at.i0;
    bool last, wraps;
    TW_UNROLL
    for (int part = 0; part < 5; part++) advance(at, wraps, first, end, last_h, part);
    barrier();
    TW_NO_UNROLL
    do {
      Cursor after = at;
      float* to = nullptr;
      products(state, next, at, i0, j0, [&](int part) {
        if (part < 5) advance(after, wraps, first, end, last_h, part);
        if (part == 5) to = sums_of(h, i0, slice);
      });
      meet();  // dS is there, and nobody reads Q and dO any more
      add_queries(state, next, i0, at.i0, to);
      meet();
      last = (at.h == h) & (at.i0 == i0);
      h = at.h, i0 = at.i0, at = after;
    } while (!last);
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

  static constexpr int parts = 17;  // of what comes to LDS: four lines of each tile, and numbers of rows

  template <int kWidth>
  TW_DEVICE __amdgpu_buffer_rsrc_t rows_at(const char* base, uint32_t ld) const {
    const uint32_t records = item.q_rows > 0 ? (uint32_t)(item.q_rows - 1) * ld + kWidth : 0;
    return __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)uniform(records), kBufferFlags);
  }
  TW_DEVICE void fetch(Arriving& to, const Cursor& at, int part) const {
    const uint32_t row = (uint32_t)(at.i0 + thread % m0);
    if (part == 0) to.q.fetch(rows_at<hq * 2>(at.q, at.q_ld), at.q_ld, thread, (uint32_t)at.i0 * at.q_ld);
    if (part == 2) to.o.fetch(rows_at<hv * 2>(at.o, at.o_ld), at.o_ld, thread, (uint32_t)at.i0 * at.o_ld);
    if (part == 4) to.lse = load_buffer<4>(rows_at<4>(at.lse, at.lse_ld), row * at.lse_ld).w[0];
    if (part == 6) to.delta = load_buffer<4>(rows_at<4>(at.delta, 4), row * 4).w[0];
  }
  TW_DEVICE void put(const Arriving& from, int i0, int part) const {
    if (part < 16) {
      const Queries& x = part / 4 % 2 == 0 ? from.q : from.o;
      const uint32_t rows = shared + (part / 4 % 2) * o_at, turned = shared + qx_at + (part / 4 % 2) * (ox_at - qx_at);
      if (part < 8) return x.put_line(turned, thread, 0, part % 4);
      const int line = Queries::key_of(thread, 0) + part % 4, byte = Queries::element_of(thread, 0) * 2;
      return store_shared(rows + TileQ::offset(line, byte / 16) + byte % 16, x.data[0][part % 4]);
    }
    if (thread < m0) {
      // A row that saw nothing has no probabilities, nor has one that does not exist.
      const float lse = float_of(from.lse);
      const bool seen = (i0 + thread < (int)item.q_rows) & (lse != minus_infinity());
      const uint32_t to = shared + lines_at + thread * 4;
      store_shared(to, Words<1>{bits_of(seen ? lse * -kLog2E : minus_infinity())});
      store_shared(to + m0 * 4, Words<1>{from.delta});
    }
  }

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

  // Each product is issued with what the next but one phase reads from LDS, and with a part of the scores' arithmetic.
  // advance(part): what else is to be made ready, in eight steps.
  template <class Advance>
  TW_DEVICE void products(State& state, Arriving& next, const Cursor& then, int i0, int j0, Advance advance) const {
    constexpr bool kMasks = Config::mask != FmhaMask::no;
    constexpr int kParts = m0 / 16;
    static_assert(steps == 8 && kParts * hv / 32 == steps, "phases have as many steps");
    const int line = lane % 32, key = wave * 32 + line, place = i0 + half() * 4;
    const auto rows_of = [&](int from, int kk) { return Rows::load(shared + from, 0, line, 0, half(), kk).part[0]; };
    const auto turned_of = [&](int from, int i) {
      return Turned::load(shared + from, 0, line, i % 4 * 32, half(), i / 4).part[0];
    };
    Sums s(0.0f), dp(0.0f);
    Four x[steps], y[steps], p[kParts], ds[kParts];
    Vector<float, 4> lse[4], delta[4];
    step();
    TW_UNROLL
    for (int i = 0; i < steps; i++) x[i] = rows_of(0, i);
    step();
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(s, x[i], state.k[i]);
      y[i] = rows_of(o_at, i);
      if (i % 2 == 0) lse[i / 2] = numbers(0, i / 2);
      else delta[i / 2] = numbers(m0, i / 2);
      fetch(next, then, i);
      step();
    }
    const float factor = (float)args.scale * kLog2E;
    FmhaSeers seers = {};
    if constexpr (kMasks) seers = FmhaGradient<Config>::seers(args, item, j0 + key);
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(dp, y[i], state.v[i]);
      x[i] = turned_of(ox_at, i);
      TW_UNROLL
      for (int e = i * 2; e < i * 2 + 2; e++) {
        const float raw = exp2(fma(s[e], factor, lse[e / 4][e % 4]));
        s[e] = !kMasks || seers.have(place + e / 4 * 8 + e % 4) ? raw : 0.0f;
      }
      p[i / 4][i % 4] = fmha_pack_pair<X>(Pair{s[i * 2], s[i * 2 + 1]});
      step();
    }
    // A key that does not exist has zeros for K and V, and any P: that is not stored, but its dS takes part in dQ.
    const uint32_t exists = j0 + key < (int)item.k_rows ? 0xffffffffu : 0u;
    const int byte = Keys::key_run(key / 4 * 4) + key % 4 * 2;
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(state.dv[i % 4], x[i], p[i / 4]);
      y[i] = turned_of(qx_at, i);
      TW_UNROLL
      for (int e = i * 2; e < i * 2 + 2; e++) {
        const float own = s[e] * (dp[e] - delta[e / 4][e % 4]);
        // A masked one may be anything, infinite too.
        dp[e] = !kMasks || seers.have(place + e / 4 * 8 + e % 4) ? own : 0.0f;
      }
      uint32_t both = fmha_pack_pair<X>(Pair{dp[i * 2], dp[i * 2 + 1]});
      if constexpr (!kMasks) both &= exists;
      ds[i / 4][i % 4] = both;
      const int row = i / 2 * 8 + half() * 4 + i % 2 * 2;
      TW_UNROLL
      for (int e = 0; e < 2; e++)
        store_shared_short(shared + s_at + TileS::offset(row + e, byte / 16) + byte % 16, (uint16_t)(both >> (e * 16)));
      step();
    }
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      multiply(state.dk[i % 4], y[i], ds[i / 4]);
      advance(i);
      step();
    }
  }
  // Numbers of a lane's run of four queries.
  TW_DEVICE Vector<float, 4> numbers(int from, int run) const {
    return bits_as<Vector<float, 4>>(load_shared_vector<4>(shared + lines_at + (from + run * 8 + half() * 4) * 4));
  }

  // Place of a lane's part of dQ; of a row that does not exist, the last one's.
  TW_DEVICE float* sums_of(int h, int i0, int slice) const {
    const int row = min_of(i0 + lane % 32, (int)item.q_rows - 1);
    const int64_t line = slice * fmha_lines<Config>(args) + fmha_line_of<Config>(args, item, b, h, row);
    float* to = args.dq_acc + line * hq + wave * 32 + half() * 4;
    asm volatile("" : "+v"(to));
    return to;
  }
  // The wave's columns of dQ of the block's queries; meanwhile the next ones come to LDS.
  TW_DEVICE void add_queries(State& state, const Arriving& next, int i0, int next_i0, float* to) const {
    const int row = lane % 32;
    Sums dq(0.0f);
    Four x[n0 / 16];
    TW_UNROLL
    for (int kk = 0; kk < n0 / 16; kk++)
      x[kk] = MatrixSide<TileS, 32, 2, 16>::load(shared + s_at, 0, row, 0, half(), kk).part[0];
    Words<4> sums[4];
    if constexpr (Config::deterministic) {
      TW_UNROLL
      for (int r = 0; r < 4; r++) sums[r] = load_global<Words<4>>(to + r * 8);
    }
    step();
    put(next, next_i0, 16);
    step();
    TW_UNROLL
    for (int kk = 0; kk < n0 / 16; kk++) {
      multiply(dq, state.kx[kk], x[kk]);
      put(next, next_i0, kk), put(next, next_i0, 8 + kk);
      step();
    }
    if (i0 + row >= (int)item.q_rows) return;
    TW_UNROLL
    for (int r = 0; r < 4; r++) {
      if constexpr (Config::deterministic) {
        TW_UNROLL
        for (int e = 0; e < 4; e++) sums[r].w[e] = bits_of(float_of(sums[r].w[e]) + dq[r * 4 + e]);
        store_global(to + r * 8, sums[r]);
      } else {
        TW_UNROLL
        for (int e = 0; e < 4; e++) add_global(to + r * 8 + e, dq[r * 4 + e]);
      }
    }
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
