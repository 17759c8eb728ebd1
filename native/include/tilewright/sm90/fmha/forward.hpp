// The attention of Hopper's ws pipeline: one producer warpgroup feeds rings of keys and values through the copy engine,
// each consumer warpgroup has 64 rows of queries, makes their scores and sums (wgmma) and keeps both in registers. P goes to
// the second product straight from registers. A unit states a Config and exports
//   TW_FMHA_WS_KERNEL(symbol, Config)   its only parameter is tw_fmha_ws_params; 1-D grid
//
// Valid configurations (FmhaPlan asserts all of it):
//   types     fp16 or bf16, the same of q, k, v and o
//   heads     multiples of 64 elements, of v 64, 128, 192 or 256; shorter ones are padded by the copy engine
//   tiles     m0 = 64 rows for each of 1 to 3 consumers; n0 a multiple of 16. Registers of a thread: n0 * 3 / 4 + v / 2 and
//             about 30 more, of 240 with up to two consumers, 160 with three
//   features  masks (token sinks too), soft cap, learned sinks, lse, lengths as data, sequences end to end, cache_index,
//             skip_min, status, pages of at least 8 rows (up to two consumers). Not: bias, ALiBi, dropout, 8-bit types.
//             Parts of the keys, without masks and sinks: sm90/parts/parts.hpp
//   scale     above zero: maxima are those of scores not yet scaled
//   tensors   rows of q, k, v and o begin at multiples of 16 bytes, elements of a head are neighbours
//
// Maps: q, k, v, o, of (elements, rows, heads, items); boxes 64 x (m0, n0, n0, 64) x 1 x 1. Grid: a workgroup for each
// tile, or, persistent, one for each multiprocessor. Persistent kernels whose tiles differ in length need `counters`:
// word 4 counts tiles.
#pragma once
#include "tilewright/sm90/fmha/copy.hpp"
#include "tilewright/sm90/fmha/softmax.hpp"
#include "tilewright/sm90/blocks/registers.hpp"
#include "tilewright/sm90/blocks/store.hpp"
#include "tilewright/sm90/blocks/wgmma_chain.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaParts;

template <class C>
struct Fmha {
  using Plan = FmhaPlan<C>;
  using X = typename Plan::X;
  using Ring = RingState<Plan::stages>;
  using Rows = FmhaRows<C>;
  static constexpr int threads = Plan::threads, m0 = C::m0, n0 = C::n0, scores = n0 / 2, results = C::hdim_v / 2;
  static constexpr int kTilesWord = 4;
  // Named barriers: one per consumer, then the turns of pingpong.
  static constexpr int kConsumerBarrier = 1, kTurnBarrier = 4;

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaBarriers<Plan> barriers;
  const FmhaTiles<Plan> tiles;
  const int total;

