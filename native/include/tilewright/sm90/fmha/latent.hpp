// Hopper's attention over a latent cache (multi-head latent attention): one key head for all query heads, whose keys
// hold their values, the first elements of each. As sm90/fmha/decode.hpp, but what memory has is read once: slots of the
// ring have three panels of a block's keys, which are values too, and go back as soon as both products are done with
// them. Up to 32 rows belong to a consumer warpgroup; tiles of 64 have two, each with rows of its own.
//
//   TW_FMHA_WS_LATENT_KERNEL(symbol, Config)   its only parameter is tw_fmha_ws_params; 1-D grid
//
// Valid configurations (FmhaLatentPlan asserts all of it):
//   types     fp16 or bf16, the same of queries, cache and results
//   heads     of keys a multiple of 192 elements, of values one of 64, not longer
//   tiles     m0 = 8, 16, 32 or 64 rows, with pack_gqa all query heads; n0 = 64
//   features  those of sm90/fmha/decode.hpp, without factors
//
// Few parts of the keys are added by who comes last, in their order; many are left to the combine stage, which has more
// threads for them.
#pragma once
#include "tilewright/sm90/fmha/decode_producer.hpp"
#include "tilewright/sm90/fmha/transposed.hpp"
#include "tilewright/sm90/blocks/registers.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaLatentPlan {
  using Q = typename C::Q;
  using K = typename C::K;
  using X = Q;
  static constexpr bool bytes = false;
  static constexpr int q = C::hdim_q, v = C::hdim_v, n0 = C::n0, tiles = n0 / 64;
  static constexpr int consumers = C::m0 > 32 ? C::m0 / 32 : 1, m0 = C::m0 / consumers;
  // Registers come in quarters of a multiprocessor: a ninth warp would leave 168 to each thread, so two consumers take
  // what a whole warpgroup of producers gives back.
  static constexpr bool moves = consumers > 1;
  static constexpr int threads = consumers * kWarpgroup + (moves ? kWarpgroup : kWarp);
  static constexpr int registers_producer = 40, registers_consumer = 232;

  // A slot has three panels of 128 bytes and 64 keys.
  static constexpr int panel = 64, slot_panels = 3, panel_bytes = n0 * 128, slot_bytes = slot_panels * panel_bytes;
  static constexpr int parts = q / panel / slot_panels;
  static constexpr int line(int) { return 128; }
  static constexpr bool shares = false;
  static constexpr int map_of(int) { return 1; }
  static constexpr int first_panel(int part) { return part * slot_panels; }
  static constexpr int panels_of(int) { return slot_panels; }
  static constexpr int bytes_of(int) { return slot_bytes; }

  static_assert((is_same<X, fp16> || is_same<X, bf16>) && is_same<K, Q>, "16-bit elements");
  static_assert(C::m0 == 8 || C::m0 == 16 || C::m0 == 32 || C::m0 == 64, "columns of the instruction");
  static_assert(n0 == 64 && q % (slot_panels * panel) == 0 && v % panel == 0 && v <= q, "values are panels of keys");

  // Behind the ring, for each consumer: queries, probabilities, maxima of the warps; then barriers.
  // (tilewright_fmha/config/latent.py has the same sums.)
  static constexpr int q_bytes = m0 * q * 2, p_bytes = tiles * m0 * 128, warps_bytes = 2 * 4 * m0 * 4;
  static constexpr int barrier_bytes = 512;
  static constexpr int own_bytes = q_bytes + p_bytes + warps_bytes, all = 232448;
  static constexpr int resident = 1;
  static constexpr int fitting = (all - consumers * own_bytes - barrier_bytes) / slot_bytes;
  static constexpr int stages = C::stages ? C::stages : fitting;
  static constexpr int rows_at = stages * slot_bytes, p_at = rows_at + q_bytes, warps_at = p_at + p_bytes;
  static constexpr int barriers_at = rows_at + consumers * own_bytes, shared_bytes = barriers_at + barrier_bytes;
  static constexpr int joined_parts = 8;  // at most (tilewright_fmha/config/latent.py)
  static_assert(consumers == 1 || own_bytes % 1024 == 0, "swizzled panels begin at multiples of 1024");
  static_assert(stages >= 2 * parts && stages <= 12 && shared_bytes <= all, "two blocks fit");
};

