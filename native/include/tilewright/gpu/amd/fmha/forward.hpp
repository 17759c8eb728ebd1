// Forward attention on MFMA of gfx942 and gfx950, in 16 bits, with rows of 16-byte multiples: the loop that keeps the
// matrix unit busy. Eight waves have 32 rows each, two waves a SIMD: while one makes its softmax, the other multiplies.
//
// Queries stay in registers. Of keys and values there are two blocks in LDS: keys go straight there, values through
// registers, transposed; both are asked for a block ahead, and waited for when values go to LDS, behind the softmax.
// Probabilities go to the second product straight from registers: results of a lane are four neighbouring keys of one
// row, as an operand has them, if values lie in LDS in the order of `key_run` (gpu/amd/fmha/turned.hpp).
//
// Blocks that every row sees whole have a loop of their own; those at an edge of the mask, or of the keys, follow.
#pragma once
#include "tilewright/gpu/amd/direct.hpp"
#include "tilewright/gpu/amd/fmha/turned.hpp"
#include "tilewright/gpu/amd/schedule.hpp"
#include "tilewright/gpu/fmha/forward.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaForwardDirect {
  using Base = FmhaForward<Config>;
  using X = typename Base::X;
  using ScoreAtom = typename Base::ScoreAtom;
  using ValueAtom = typename Base::ValueAtom;
  using Softmax = typename Base::Softmax;
  using TileQ = typename Base::TileQ;
  using TileK = typename Base::TileK;
  using TileV = LdsTile<X, false, Config::hdim_v, Config::n0>;
  static constexpr int threads = Base::threads, min_blocks = 1, m0 = Config::m0, n0 = Config::n0;
  static_assert(is_same<X, typename Config::K> && size_of<X> == 2 && Base::wave_rows == 32 && Config::warp_m0 == 32,
                "a wave has one strip of rows, in 16 bits");
  static_assert(Config::mask != FmhaMask::window, "blocks with an edge follow those without");
  using KeyLoader = DirectLoader<TileK, threads>;
  using ValueLoader = FmhaTurnedValues<TileV, threads>;
  using ValueSide = MatrixSide<TileV, 32, 2, 16>;
  static_assert(KeyLoader::total % threads == 0, "every thread has as many pieces of keys");
  static constexpr int v_at = 2 * TileK::bytes, shared_bytes = max_of(TileQ::bytes, v_at + 2 * TileV::bytes);
  static constexpr int results = ScoreAtom::results, steps = Config::hdim_q / ScoreAtom::depth;
  static_assert(ScoreAtom::depth == 16 && ValueAtom::depth == 16 && results == 16, "32 x 32 results, 16 bytes a lane");

  using Pair = Vector<float, 2>;
  typedef typename ScoreAtom::Fragments Fragments;

  const tw_fmha_args& args;
  const int thread, lane;
  const uint32_t shared;

  // Rows of keys (values) of the head.
  struct Rows {
    const char* base;
    uint32_t ld, bytes;  // from row to row; of a row
    int count;
    TW_DEVICE Rows(const tw_fmha_tensor& tensor, const FmhaItem& item, int64_t head, int64_t hdim)
        : base(uniform((const char*)tensor.ptr +
                       (head * tensor.head + (Config::varlen ? 0 : item.cache * tensor.batch) +
                        item.k_first * tensor.row) * 2)),
          ld(uniform((uint32_t)tensor.row * 2)), bytes((uint32_t)hdim * 2), count((int)item.k_rows) {}
    // The block from row c0 on: beyond its rows it reads as zero.
    TW_DEVICE uint32_t records(int c0) const {
      const int rows = min_of(count - c0, n0);
      return uniform(rows > 0 ? (uint32_t)(rows - 1) * ld + bytes : 0);
    }
    TW_DEVICE const char* at(int c0) const { return uniform(base + (int64_t)c0 * ld); }
  };

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const FmhaForwardDirect self = {args, thread_index(), lane_index(), shared_base()};
    self.compute(Base::work_of(args, block_index()));
    fmha_publish(args, self.thread, [] {});
  }

  TW_DEVICE void compute(const typename Base::Work& work) const {
    const FmhaItem item = fmha_item<Config>(args, work.b);
    if (item.bad && thread == 0) fmha_tell(args, item.bad, work.b, item.culprit);
    const int group = (int)args.heads_q / (int)args.heads_k;
    const int first = work.tile * m0, all = (int)(Config::varlen ? item.q_rows : args.seq_q);
    if (first >= all) return;
    const int rows = min_of(m0, (int)item.q_rows - first), wave_first = thread / kWave * 32;
    Softmax softmax(args, item, work.b, work.head, group, lane, first + wave_first);
    ValueAtom o;
    o.clear();
    if (rows > 0) {
      const FmhaRange range = fmha_range(args, item, first, first + rows);
      const Base base = {args, thread, lane, shared};
      base.load_queries(item, work.b, work.head, group, first);
      loop(softmax, o, item, range, work.head / group, wave_first);
    }
    const Base again = {read_again(args), thread, lane, shared};
    again.store(softmax, o, item, work, all, false);
  }

  // Carried from block to block.
  struct State {
    Words<4> q[steps];
    float factor, m;
    Pair l;
  };

  TW_DEVICE void loop(Softmax& softmax, ValueAtom& o, const FmhaItem& item, const FmhaRange& range, int key_head,
                      int wave_first) const {
    State state;
    barrier();
    TW_UNROLL
    for (int kk = 0; kk < steps; kk++) {
      Fragments f;
      ScoreAtom::load_a(f, shared, wave_first, lane, kk);
      state.q[kk] = bits_as<Words<4>>(f.a[0].part[0]);
    }
    barrier();  // Q's tile is free
    state.factor = softmax.factor[0], state.m = minus_infinity(), state.l = Pair(0.0f);
    if (state.factor < 0.0f) {  // a largest score is to have the largest product
      state.factor = -state.factor;
      TW_UNROLL
      for (int kk = 0; kk < steps; kk++)
        TW_UNROLL
        for (int w = 0; w < 4; w++) state.q[kk].w[w] ^= 0x80008000u;
    }
    const int last = (int)range.last;
    int c0 = (int)range.first / n0 * n0;
    if (c0 < last) {
      const Rows keys(args.k, item, key_head, args.hdim_q), values(args.v, item, key_head, args.hdim_v);
      ValueLoader held;
      held.fetch(values_at(values, c0), values.ld, thread);
      copy_keys(keys, c0, shared);
      held.put(shared + v_at, thread);
      arrive_direct();
      // Blocks that all rows of the tile see whole.
      int whole = (int)item.k_rows;
      if (args.right >= 0)  // of kernels without a mask, too: a compiler that knows both loops' ends spills
        whole = (int)fmha_min(whole, softmax.row0 - wave_first + item.off + args.right + 1);
      int stage = 0;  // of the block that is multiplied: a constant where it matters
      TW_NO_UNROLL
      while (c0 + n0 <= whole) {
        turn<false>(state, softmax, o, keys, values, c0, 0);
        c0 += n0, stage = 1;
        if (c0 + n0 > whole) break;
        turn<false>(state, softmax, o, keys, values, c0, 1);
        c0 += n0, stage = 0;
      }
      TW_NO_UNROLL
      for (; c0 < last; c0 += n0, stage ^= 1) turn<true>(state, softmax, o, keys, values, c0, stage);
    }
    softmax.m[0] = state.m, softmax.l[0] = state.l[0] + state.l[1];
  }

  TW_DEVICE static __amdgpu_buffer_rsrc_t values_at(const Rows& values, int c0) {
    return __builtin_amdgcn_make_buffer_rsrc((char*)values.at(c0), 0, (int)values.records(c0), kBufferFlags);
  }
  TW_DEVICE void copy_keys(const Rows& keys, int c0, uint32_t to) const {
    const uint64_t base = (uint64_t)keys.at(c0);
    const typename KeyLoader::Buffer buffer = {(uint32_t)base, (uint32_t)(base >> 32) & 0xffff, keys.records(c0),
                                               (uint32_t)kBufferFlags};
    KeyLoader::copy(uniform(to), buffer, keys.ld, thread);
  }
  // All that this wave and the others have asked for, or written, is in LDS.
  TW_DEVICE static void arrive_direct() {
    wait_direct();
    wait_shared();
    asm volatile("s_barrier" ::: "memory");
  }

  template <bool kEdge>
  TW_DEVICE void turn(State& state, Softmax& softmax, ValueAtom& o, const Rows& keys, const Rows& values, int c0,
                      int stage) const {
    const uint32_t k = shared + stage * TileK::bytes, v = shared + v_at + stage * TileV::bytes;
    ValueLoader held;
    held.fetch(values_at(values, c0 + n0), values.ld, thread);
    copy_keys(keys, c0 + n0, shared + (1 - stage) * TileK::bytes);
    const uint32_t next = shared + v_at + (1 - stage) * TileV::bytes;
    if constexpr (kEdge) {
      // Not known to be the same in all lanes: the compiler would join the blocks, and spill.
      const int seen = compute_again(softmax.seen_by(softmax.query(0)).last - c0);
      if (count_lanes(seen > 0) != 0) {
        ScoreAtom s;
        score(state, s, k);
        mask(s, seen);
        grow(state, o, largest(s));
        add_values(state, o, s, v);
      }
      held.put(next, thread);
    } else {
      ScoreAtom s;
      score(state, s, k);
      grow(state, o, largest(s));
      held.put(next, thread);
      add_values(state, o, s, v);
    }
    arrive_direct();
  }

  TW_DEVICE void score(const State& state, ScoreAtom& s, uint32_t k) const {
    s.clear();
    const int group = ScoreAtom::layout().group(lane), line = lane % 32;
    TW_UNROLL
    for (int kk = 0; kk < steps; kk++) {
      Fragments f;
      f.a[0].part[0] = bits_as<Vector<uint32_t, 4>>(state.q[kk]);
      TW_UNROLL
      for (int j = 0; j < ScoreAtom::columns; j++) f.b[j] = ScoreAtom::SideB::load(k, 0, line, j * 32, group, kk);
      s.multiply(f);
    }
    interleave(steps * ScoreAtom::columns, ScoreAtom::products);
    settle(s);
  }

  // Columns of the block below `last` are seen.
  TW_DEVICE void mask(ScoreAtom& s, int last) const {
    last -= ScoreAtom::layout().result_line(lane, 0);
    TW_UNROLL
    for (int j = 0; j < ScoreAtom::columns; j++)
      TW_UNROLL
      for (int v = 0; v < results; v++) {
        const int c = j * 32 + ScoreAtom::layout().result_line(0, v);
        s.acc[0][j][v] = c < last ? s.acc[0][j][v] : minus_infinity();
      }
  }

  // Makes P of scores, and adds its product with the block's values.
  TW_DEVICE void add_values(State& state, ValueAtom& o, const ScoreAtom& s, uint32_t v) const {
    const int group = ScoreAtom::layout().group(lane), line = lane % 32;
    const float safe = state.m == minus_infinity() ? 0.0f : state.m;
    const Pair factor = {state.factor, state.factor}, shift = {-safe, -safe};
    TW_UNROLL
    for (int kk = 0; kk < n0 / 16; kk++) {
      typename ValueAtom::Fragments f;
      Words<4> p;
      TW_UNROLL
      for (int w = 0; w < 4; w++) {
        const auto& acc = s.acc[0][kk / 2];
        const int at = kk % 2 * 8 + w * 2;
        const Pair x = __builtin_elementwise_fma(Pair{acc[at], acc[at + 1]}, factor, shift);
        const Pair e = {exp2(x[0]), exp2(x[1])};
        state.l += e;
        p.w[w] = fmha_pack_pair<X>(e);
      }
      f.a[0].part[0] = bits_as<Vector<uint32_t, 4>>(p);
      TW_UNROLL
      for (int j = 0; j < ValueAtom::columns; j++)
        f.b[j].part[0] = ValueSide::load(v, 0, line, j * 32, group, kk).part[0];
      o.multiply(f);
    }
    interleave(n0 / 16 * ValueAtom::columns, ValueAtom::products);
  }

  // Reads of LDS, each a few products before its own.
  TW_DEVICE static void interleave(int reads, int products) {
    constexpr int kAhead = 4;
    schedule<kScheduleRead>(min_of(kAhead, reads));
    TW_UNROLL
    for (int i = 0; i < reads; i++) {
      schedule<kScheduleMatrix>(products);
      if (i + kAhead < reads) schedule<kScheduleRead>(1);
    }
  }

  // The results are there: what follows is not known to the compiler as a reader of them.
  TW_DEVICE static void settle(ScoreAtom& s) {
    if constexpr (ScoreAtom::columns == 2)
      asm volatile("s_nop 15\n\ts_nop 3" : "+v"(s.acc[0][0]), "+v"(s.acc[0][1]));
    else
      asm volatile("s_nop 15\n\ts_nop 3" : "+v"(s.acc[0][0]), "+v"(s.acc[0][1]), "+v"(s.acc[0][2]), "+v"(s.acc[0][3]));
  }
  TW_DEVICE static float largest_of(float x, float y, float z) {
    float most;  // fmax would make quiet numbers of all of them first
    asm("v_max3_f32 %0, %1, %2, %3" : "=v"(most) : "v"(x), "v"(y), "v"(z));
    return most;
  }
  TW_DEVICE static float largest(const ScoreAtom& s) {
    float most[2] = {s.acc[0][0][0], s.acc[0][0][1]};
    TW_UNROLL
    for (int i = 2; i + 1 < ScoreAtom::columns * results; i += 2) {
      const auto& x = s.acc[0][i / results];
      most[i / 2 % 2] = largest_of(most[i / 2 % 2], x[i % results], x[i % results + 1]);
    }
    const float own = largest_of(most[0], most[1], most[1]), far = shuffle_xor(own, 32);
    return largest_of(own, far, far);
  }

  // Sums are multiplied anew only if a maximum has grown by more than 2^8: probabilities up to that are as exact.
  TW_DEVICE static void grow(State& state, ValueAtom& o, float most) {
    const float now = most * state.factor;
    if (count_lanes(now > state.m + 8.0f) == 0) return;
    const float larger = fmha_larger(state.m, now), safe = larger == minus_infinity() ? 0.0f : larger;
    const float rescale = exp2(state.m - safe);
    state.m = larger;
    state.l *= rescale;
    TW_UNROLL
    for (int j = 0; j < ValueAtom::columns; j++) o.acc[0][j] *= rescale;
  }
};

}  // namespace tw::gpu

#define TW_FMHA_DIRECT_KERNEL(NAME, ...)                                                                         \
  TW_KERNEL(tw::gpu::FmhaForwardDirect<__VA_ARGS__>::threads, tw::gpu::FmhaForwardDirect<__VA_ARGS__>::min_blocks, \
            NAME, tw_fmha_args, tw::gpu::FmhaForwardDirect<__VA_ARGS__>::run(params);)