  static TW_SM90 void run(const tw_fmha_ws_params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const tw_fmha_args& args = params.args;
    const Fmha self = {params, args, shared, {shared + Plan::barriers_at}, {args}, (int)args.tiles};
    const int warpgroup = warpgroup_index();
    if (warpgroup == 0) {
      if constexpr (Plan::consumers > 1) setmaxnreg_dec<Plan::registers_producer>();
      if (threadIdx.x == 0) self.barriers.init();
      if (threadIdx.x == kWarp)
        for (int i = 0; i < 4; i++) prefetch_map(params.maps[i]);
      __syncthreads();
      launch_dependents();
      wait_for_previous_launch();
      if constexpr (C::paged) {
        const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / kWarp, 0);
        if (warp == 0) self.load_keys();
        else if (threadIdx.x == kWarp) self.load_queries();
        else if (warp == 2) self.load_values();
      } else {
        if (threadIdx.x == 0) self.load_keys();
        else if (threadIdx.x == kWarp) self.load_queries();
        else if (threadIdx.x == 2 * kWarp) self.load_values();
      }
      __syncwarp();
    } else {
      if constexpr (Plan::consumers > 1) setmaxnreg_inc<Plan::registers_consumer>();
      __syncthreads();
      wait_for_previous_launch();
      self.consume(warpgroup - 1);
    }
    gpu::fmha_publish(args, (int)threadIdx.x, [] {});
  }

  // ---- which tile is next: the thread of keys says so ----

  TW_SM90 void tell(const FmhaSpan& span, RingState<2>& ring) const {
    barriers.next().wait_empty(ring);
    store_message(barriers.slot(ring.stage), span);
    arrive(barriers.next().full(ring.stage));
    ring.next();
  }

  // For all threads of a warp, or for one that is alone. False: there is none.
  template <int kQuads>
  TW_SM90 bool told(FmhaSpan& span, RingState<2>& ring, bool alone) const {
    barriers.next().wait_full(ring);
    span = load_message<FmhaSpan, kQuads>(barriers.slot(ring.stage));
    if (!alone) __syncwarp();
    if (alone || threadIdx.x % kWarp == 0) arrive(barriers.next().empty(ring.stage));
    ring.next();
    return span.count >= 0;
  }

  // When all loads of a tile are on their way: as late as that, for who draws early holds what others could have begun.
  TW_SM90 int draw(int id) const {
    if constexpr (!Plan::dynamic) return id + (int)gridDim.x;
    uint32_t drawn;
    asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;"
                 : "=r"(drawn)
                 : "l"(args.counters + kTilesWord)
                 : "memory");
    // Every tile draws once; the last one to draw leaves the counter as it was.
    if ((int)drawn == total - 1) gpu::store_coherent(args.counters + kTilesWord, gpu::Words<1>{0});
    return (int)(drawn + gridDim.x);
  }

  // ---- the producer: a thread for each of keys, values and queries; of pages, a warp ----

  TW_SM90 void load_keys() const {
    Ring keys;
    RingState<2> ring;
    const bool speaks = !C::paged || threadIdx.x == 0;
    FmhaSpan span;
    for (int id = (int)blockIdx.x;;) {
      const bool more = id < total;
      if (!more) span.count = -1;
      else if constexpr (Plan::split) span = FmhaParts<C>::span(args, id);
      else span = fmha_span<C>(args, tiles.at(id));
      if (more && args.status && span.bad && speaks) gpu::fmha_tell(args, span.bad, span.b, span.culprit);
      const bool written = more && span.first < span.all;
      if (speaks && (written || !more)) tell(span, ring);
      if (!more) return;
      if (written) load_ring<C::hdim_q>(1, Plan::k_at, barriers.keys(), keys, span);
      if (speaks) id = draw(id);
      if constexpr (C::paged) id = __shfl_sync(0xffffffffu, id, 0);
    }
  }

  TW_SM90 void load_values() const {
    Ring values;
    RingState<2> ring;
    FmhaSpan span;
    while (told<2>(span, ring, !C::paged)) load_ring<C::hdim_v>(2, Plan::v_at, barriers.values(), values, span);
  }

  // The i-th block of keys that a tile reads: from the diagonal on downwards, then those of token sinks.
  static TW_SM90 int block_of(const FmhaSpan& span, int i) {
    return !C::token_sinks || i < span.blocks ? span.last - 1 - i : span.count - 1 - i;
  }

  template <int kElements>
  TW_SM90 void load_ring(int map, uint32_t ring_at, RingBarriers<Plan::stages> ring, Ring& at,
                         const FmhaSpan& span) const {
    constexpr int kBytes = n0 * kElements * 2;
    const int key_head = C::pack_gqa ? span.head : span.head / ((int)args.heads_q / (int)args.heads_k);
#pragma unroll 1
    for (int i = 0; i < span.count; i++) {
      if constexpr (C::paged) {
        load_pages<kElements>(map, ring_at, ring, at, span.b, key_head, block_of(span, i) * n0, span.k_rows);
      } else {
        const uint32_t full = ring.full(at.stage);
        ring.wait_empty(at);
        arrive_expecting(full, kBytes);
        const int first = C::varlen ? span.k_place : 0, item = C::varlen ? 0 : span.k_place;
        load_panels<kElements>(shared + ring_at + at.stage * kBytes, params.maps[map], n0 * 128,
                               {first + block_of(span, i) * n0, key_head, item}, full);
      }
      at.next();
    }
  }

  // Every lane asks for a page of the block from column c0 on, or for its part of one. What is absent, or beyond the keys,
  // is asked for behind the last page, where the copy engine finds zeros; consumers are told of keys that are absent.
  template <int kElements>
  TW_SM90 void load_pages(int map, uint32_t ring_at, RingBarriers<Plan::stages> ring, Ring at, int b, int key_head, int c0,
                          int k_rows) const {
    constexpr int kBytes = n0 * kElements * 2;
    const int size = (int)args.page_size, rows = min(size, n0), lane = threadIdx.x % kWarp;
    const int column = c0 + lane * rows;
    const bool mine = lane * rows < n0, exists = mine && column < k_rows;
    const int page = exists ? (int)fmha_page<C>(args, b, column) : -1;
    if (map == 1 && args.status && exists && page < 0) gpu::fmha_tell(args, kFmhaBadPage, b, column);
    const uint32_t absent = __ballot_sync(0xffffffffu, exists && page < 0);
    ring.wait_empty(at);
    if (mine)
      load_panels<kElements>(shared + ring_at + at.stage * kBytes + lane * rows * 128, params.maps[map], n0 * 128,
                             {column & (size - 1), key_head, page < 0 ? (int)args.num_pages : page}, ring.full(at.stage));
    __syncwarp();
    if (lane == 0) {
      if (map == 1) store_word(barriers.absent(at.stage), absent);
      arrive_expecting(ring.full(at.stage), kBytes);  // the phase cannot end before this
    }
  }

  TW_SM90 void load_queries() const {
    RingState<1> queries;
    RingState<2> ring;
    FmhaSpan span;
    while (told<3>(span, ring, true)) {
      if (span.count == 0) continue;
      barriers.queries().wait_empty(queries);
      const uint32_t full = barriers.queries().full(0);
      arrive_expecting(full, Plan::q_bytes);
      FmhaPlace place = {span.q_first + span.first, span.head, C::varlen ? 0 : span.b};
      if constexpr (C::pack_gqa) place = FmhaParts<C>::queries(args, span);
      load_panels<C::hdim_q>(shared, params.maps[0], m0 * 128, place, full);
      queries.next();
    }
  }

  // ---- consumers ----

  struct Consumer {
    Ring keys, values;
    RingState<1> queries;
    int index, thread;  // which consumer, and the thread in its warpgroup
  };

  TW_SM90 void consume(int index) const {
    Consumer own = {{}, {}, {}, index, (int)threadIdx.x % kWarpgroup};
    RingState<2> ring;
    if constexpr (Plan::pingpong)
      if (index == Plan::consumers - 1) signal_barrier(kTurnBarrier, 2 * kWarpgroup);
    for (;;) {
      barriers.next().wait_full(ring);
      const uint32_t slot = barriers.slot(ring.stage);
      const FmhaSpan span = load_message<FmhaSpan>(slot);
      if (span.count < 0) break;
      Rows rows(args, span, top_of(own, span), row_of(own, span));
      float o[results];
#pragma unroll
      for (int i = 0; i < results; i++) o[i] = 0.0f;
      if (span.count > 0) attend(own, span, rows, o);
      const FmhaSpan again = load_message<FmhaSpan>(slot);  // rather than in registers all along
      if constexpr (Plan::split) FmhaParts<C>::put(args, again, rows, o, row_of(own, again));
      else store(own, again, rows, o);
      __syncwarp();
      if (own.thread % kWarp == 0) arrive(barriers.next().empty(ring.stage));
      ring.next();
    }
    if (own.thread == 0) wait_stores_read<0>();  // shared memory lives until then
  }

  // The consumer's first row in its item, and the thread's.
  static TW_SM90 int top_of(const Consumer& own, const FmhaSpan& span) { return span.first + own.index * 64; }
  static TW_SM90 int row_of(const Consumer& own, const FmhaSpan& span) {
    return top_of(own, span) + own.thread / 32 * 16 + own.thread % 32 / 4;
  }

  TW_SM90 void multiply_keys(const Consumer& own, float (&s)[scores]) const {
    const Descriptor q = k_major(shared + own.index * 64 * 128);
    const Descriptor k = k_major(shared + Plan::k_at + own.keys.stage * Plan::k_bytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::hdim_q / 64; i++)
      wgmma_panel<WgmmaText<X, X, false, false>>(s, q.moved(i * (m0 * 8)), k.moved(i * (n0 * 8)), i > 0);
    wgmma_commit();
  }

  TW_SM90 void multiply_values(const Consumer& own, const uint32_t (&p)[n0 / 4], float (&o)[results]) const {
    const Descriptor v = mn_major(shared + Plan::v_at + own.values.stage * Plan::v_bytes, n0 * 128);
    wgmma_fence();
    constexpr int kFours = n0 / 64;
#pragma unroll
    for (int i = 0; i < kFours; i++) wgmma_rs_four<X>(o, p + 16 * i, v.moved(i * 512));
#pragma unroll
    for (int i = kFours * 4; i < n0 / 16; i++) wgmma_rs<X>(o, p + 4 * i, v.plus(i * 128), 1);
    wgmma_commit();
  }

  static TW_SM90 uint32_t round(float x, float y) {
    return is_same<X, fp16> ? gpu::pack_halves(x, y) : gpu::pack_bfloats(x, y);
  }

  // Values beyond an item's keys are not to be multiplied, not even by zero: the copy engine knows only where the tensor
  // ends. Each consumer clears them for itself.
  TW_SM90 void clear_tail(const Consumer& own, int rows) const {
    barriers.values().wait_full(own.values);
    const uint32_t stage = shared + Plan::v_at + own.values.stage * Plan::v_bytes;
    constexpr int kChunks = C::hdim_v / 8;
    for (int i = own.thread; i < (n0 - rows) * kChunks; i += kWarpgroup) {
      const int row = rows + i / kChunks, chunk = i % kChunks;
      const uint32_t to = stage + chunk / 8 * (n0 * 128) + row * 128 + chunk % 8 * 16;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    fence_async_proxy();
    join_barrier(kConsumerBarrier + own.index, kWarpgroup);
  }

  TW_SM90 void attend(Consumer& own, const FmhaSpan& span, Rows& rows, float (&o)[results]) const {
    const int64_t room = C::varlen ? args.total_k - span.k_place : args.seq_k;
    const int ragged = C::paged || span.k_rows < room ? span.k_rows : 0x7fffffff;
    uint32_t absent = 0;
    const auto release = [&](uint32_t barrier) {
      if (own.thread == 0) arrive(barrier);
    };
    const auto wait_keys = [&] {
      barriers.keys().wait_full(own.keys);
      if constexpr (C::paged)
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(absent) : "r"(barriers.absent(own.keys.stage)) : "memory");
    };
    const auto scored = [&](float (&s)[scores], int i) {  // the products of block i's keys are complete
      pin(s);
      release(barriers.keys().empty(own.keys.stage));
      own.keys.next();
      if constexpr (Plan::own_output)
        if (i == span.count - 1) release(barriers.queries().empty(0));
    };
    const auto clear = [&](int i) {
      const int c0 = block_of(span, i) * n0;
      if (c0 + n0 > ragged) clear_tail(own, max(ragged - c0, 0));
    };
    float s[scores], rescale[2];
    uint32_t p[n0 / 4];
    barriers.queries().wait_full(own.queries);
    own.queries.next();
    wait_keys();
    multiply_keys(own, s);
    wgmma_wait<0>();
    // The scores of block i are there, and the products of the values before it on their way: of the first block there
    // are none, and its softmax is in the loop all the same, for in the code it is long.
#pragma unroll 1
    for (int i = 0;;) {
      scored(s, i);
      rows.run(s, block_of(span, i) * n0, rescale, absent);
      const bool more = i + 1 < span.count;
      if constexpr (Plan::exponentials_first)
        if (more) wait_keys();
      wgmma_wait<0>();
      pin(o);
      if (own.thread == 0 && i > 0) arrive(barriers.values().empty(own.values.stage));
      if (i > 0) own.values.next();
#pragma unroll
      for (int j = 0; j < results; j++) o[j] *= rescale[j / 2 % 2];
#pragma unroll
      for (int j = 0; j < n0 / 4; j++) p[j] = round(s[2 * j], s[2 * j + 1]);
      clear(i++);
      if (!more) break;
      if constexpr (!Plan::exponentials_first) wait_keys();
      if constexpr (Plan::pingpong) join_barrier(kTurnBarrier + own.index, 2 * kWarpgroup);
      multiply_keys(own, s);
      barriers.values().wait_full(own.values);
      multiply_values(own, p, o);
      if constexpr (Plan::pingpong)
        signal_barrier(kTurnBarrier + (own.index + 1) % Plan::consumers, 2 * kWarpgroup);
      wgmma_wait<1>();
    }
    barriers.values().wait_full(own.values);
    multiply_values(own, p, o);
    wgmma_wait<0>();
    pin(o);
    release(barriers.values().empty(own.values.stage));
    own.values.next();
  }

  // ---- results ----

  TW_SM90 void store(const Consumer& own, const FmhaSpan& span, Rows& rows, float (&o)[results]) const {
    float scale[2], lse[2];
    rows.finish(span.head, scale, lse);
    const int top = top_of(own, span), row = row_of(own, span);
    const int end = span.end, first = span.q_first, b = C::varlen ? 0 : span.b;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (row + h * 8 >= end) scale[h] = 0.0f, lse[h] = minus_infinity();
      if constexpr (C::lse)
        if (own.thread % 4 == 0 && row + h * 8 < span.all)
          gpu::store_global((float*)args.lse.ptr + b * args.lse.batch + span.head * args.lse.head +
                                (first + row + h * 8) * args.lse.row, lse[h]);
    }
    uint32_t x[results / 2];