template <class C>
struct FmhaLatent {
  using Plan = FmhaLatentPlan<C>;
  using X = typename Plan::X;
  using Ring = RingState<Plan::stages>;
  using Columns = FmhaColumns<C, Plan>;
  using Products = FmhaTransposed<C, Plan>;
  using Scores = typename Products::Scores;
  using Results = typename Products::Results;
  using O = typename C::O;
  static constexpr int threads = Plan::threads, m0 = Plan::m0, n0 = C::n0, value_tiles = Products::value_tiles;
  static constexpr int parts = Plan::parts, panels = Plan::slot_panels;

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaDecodeBarriers<Plan> barriers;

  static TW_SM90 void run(const tw_fmha_ws_params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const FmhaLatent self = {params, params.args, shared, {shared + Plan::barriers_at}};
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / kWarp, 0);
    if (threadIdx.x == Plan::consumers * kWarpgroup) {
      prefetch_map(params.maps[1]);
      self.barriers.init();
    }
    __syncthreads();
    launch_dependents();
    wait_for_previous_launch();
    if (warp >= 4 * Plan::consumers) {
      if constexpr (Plan::moves) setmaxnreg_dec<Plan::registers_producer>();
      if (warp == 4 * Plan::consumers) FmhaDecodeProducer<C, Plan>{params, params.args, shared, self.barriers}.produce();
    } else {
      if constexpr (Plan::moves) setmaxnreg_inc<Plan::registers_consumer>();
      self.consume();
    }
    gpu::fmha_publish(params.args, (int)threadIdx.x, [] {});
  }

  TW_SM90 void consume() const {
    const int consumer = Plan::consumers == 1 ? 0 : warpgroup_index();
    const uint32_t own = shared + consumer * Plan::own_bytes;
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k);
    Ring ring;
    RingState<2> next;
    uint32_t turn = 0;  // which of the places for maxima
    for (;;) {
      barriers.next().wait_full(next);
      Results o;
#pragma unroll
      for (int i = 0; i < value_tiles; i++)
#pragma unroll
        for (int e = 0; e < m0 / 2; e++) o[i][e] = 0.0f;
      FmhaPiece piece = piece_of(next, consumer);
      if (piece.count < 0) return;
      Columns columns(args, piece, group);
      if (piece.count > 0) {
        Columns::meet();  // all are done with the piece before
        Products::load_queries(args, own, piece, group, turn);
        attend(piece, columns, o, ring, own, turn);
      }
      columns.finish(Products::place_of_maxima(own, turn));
      piece = piece_of(next, consumer);  // again, rather than in registers all along
      const tw_fmha_args* seen = &args;
      asm volatile("" : "+l"(seen));  // nor what follows from the arguments alone
      const FmhaLatent end = {params, *seen, shared, barriers};
      end.store(columns, o, piece, group, own);
      if (args.splits > 1 && args.splits <= Plan::joined_parts) {
        const int ticket = piece.ticket * Plan::consumers + consumer;
        end.add_parts(piece, group, seen->counters + gpu::kFmhaTickets + ticket, Products::place_of_maxima(own, turn));
      }
      __syncwarp();
      if (Columns::lane() == 0) arrive(barriers.next().empty(next.stage));
      next.next();
    }
  }

  // The part of a piece that a consumer has.
  TW_SM90 FmhaPiece piece_of(const RingState<2>& next, int consumer) const {
    FmhaPiece piece = load_message<FmhaPiece>(barriers.slot(next.stage));
    piece.count = __shfl_sync(0xffffffffu, piece.count, 0);  // warps agree: descriptors stay in uniform registers
    piece.first += consumer * m0, piece.rows = min(max(piece.rows - consumer * m0, 0), m0);
    return piece;
  }

  TW_SM90 void attend(const FmhaPiece& piece, Columns& columns, Results& o, Ring& ring, uint32_t own,
                      uint32_t& turn) const {
    const int64_t room = C::varlen && !C::paged ? args.total_k - piece.k_place : args.seq_k;
    const int ragged = C::paged || piece.k_rows < room ? piece.k_rows : 0x7fffffff;
    Scores s;
    float rescale[Columns::columns];
#pragma unroll 1
    for (int i = 0; i < piece.count; i++) {
      const int c0 = fmha_block_of<C>(piece, i) * n0;
      int stages[parts];
      uint32_t absent = 0;
      multiply_keys(own, ring, stages, absent, s[0]);
      columns.run(s, c0, absent, Products::place_of_maxima(own, turn), rescale);
      Products::store_probabilities(own, s);
      bool same = true;
#pragma unroll
      for (int c = 0; c < Columns::columns; c++) same &= rescale[c] == 1.0f;
      if (!__all_sync(0xffffffffu, same))
#pragma unroll
        for (int t = 0; t < value_tiles; t++)
#pragma unroll
          for (int e = 0; e < m0 / 2; e++) o[t][e] *= rescale[e / 4 * 2 + e % 2];
      Columns::meet();  // P is there
      if (c0 + n0 > ragged) clear_tail(stages, max(ragged - c0, 0));
      multiply_values(own, stages, o);
    }
  }

  TW_SM90 uint32_t slot(int stage) const { return shared + stage * Plan::slot_bytes; }

  // S^T = K Q^T, part by part as keys arrive. Instructions as narrow as these wait for the one before if both add to the
  // same sums, so there are two.
  TW_SM90 void multiply_keys(uint32_t own, Ring& ring, int (&stages)[parts], uint32_t& absent, float (&s)[m0 / 2]) const {
    const Descriptor q = k_major(own + Plan::rows_at);
    float odd[m0 / 2];
#pragma unroll
    for (int e = 0; e < m0 / 2; e++) s[e] = 0.0f, odd[e] = 0.0f;
    pin(s), pin(odd);
#pragma unroll
    for (int part = 0; part < parts; part++) {
      stages[part] = ring.stage;
      barriers.ring().wait_full(ring);
      if constexpr (C::paged)
        if (part == 0) absent = gpu::load_shared<1>(barriers.absent(ring.stage)).w[0];
      const Descriptor k = k_major(slot(ring.stage));
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < panels * 4; c++)
        wgmma<WgmmaText<X, X, false, false>>(c % 2 ? odd : s, k.plus(c / 4 * (n0 * 8) + c % 4 * 2),
                                             q.plus((part * panels + c / 4) * (m0 * 8) + c % 4 * 2), part > 0 || c > 1);
      wgmma_commit();
      ring.next();
    }
    wgmma_wait<0>();
    pin(s), pin(odd);
