// Gradients of attention on Hopper: a workgroup has a block of keys and goes through the queries that see any of them. One
// warp of the producer warpgroup loads K, V, Q and dO through the copy engine, another lse and
// delta; each of two consumer warpgroups has 64 keys, makes S^T = K Q^T and dP^T = V dO^T (wgmma), keeps P^T and dS^T in
// registers as operands of dV += P^T dO and dK += dS^T Q, and leaves dS^T in shared memory, from where both make their
// part of dQ = dS K, half of its columns, and add it to dq_acc.
//   TW_FMHA_WS_BACKWARD_KERNEL(symbol, Config)   its only parameter is tw_fmha_ws_params; 1-D grid
//
// Valid configurations (FmhaBackwardPlan asserts all of it):
//   types     fp16 or bf16, the same of all operands
//   heads     64 or 128 elements, the same of q and v; shorter ones are padded by the copy engine
//   tiles     n0 = 128 keys, m0 = 64 queries
//   features  causal masks and windows, grouped heads, learned sinks (which are in lse), either order of sums. Not: bias,
//             ALiBi, dropout, soft cap, windows' sinks, lengths as data, sequences end to end
//   tensors   rows of q, k, v, do, dk and dv begin at multiples of 16 bytes, elements of a head are neighbours
//
// Maps: q, k, v, do, of (elements, rows, heads, items); boxes 64 x (m0, n0, n0, m0) x 1 x 1. Grid: blocks of keys of the key
// heads of all items.
//
// Deterministic: to each block of queries the blocks of keys that it sees add in their order. A count among the counters
// says whose turn it is; the last one leaves it zero. Two more warps of the producer do the waiting: one for the turn,
// one for what was added to be seen by others. Workgroups draw their numbers, so that whoever is waited for has begun. A
// few heads go abreast: with neighbours of one head alone, each would begin a step after the one before.
#pragma once
#include "tilewright/gpu/fmha/backward/gradient.hpp"
#include "tilewright/gpu/fmha/cuda.hpp"
#include "tilewright/sm90/blocks/mbarrier.hpp"
#include "tilewright/sm90/blocks/registers.hpp"
#include "tilewright/sm90/blocks/store.hpp"
#include "tilewright/sm90/blocks/wgmma_chain.hpp"
#include "tilewright/sm90/fmha/copy.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaBackwardPlan {
  using X = typename C::Q;
  static constexpr int hdim = C::hdim_q, m0 = C::m0, n0 = C::n0, consumers = 2, threads = kWarpgroup * 3, stages = 2;
  static constexpr int registers_producer = hdim > 64 ? 24 : 40, registers_consumer = hdim > 64 ? 240 : 232;
  static_assert(registers_producer + consumers * registers_consumer <= 3 * 168, "what the workgroup began with");
  static_assert(is_same<X, fp16> || is_same<X, bf16>, "operands of the tensor cores come from registers in 16 bits");
  static_assert(C::hdim_v == hdim && (hdim == 64 || hdim == 128), "accumulators of dK and dV fill the registers");
  static_assert(n0 == 128 && m0 == 64, "64 keys for each consumer");
  static_assert(!C::varlen && !C::token_sinks && !C::softcap && !C::dropout && !C::dbias && !C::skip_min &&
                    C::bias == FmhaBias::no, "features of the portable kernels");

  // K, V, rings of Q and dO, two dS^T, rings of lse and delta. Rows are cut in panels of 128 bytes. Then barriers, the
  // number drawn, and how many turns came and how many times warps have added.
  static constexpr int key_bytes = n0 * hdim * 2, query_bytes = m0 * hdim * 2, ds_bytes = n0 * m0 * 2;
  static constexpr int v_at = key_bytes, q_at = v_at + key_bytes, o_at = q_at + stages * query_bytes;
  static constexpr int ds_at = o_at + stages * query_bytes, lines_at = ds_at + 2 * ds_bytes, lines_bytes = 2 * m0 * 4;
  static constexpr int barriers_at = lines_at + stages * lines_bytes;
  static constexpr int keys_at = barriers_at + 2 * RingBarriers<stages>::bytes, drawn_at = keys_at + 8;
  static constexpr int turns_at = drawn_at + 8, added_at = turns_at + 4, shared_bytes = added_at + 4;
  static_assert(shared_bytes <= 232448, "fits");
};