#pragma unroll
    for (int i = 0; i < results / 2; i++) {
      const float factor = scale[i % 2], low = o[2 * i] * factor, high = o[2 * i + 1] * factor;
      x[i] = factor == 0.0f ? 0u : round(low, high);
    }
    const bool staged = span.count > 0;  // what has no keys has no place in shared memory either
    if (staged) stage_results(own, x);
    // Rows of the next item may follow.
    const bool whole = staged && (!C::varlen || top + 64 <= span.all);
    if (whole) store_tile(own, {first + top, span.head, b}, top < span.all);
    else store_each(own, span, staged);
    if constexpr (!Plan::own_output)
      if (span.count > 0 && own.thread == 0) {
        wait_stores_read<0>();
        arrive(barriers.queries().empty(0));
      }
  }

  TW_SM90 uint32_t results_at(const Consumer& own) const { return shared + Plan::o_at + own.index * 64 * 128; }

  TW_SM90 void stage_results(const Consumer& own, const uint32_t (&x)[results / 2]) const {
    const uint32_t base = results_at(own);
    if constexpr (Plan::own_output) {
      if (own.thread == 0) wait_stores_read<0>();
      join_barrier(kConsumerBarrier + own.index, kWarpgroup);
    }
    // Four 8 x 8 pieces at a time: both halves of 16 rows, 16 columns.
    const int lane = own.thread % 32, line = own.thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int j = 0; j < results / 8; j++) {
      const int block = 2 * j + lane / 16;
      const uint32_t four[4] = {x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]};
      store_fragments(swizzled(base + j / 4 * (m0 * 128), line, block % 8), four);
    }
    fence_async_proxy();
    join_barrier(kConsumerBarrier + own.index, kWarpgroup);
  }

  TW_SM90 void store_tile(const Consumer& own, FmhaPlace at, bool exists) const {
    if (own.thread != 0 || !exists) return;
#pragma unroll
    for (int i = 0; i < C::hdim_v / 64; i++) store_rows(params.maps[3], results_at(own) + i * (m0 * 128), i * 64, at);
    commit_stores();
  }

  // Row by row, those that exist; zeros unless results are in shared memory.
  TW_SM90 void store_each(const Consumer& own, const FmhaSpan& span, bool staged) const {
    constexpr int kChunks = C::hdim_v / 8;
    const int top = top_of(own, span), b = C::varlen ? 0 : span.b;
    char* const to = (char*)args.o.ptr +
                     (b * args.o.batch + span.head * args.o.head + (int64_t)(span.q_first + top) * args.o.row) * 2;
#pragma unroll 1
    for (int i = own.thread; i < 64 * kChunks; i += kWarpgroup) {
      const int line = i / kChunks, chunk = i % kChunks;
      if (top + line >= span.all || chunk * 8 >= (int)args.hdim_v) continue;
      gpu::Words<4> x = {};
      if (staged) x = gpu::load_shared<4>(swizzled(results_at(own) + chunk / 8 * (m0 * 128), line, chunk % 8));
      gpu::store_global(to + line * args.o.row * 2 + chunk * 16, x);
    }
    if (staged) join_barrier(kConsumerBarrier + own.index, kWarpgroup);  // the memory is free
  }
};

}  // namespace tw::sm90

#define TW_FMHA_WS_KERNEL(NAME, ...)                                                                               \
  extern "C" __global__ void __launch_bounds__(tw::sm90::Fmha<__VA_ARGS__>::threads, 1)                            \
      NAME(const __grid_constant__ tw_fmha_ws_params params) {                                                     \
    tw::sm90::Fmha<__VA_ARGS__>::run(params);                                                                      \
  }