#pragma unroll
    for (int e = 0; e < m0 / 2; e++) s[e] += odd[e];
  }

  // O^T += V^T P^T, and slots go back in their order.
  TW_SM90 void multiply_values(uint32_t own, const int (&stages)[parts], Results& o) const {
    const Descriptor p = k_major(own + Plan::p_at);
#pragma unroll
    for (int i = 0; i < value_tiles; i++) pin(o[i]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < value_tiles; i++) {
      const Descriptor v = mn_major(slot(stages[i / panels]) + i % panels * Plan::panel_bytes, Plan::panel_bytes);
#pragma unroll
      for (int c = 0; c < n0 / 16; c++)
        wgmma<WgmmaText<X, X, true, false>>(o[i], v.plus(c * 128), p.plus(c % 4 * 2), 1);
      if (i % panels == panels - 1 || i == value_tiles - 1) wgmma_commit();
    }
    for_each_part<0>(stages);
#pragma unroll
    for (int i = 0; i < value_tiles; i++) pin(o[i]);
  }
  template <int kPart>
  TW_SM90 void for_each_part(const int (&stages)[parts]) const {
    if constexpr (kPart < parts) {
      constexpr int kGroups = (value_tiles + panels - 1) / panels;
      if constexpr (kPart < kGroups) wgmma_wait<kGroups - 1 - kPart>();
      __syncwarp();
      if (Columns::lane() == 0) arrive(barriers.ring().empty(stages[kPart]));
      for_each_part<kPart + 1>(stages);
    }
  }

  // Values beyond an item's keys are not to be multiplied, not even by zero: the copy engine knows only where the
  // tensor ends. (A consumer that still multiplies these keys hides what comes of it.)
  TW_SM90 void clear_tail(const int (&stages)[parts], int rows) const {
#pragma unroll
    for (int t = 0; t < value_tiles; t++) {
      const uint32_t to = slot(stages[t / panels]) + t % panels * Plan::panel_bytes + rows * 128;
#pragma unroll 1
      for (int i = Columns::thread(); i < (n0 - rows) * 8; i += kWarpgroup)
        gpu::store_shared(to + i * 16, gpu::Words<4>{});
    }
    fence_async_proxy();
    Columns::meet();
  }

  // A row of the tile.
  struct Row {
    int head, query;
    bool exists;
  };
  static TW_SM90 Row row_of(const FmhaPiece& piece, int group, int r) {
    const int g = C::pack_gqa ? group : 1, p = piece.first + r, query = p / g;
    const bool exists = r < piece.rows && query < piece.q_rows && !piece.skipped;
    return {C::pack_gqa ? piece.head * group + (p - query * g) : piece.head, query, exists};
  }
  TW_SM90 int64_t line_of(const FmhaPiece& piece, const Row& row) const {
    FmhaItem item = {};
    item.q_first = piece.q_first;
    return gpu::fmha_line_of<C>(args, item, piece.b, row.head, row.query);
  }
  TW_SM90 int64_t place_in(const tw_fmha_tensor& tensor, const FmhaPiece& piece, const Row& row) const {
    return (C::varlen ? 0 : piece.b) * tensor.batch + row.head * tensor.head +
           (int64_t)(piece.q_first + row.query) * tensor.row;
  }
  TW_SM90 void store_lse(const FmhaPiece& piece, const Row& row, float lse) const {
    if constexpr (C::lse) gpu::store_global((float*)args.lse.ptr + place_in(args.lse, piece, row), lse);
  }
  // Logarithm to base 2 of a row's sink.
  TW_SM90 float sink_of(const Row& row) const {
    if constexpr (!C::learned_sinks) return gpu::minus_infinity();
    else return row.exists ? gpu::load_constant<float>(args.sinks + row.head) * gpu::kLog2E : gpu::minus_infinity();
  }

  // A part of the keys as the combine stage takes it, or the results themselves: half of the columns at a time through
  // the place of queries, so that the code for a row stands once. What is run once for each piece comes from memory.
  static constexpr int half_tiles = value_tiles / 2, half = half_tiles * 64, row_bytes = (half + 8) * 4;
  static_assert(value_tiles % 2 == 0 && m0 * row_bytes <= Plan::q_bytes && m0 * 8 <= Plan::p_bytes);

  TW_SM90 void store(const Columns& columns, const Results& o, const FmhaPiece& piece, int group, uint32_t own) const {
    const uint32_t rows = own + Plan::rows_at, sums = own + Plan::p_at;
    if (Columns::warp() == 0 && Columns::lane() < 4)
#pragma unroll
      for (int c = 0; c < Columns::columns; c++)
        store_words(sums + Columns::row_of(c) * 8, gpu::bits_of(columns.m[c]), gpu::bits_of(columns.l[c]));
    store_half<0>(o, piece, group, rows, sums);
    Columns::meet();
    store_half<1>(o, piece, group, rows, sums);
  }
  template <int kHalf>
  TW_SM90 void store_half(const Results& o, const FmhaPiece& piece, int group, uint32_t rows, uint32_t sums) const {
    const uint32_t to = rows + (Columns::warp() * 16 + Columns::lane() / 4) * 4;
#pragma unroll
    for (int c = 0; c < Columns::columns; c++)
#pragma unroll
      for (int i = 0; i < 2 * half_tiles; i++)
        store_word(to + Columns::row_of(c) * row_bytes + (i / 2 * 64 + i % 2 * 8) * 4,
                   gpu::bits_of(o[kHalf * half_tiles + i / 2][c / 2 * 4 + i % 2 * 2 + c % 2]));
    Columns::meet();
    store_rows(piece, group, rows, sums, kHalf * half);
  }
  TW_SM90 void store_rows(const FmhaPiece& piece, int group, uint32_t rows, uint32_t sums, int from) const {
    const int lane = Columns::lane();
    const bool alone = args.splits == 1;
#pragma unroll 1
    for (int r = Columns::warp(); r < piece.rows; r += 4) {
      const Row row = row_of(piece, group, r);
      const gpu::Words<2> of_row = gpu::load_shared<2>(sums + r * 8);
      float most = gpu::float_of(of_row.w[0]), total = row.exists ? gpu::float_of(of_row.w[1]) : 0.0f, factor = 1.0f;
      if (const float sink = alone ? sink_of(row) : gpu::minus_infinity(); sink != gpu::minus_infinity()) {
        const float all = fmaxf(most, sink);
        factor = gpu::exp2(most - all), total = total * factor + gpu::exp2(sink - all), most = all;
      }
      const float scale = total == 0.0f ? 0.0f : factor / total;
      const int64_t line = piece.part * gpu::fmha_lines<C>(args) + line_of(piece, row);
      if (lane == 0 && from == 0) {
        const float lse = total == 0.0f ? gpu::minus_infinity() : (most + gpu::log2(total)) * gpu::kLn2;
        if (alone) store_lse(piece, row, lse);
        else gpu::store_coherent(args.lse_acc + line, gpu::Words<1>{gpu::bits_of(lse)});
      }
#pragma unroll
      for (int i = 0; i < half / 128; i++) {
        const int at = (i * kWarp + lane) * 4, column = from + at;
        const gpu::Words<4> w = gpu::load_shared<4>(rows + r * row_bytes + at * 4);
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; e++) x[e] = scale == 0.0f ? 0.0f : gpu::float_of(w.w[e]) * scale;
        if (alone) store_run(piece, row, column, x);
        else gpu::store_coherent(args.o_acc + line * C::hdim_v + column, gpu::pack<fp32, 4>(x).data);
      }
    }
  }
  TW_SM90 void store_run(const FmhaPiece& piece, const Row& row, int column, const float (&x)[4]) const {
    char* const to = (char*)args.o.ptr + (place_in(args.o, piece, row) + column * args.o.col) * size_of<O>;
    gpu::fmha_store_run<O>(to, x, (int)args.hdim_v - column, args.o.col);
  }

  // The last of a tile's parts adds them all. `word`: of shared memory.
  TW_SM90 void add_parts(const FmhaPiece& piece, int group, uint32_t* ticket, uint32_t word) const {
    const int lane = Columns::lane(), warp = Columns::warp(), splits = (int)args.splits;
    Columns::meet();
    if (Columns::thread() == 0) store_word(word, gpu::arrive(ticket));
    Columns::meet();
    if ((int)gpu::load_shared<1>(word).w[0] + 1 != splits) return;
    if (Columns::thread() == 0) gpu::store_coherent(ticket, gpu::Words<1>{0});
    const int64_t step = gpu::fmha_lines<C>(args);
#pragma unroll 1
    for (int r = warp; r < piece.rows; r += 4) {
      const Row row = row_of(piece, group, r);
      const int64_t line = line_of(piece, row);
      constexpr int kChunks = C::hdim_v / 128;
      const auto lse_of = [&](int p) {
        return gpu::float_of(gpu::load_coherent<1>(args.lse_acc + line + p * step).w[0]) * gpu::kLog2E;
      };
      const int parts = row.exists ? splits : 0;
      const float sink = sink_of(row);
      float most = sink;
#pragma unroll 4
      for (int p = 0; p < parts; p++) most = fmaxf(most, lse_of(p));
      const float safe = most == gpu::minus_infinity() ? 0.0f : most;
      float total = sink == gpu::minus_infinity() ? 0.0f : gpu::exp2(sink - safe), sum[kChunks][4] = {};
#pragma unroll 2
      for (int p = 0; p < parts; p++) {
        const float weight = gpu::exp2(lse_of(p) - safe);
        total += weight;
#pragma unroll
        for (int i = 0; i < kChunks; i++) {
          const gpu::Words<4> w =
              gpu::load_coherent<4>(args.o_acc + (line + p * step) * C::hdim_v + (i * kWarp + lane) * 4);
#pragma unroll
          for (int e = 0; e < 4; e++) sum[i][e] = gpu::fma(weight, gpu::float_of(w.w[e]), sum[i][e]);
        }
      }
      const float scale = total == 0.0f ? 0.0f : 1.0f / total;
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[i][e] = scale == 0.0f ? 0.0f : sum[i][e] * scale;
        store_run(piece, row, (i * kWarp + lane) * 4, sum[i]);
      }
      if (lane == 0)
        store_lse(piece, row, total == 0.0f ? gpu::minus_infinity() : (most + gpu::log2(total)) * gpu::kLn2);
    }
  }
};

}  // namespace tw::sm90

#define TW_FMHA_WS_LATENT_KERNEL(NAME, ...)                                                       \
  extern "C" __global__ void __launch_bounds__(tw::sm90::FmhaLatent<__VA_ARGS__>::threads, 1)     \
      NAME(const __grid_constant__ tw_fmha_ws_params params) {                                    \
    tw::sm90::FmhaLatent<__VA_ARGS__>::run(params);                                              \
  }