template <class C>
struct FmhaBackwardWs {
  using Plan = FmhaBackwardPlan<C>;
  using X = typename Plan::X;
  using Gradient = gpu::FmhaGradient<C>;
  using Ring = RingState<Plan::stages>;
  static constexpr int threads = Plan::threads, m0 = C::m0, n0 = C::n0, hdim = Plan::hdim;
  static constexpr int scores = m0 / 2, results = hdim / 2;
  static constexpr int dq_columns = hdim / 2, dq_results = dq_columns / 2;  // of a consumer
  static constexpr int kConsumers = 1;  // the named barrier of both consumers
  static constexpr int kDrawnWord = 4, kTurns = 16;  // among the counters
  static constexpr int kAbreast = 8;                 // key heads

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaItem item;
  const int b, hk, block;

  TW_SM90 RingBarriers<Plan::stages> queries() const { return {shared + Plan::barriers_at}; }
  TW_SM90 RingBarriers<Plan::stages> gradients() const { return {queries().base + RingBarriers<Plan::stages>::bytes}; }
  TW_SM90 uint32_t keys() const { return shared + Plan::keys_at; }

  static TW_SM90 void run(const tw_fmha_ws_params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const tw_fmha_args& args = params.args;
    const uint32_t shared = shared_address(memory);
    const int warpgroup = warpgroup_index();
    if (threadIdx.x == 0) init(shared);
    wait_for_previous_launch();
    if (C::deterministic && threadIdx.x == 0) draw(args, shared + Plan::drawn_at);
    __syncthreads();
    int block = (int)blockIdx.x % (int)args.k_tiles, head = (int)blockIdx.x / (int)args.k_tiles;
    if constexpr (C::deterministic) {
      const int id = load_int(shared + Plan::drawn_at), blocks = (int)args.k_tiles;
      const int first = id / (kAbreast * blocks) * kAbreast, at = id - first * blocks;
      const int abreast = min(kAbreast, (int)(args.batch * args.heads_k) - first);
      block = at / abreast, head = first + at % abreast;
    }
    const int b = head / (int)args.heads_k;
    FmhaBackwardWs self = {params, args, shared, fmha_item<C>(args, b), b, head % (int)args.heads_k, block};
    if (warpgroup == 0) {
      setmaxnreg_dec<Plan::registers_producer>();
      const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / kWarp, 0);
      if (warp == 0 && threadIdx.x == 0) self.load();
      if (warp == 1) self.load_lines();
      if (C::deterministic && warp == 2 && threadIdx.x % kWarp == 0) self.await_turns();
      if (C::deterministic && warp == 3 && threadIdx.x % kWarp == 0) self.pass_turns();
    } else {
      setmaxnreg_inc<Plan::registers_consumer>();
      self.consume(warpgroup - 1);
    }
  }

  static TW_SM90 void init(uint32_t shared) {
    const RingBarriers<Plan::stages> queries = {shared + Plan::barriers_at};
    for (int stage = 0; stage < Plan::stages; stage++) {
      init_barrier(queries.full(stage), 2);  // the copies, and lse and delta
      init_barrier(queries.empty(stage), Plan::consumers);
    }
    init_barrier(shared + Plan::keys_at, 1);
    store_words(shared + Plan::turns_at, 0, 0);
    RingBarriers<Plan::stages>{queries.base + RingBarriers<Plan::stages>::bytes}.init(Plan::consumers);
  }

  static TW_SM90 void draw(const tw_fmha_args& args, uint32_t to) {
    const uint32_t drawn = gpu::arrive(args.counters + kDrawnWord);
    if (drawn + 1 == gridDim.x) gpu::store_coherent(args.counters + kDrawnWord, gpu::Words<1>{0});
    store_word(to, drawn);
  }
  static TW_SM90 int load_int(uint32_t from) {
    int x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
  }

  // Queries that see any of the keys, whole blocks. In a fixed order from the last on: there most workgroups may begin.
  struct Range {
    int first, last;
  };
  TW_SM90 Range range() const {
    const int j0 = block * n0, count = min((int)item.k_rows - j0, n0);
    if (count <= 0) return {0, -1};
    const int first = (int)Gradient::first_seer(args, item, j0);
    const int last = (int)Gradient::last_seer(args, item, j0 + count - 1);
    if (first >= (int)item.q_rows || last < first) return {0, -1};
    return {first / m0 * m0, last / m0 * m0};
  }
  template <class F>
  TW_SM90 void each_tile(Range range, F f) const {
    const int group = (int)args.heads_q / (int)args.heads_k;
#pragma unroll 1
    for (int h = hk * group; h < hk * group + group; h++)
#pragma unroll 1
      for (int at = range.first; at <= range.last; at += m0) f(h, C::deterministic ? range.first + range.last - at : at);
  }

  // The first and the last block of keys that any query of [i0, i0 + m0) sees, of the blocks whose range has it.
  TW_SM90 int first_block(int i0) const {
    if (C::mask == FmhaMask::no || args.left < 0) return 0;
    return max(i0 + (int)(item.off - args.left), 0) / n0;
  }
  TW_SM90 int last_block(int i0) const {
    const int last = ((int)item.k_rows - 1) / n0;
    if (C::mask == FmhaMask::no || args.right < 0) return last;
    return min(last, max(min(i0 + m0, (int)item.q_rows) - 1 + (int)(item.off + args.right), 0) / n0);
  }

  // ---- the producer ----

  TW_SM90 void load() const {
    Ring q, o;
    const Range own = range();
    if (own.last < own.first) return;
    arrive_expecting(keys(), 2 * Plan::key_bytes);
    load_panels<hdim>(shared, params.maps[1], n0 * 128, {block * n0, hk, b}, keys());
    load_panels<hdim>(shared + Plan::v_at, params.maps[2], n0 * 128, {block * n0, hk, b}, keys());
    each_tile(own, [&](int h, int i0) {
      queries().wait_empty(q);
      arrive_expecting(queries().full(q.stage), Plan::query_bytes);
      load_panels<hdim>(shared + Plan::q_at + q.stage * Plan::query_bytes, params.maps[0], m0 * 128, {i0, h, b},
                        queries().full(q.stage));
      q.next();
      gradients().wait_empty(o);
      arrive_expecting(gradients().full(o.stage), Plan::query_bytes);
      load_panels<hdim>(shared + Plan::o_at + o.stage * Plan::query_bytes, params.maps[3], m0 * 128, {i0, h, b},
                        gradients().full(o.stage));
      o.next();
    });
  }

  TW_SM90 void load_lines() const {
    Ring q;
    const int lane = threadIdx.x % kWarp;
    each_tile(range(), [&](int h, int i0) {
      queries().wait_empty(q);
      const uint32_t to = shared + Plan::lines_at + q.stage * Plan::lines_bytes;
#pragma unroll
      for (int r = lane; r < m0; r += kWarp) {
        const gpu::FmhaLine line = gpu::fmha_line<C>(args, item, b, h, i0 + r);
        store_word(to + r * 4, __float_as_uint(line.lse));
        store_word(to + (m0 + r) * 4, __float_as_uint(line.delta));
      }
      __syncwarp();
      if (lane == 0) arrive(queries().full(q.stage));
      q.next();
    });
  }

  // The count that says whose turn it is to add to a block of queries of a head.
  TW_SM90 uint32_t* turn_of(int h, int i0) const {
    return args.counters + kTurns + (b * (int)args.heads_q + h) * (int)args.q_tiles + i0 / m0;
  }
  TW_SM90 void await_turns() const {
    int tile = 0;
    each_tile(range(), [&](int h, int i0) {
      const uint32_t* const turn = turn_of(h, i0);
      const uint32_t wanted = (uint32_t)(block - first_block(i0));
      uint32_t now;
      do asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
      while (now != wanted);
      tile++;
      asm volatile("st.release.cta.shared.b32 [%0], %1;" ::"r"(shared + Plan::turns_at), "r"(tile) : "memory");
    });
  }
  TW_SM90 void pass_turns() const {
    int warps = 0;
    each_tile(range(), [&](int h, int i0) {
      warps += Plan::consumers * kWarpgroup / kWarp;
      await_count(Plan::added_at, warps);
      __threadfence();
      if (block == last_block(i0)) gpu::store_coherent(turn_of(h, i0), gpu::Words<1>{0});
      else gpu::arrive(turn_of(h, i0));
    });
  }
  TW_SM90 void await_count(int at, int wanted) const {
    int now;
    do asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(now) : "r"(shared + at) : "memory");
    while (now < wanted);
  }

  // ---- consumers ----

  static TW_SM90 uint32_t round(float x, float y) {
    return is_same<X, fp16> ? gpu::pack_halves(x, y) : gpu::pack_bfloats(x, y);
  }
  // A's 64 rows from `a`, panels a_panel bytes apart, times B's m0 rows: both K-major.
  static TW_SM90 void multiply(float (&s)[scores], uint32_t a, uint32_t b) {
    const Descriptor x = k_major(a), y = k_major(b);
#pragma unroll
    for (int i = 0; i < hdim / 64; i++)
      wgmma_panel<WgmmaText<X, X, false, false>>(s, x.moved(i * (n0 * 8)), y.moved(i * (m0 * 8)), i > 0);
    wgmma_commit();
  }
  static TW_SM90 void add(float (&d)[results], const uint32_t (&x)[m0 / 4], uint32_t from) {
    const Descriptor y = mn_major(from, m0 * 128);
#pragma unroll
    for (int i = 0; i < m0 / 64; i++) wgmma_rs_four<X>(d, x + 16 * i, y.moved(i * 512));
    wgmma_commit();
  }
  static TW_SM90 float2 load_pair(uint32_t from) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(from) : "memory");
    return x;
  }

  TW_SM90 void consume(int index) const {
    Ring q, o;
    const int thread = (int)threadIdx.x % kWarpgroup, lane = thread % 32, warp = thread / 32;
    const float factor = (float)args.scale * gpu::kLog2E;
    const int top = block * n0 + index * 64;
    const Range own = range();
    int tile = 0;
    float dk[results], dv[results];
#pragma unroll
    for (int i = 0; i < results; i++) dk[i] = dv[i] = 0.0f;
    if (own.first <= own.last) {
      wait(keys(), 0);
      const int key = top + warp * 16 + lane / 4;
      // Every query from whole_first to whole_last sees all of the consumer's keys.
      const bool complete = top + 64 <= (int)item.k_rows;
      const int whole_first = complete ? (int)Gradient::first_seer(args, item, top + 63) : 0x7fffffff;
      const int whole_last = complete ? (int)Gradient::last_seer(args, item, top) : -1;
      bool begun = false;
      each_tile(own, [&](int h, int i0) {
        float s[scores], dp[scores];
        const uint32_t q_tile = shared + Plan::q_at + q.stage * Plan::query_bytes;
        const uint32_t o_tile = shared + Plan::o_at + o.stage * Plan::query_bytes;
        const uint32_t lines = shared + Plan::lines_at + q.stage * Plan::lines_bytes + lane % 4 * 8;
        queries().wait_full(q);
        wgmma_fence();
        multiply(s, shared + index * 64 * 128, q_tile);
        gradients().wait_full(o);
        wgmma_fence();
        multiply(dp, shared + Plan::v_at + index * 64 * 128, o_tile);
        wgmma_wait<2>();  // dK of the tile before
        pin(dk);
        if (begun && thread == 0) arrive(queries().empty(q.stage ^ 1));
        begun = true;
        wgmma_wait<1>();
        pin(s);
        if (i0 < whole_first || min(i0 + m0, (int)item.q_rows) - 1 > whole_last) {
          const gpu::FmhaSeers seers[2] = {Gradient::seers(args, item, key), Gradient::seers(args, item, key + 8)};
#pragma unroll
          for (int i = 0; i < scores; i++)
            if (!seers[i / 2 % 2].have(i0 + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = gpu::minus_infinity();
        }
        uint32_t p[m0 / 4], ds[m0 / 4];
#pragma unroll
        for (int j = 0; j < m0 / 8; j++) {
          const float2 lse = load_pair(lines + j * 32);
#pragma unroll
          for (int k = 0; k < 2; k++) {
            float &x = s[4 * j + 2 * k], &y = s[4 * j + 2 * k + 1];
            x = gpu::exp2(x * factor - lse.x), y = gpu::exp2(y * factor - lse.y);
            p[2 * j + k] = round(x, y);
          }
        }
        wgmma_fence();
        add(dv, p, o_tile);
        wgmma_wait<1>();
        pin(dp);
#pragma unroll
        for (int j = 0; j < m0 / 8; j++) {
          const float2 delta = load_pair(lines + m0 * 4 + j * 32);
#pragma unroll
          for (int k = 0; k < 2; k++) {
            const int at = 4 * j + 2 * k;
            ds[2 * j + k] = round(s[at] * (dp[at] - delta.x), s[at + 1] * (dp[at + 1] - delta.y));
          }
        }
        const uint32_t ds_tile = shared + Plan::ds_at + tile % 2 * Plan::ds_bytes;
        put(ds_tile, ds, index * 64 + warp * 16, lane);
        fence_async_proxy();
        join_barrier(kConsumers, 2 * kWarpgroup);
        float dq[dq_results];
        wgmma_fence();
        multiply_ds(dq, ds_tile, index);
        add(dk, ds, q_tile);
        wgmma_wait<1>();
        pin(dq), pin(dv);
        if (thread == 0) arrive(gradients().empty(o.stage));
        q.next(), o.next();
        tile++;
        add_queries(dq, tile, h, i0, index, warp, lane);
      });
      wgmma_wait<0>();
      pin(dk), pin(dv);
    }
    store(dk, args.dk, (float)args.scale, (int)args.hdim_q, top + warp * 16, lane);
    store(dv, args.dv, 1.0f, (int)args.hdim_v, top + warp * 16, lane);
  }

  // Rows of keys from `row` on, 16 of a warp.
  static TW_SM90 void put(uint32_t to, const uint32_t (&ds)[m0 / 4], int row, int lane) {
    const int line = row + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
    for (int i = 0; i < m0 / 16; i++) {
      const int chunk = 2 * i + lane / 16;
      const uint32_t four[4] = {ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]};
      store_fragments(swizzled(to + i / 4 * (n0 * 128), line, chunk % 8), four);
    }
  }

  // The consumer's part of dQ: half of the columns.
  TW_SM90 void multiply_ds(float (&dq)[dq_results], uint32_t ds_tile, int index) const {
    const int column = index * dq_columns;
    const Descriptor x = mn_major(ds_tile, n0 * 128);
    const Descriptor y = mn_major(shared + column / 64 * (n0 * 128) + column % 64 * 2, n0 * 128);
#pragma unroll
    for (int i = 0; i < n0 / 16; i++)
      wgmma<WgmmaText<X, X, true, true>>(dq, x.plus(i * 128), y.plus(i * 128), i > 0);
    wgmma_commit();
  }

  TW_SM90 void add_queries(const float (&dq)[dq_results], int tile, int h, int i0, int index, int warp, int lane) const {
    const int row0 = i0 + warp * 16 + lane / 4;
    float* const to =
        args.dq_acc + gpu::fmha_line_of<C>(args, item, b, h, row0) * hdim + index * dq_columns + lane % 4 * 4;
    if constexpr (C::deterministic) await_count(Plan::turns_at, tile);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      if (row0 + k * 8 >= (int)item.q_rows) break;
#pragma unroll
      for (int j = 0; j < dq_results / 8; j++) {
        const float* const x = dq + 8 * j + 2 * k;
        const float four[4] = {x[0], x[1], x[4], x[5]};
        gpu::add_global_four(to + k * 8 * hdim + j * 16, four);  // as FmhaQueryPlace says
      }
    }
    if constexpr (C::deterministic) {
      __syncwarp();
      if (lane == 0)
        asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(shared + Plan::added_at) : "memory");
    }
  }

  TW_SM90 void store(const float (&x)[results], const tw_fmha_tensor& tensor, float factor, int elements, int row,
                     int lane) const {
    char* const to = (char*)tensor.ptr + (b * tensor.batch + hk * tensor.head) * 2;
#pragma unroll
    for (int k = 0; k < 2; k++) {
      const int j = row + k * 8 + lane / 4;
#pragma unroll
      for (int i = 0; i < results / 16; i++) {
        gpu::Words<4> words;
        uint32_t four[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float* const two = x + (4 * i + e) * 4 + 2 * k;
          four[e] = round(two[0] * factor, two[1] * factor);
        }
        transpose_quad(four);
#pragma unroll
        for (int e = 0; e < 4; e++) words.w[e] = four[e];
        const int column = (4 * i + lane % 4) * 8;
        if (j < (int)args.seq_k && column < elements) gpu::store_global(to + (j * tensor.row + column) * 2, words);
      }
    }
  }
};

}  // namespace tw::sm90

#define TW_FMHA_WS_BACKWARD_KERNEL(NAME, ...)                                                                      \
  extern "C" __global__ void __launch_bounds__(tw::sm90::FmhaBackwardWs<__VA_ARGS__>::threads, 1)                  \
      NAME(const __grid_constant__ tw_fmha_ws_params params) {                                                     \
    tw::sm90::FmhaBackwardWs<__VA_ARGS__>::run(params);                                                            \
  }
