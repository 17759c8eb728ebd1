// The gradients of q, k and v, from what forward stored (lse) and delta = rowsum(do * o), with the scores made again:
//     P = e^(s - lse)   dP = dO V^T   dS = P * (dP - delta)   dV = P^T dO   dK = scale dS^T Q   dQ = scale dS K
//   TW_FMHA_BACKWARD(name, Config)     name: tw_cpu_kernel with tw_fmha_args as args: dk and dv, and what convert_dq
//                                      makes dq and dbias of
//   TW_FMHA_WORKSPACE(name, Config)    name_workspace: bytes of scratch that a launch with these args needs
// The blocks of keys of a head are dealt out to args.splits slices. A piece of work is one slice of one key head (of
// all heads, or all items, that share a gradient of the bias): it owns its rows of dk and dv and its slice of dq_acc,
// and goes through blocks, heads and queries in order. So sums do not depend on who came first.
#pragma once
#include "tilewright/cpu/fmha/backward/block.hpp"
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaBackward {
  using B = GradBlocking<Config>;
  using Products = GradProducts<Config>;
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  using O = typename Config::O;
  using Bias = typename Config::Bias;
  static constexpr typename B::Layout at = B::layout();
  static constexpr int depth = B::depth, turned = B::n0 * depth;  // words from step to step of P and dS, turned
  static constexpr bool masked = Config::mask != FmhaMask::no;

  const tw_fmha_args& args;
  char* const own;
  FmhaSeed seed = {};

  template <class T>
  TW_INLINE T* part(int64_t offset) const {
    return (T*)(own + offset);
  }
  static TW_INLINE int64_t batch_of(int64_t b) { return Config::varlen ? 0 : b; }

  static int64_t workspace(const tw_fmha_args&) { return Config::team * at.bytes; }

  static void run(const tw_fmha_args& args, const tw_team* members) {
    Crew crew = crew_of(members, Config::team);
    if (crew.rank >= crew.size) return;
    FmhaBackward self{args, (char*)args.workspace + crew.rank * at.bytes};
    self.all(crew);
  }

  void all(Crew& crew) {
    if constexpr (Config::dropout) seed = fmha_seed(args);
    const bool all_items = Config::dbias && args.dbias.batch == 0, all_heads = Config::dbias && args.dbias.head == 0;
    const int64_t items = all_items ? 1 : args.batch, heads = all_heads ? 1 : args.heads_k;
    const int64_t pieces = items * heads * args.splits;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t slice = piece % args.splits, head = piece / args.splits % heads, item = piece / args.splits / heads;
      for (int64_t b = item; b < (all_items ? args.batch : item + 1); b++)
        for (int64_t hk = head; hk < (all_heads ? args.heads_k : head + 1); hk++) keys_of(b, hk, slice);
    }
    crew.end_stage(pieces);
  }

  // All blocks of a slice of one key head of item b.
  TW_NOINLINE void keys_of(int64_t b, int64_t hk, int64_t slice) {
    FmhaItem item = fmha_item<Config>(args, b);
    if (Config::skip_min && item.skip) item.q_rows = 0;
    const int64_t rows = Config::varlen ? item.k_rows : args.seq_k;
    const int64_t shown = Config::randval ? args.seq_k : rows;
    for (int64_t first = slice * B::n0; first < shown; first += args.splits * B::n0) {
      const int64_t room = min_of(rows - first, B::n0), count = max_of(min_of(item.k_rows - first, B::n0), 0);
      if constexpr (Config::randval) store_random(item, b, hk, first, min_of(args.seq_k - first, B::n0));
      if (room <= 0) continue;
      if (count > 0 && item.q_rows > 0) block(item, b, hk, first, count);
      const int64_t filled = count > 0 && item.q_rows > 0 ? count : 0;
      const float keep = Config::dropout ? (float)args.keep_scale : 1.0f;
      store<K, B::hdim_q>(args.dk, item, b, hk, first, filled, room, at.dk, args.hdim_q, (float)args.scale);
      store<V, B::hdim_v>(args.dv, item, b, hk, first, filled, room, at.dv, args.hdim_v, keep);
    }
  }

  template <class E, int kWidth>
  TW_NOINLINE void store(const tw_fmha_tensor& to, const FmhaItem& item, int64_t b, int64_t hk, int64_t first,
                         int64_t filled, int64_t room, int64_t offset, int64_t hdim, float factor) const {
    for (int64_t r = 0; r < room; r++)
      fmha_store_line<E>(r < filled ? part<float>(offset) + r * kWidth : nullptr, factor, hdim,
                         (char*)rows_of<E>(to, item.k_first + first + r, b, hk).at, to.col);
  }

  template <class E>
  static TW_INLINE GradRows rows_of(const tw_fmha_tensor& tensor, int64_t row, int64_t b, int64_t h) {
    const int64_t from = batch_of(b) * tensor.batch + h * tensor.head + row * tensor.row;
    return {(const char*)tensor.ptr + from * size_of<E>, tensor.row, tensor.col};
  }
  // Place of query row i of head h in delta and dq_acc.
  TW_INLINE int64_t line_of(const FmhaItem& item, int64_t b, int64_t h, int64_t i) const {
    return Config::varlen ? h * args.total_q + item.q_first + i : (b * args.heads_q + h) * args.seq_q + i;
  }

  // Keys [first, first + count) with all queries of all heads of their group.
  TW_NOINLINE void block(const FmhaItem& item, int64_t b, int64_t hk, int64_t first, int64_t count) {
    char* const gathered = part<char>(at.gathered);
    const int64_t row = item.k_first + first, g = args.heads_q / args.heads_k, slice = first / B::n0 % args.splits;
    const GradRows keys = Products::template dense<K>(rows_of<K>(args.k, row, b, hk), count, args.hdim_q, gathered);
    Products::template along<K>(keys, count, args.hdim_q, part<uint32_t>(at.k_along));
    Products::template across<K, B::hdim_q>(keys, count, args.hdim_q, part<uint32_t>(at.k_across));
    const GradRows values = Products::template dense<V>(rows_of<V>(args.v, row, b, hk), count, args.hdim_v, gathered);
    Products::template along<V>(values, count, args.hdim_v, part<uint32_t>(at.v_along));
    __builtin_memset(part<float>(at.dk), 0, (size_t)(at.edge - at.dk));
    for (int64_t h = hk * g; h < hk * g + g; h++)
      for (int64_t i = 0; i < item.q_rows; i += B::m0)
        queries(item, b, h, slice, i, min_of(item.q_rows - i, B::m0), first, count);
  }

  TW_INLINE void queries(const FmhaItem& item, int64_t b, int64_t h, int64_t slice, int64_t i, int64_t rows,
                         int64_t first, int64_t count) {
    if constexpr (masked) {
      const FmhaRange range = fmha_range(args, item, i, i + rows);
      if (first >= range.last || (first >= range.sink_last && first + count <= range.first)) return;
    }
    float *const s = part<float>(at.s), *const dp = part<float>(at.dp);
    load_rows(item, b, h, i, rows);
    Products::template product<B::q_words, 1, B::n0, false>(rows, count, ceil_div(args.hdim_q, depth),
                                                            part<uint32_t>(at.q_rows), part<uint32_t>(at.k_along), s);
    Products::template product<B::v_words, 1, B::n0, false>(rows, count, ceil_div(args.hdim_v, depth),
                                                            part<uint32_t>(at.do_rows), part<uint32_t>(at.v_along), dp);
    scores(item, b, h, slice, i, rows, first, count);
    const int64_t steps = ceil_div(rows, depth);
    Products::template product<1, turned, B::hdim_v, true>(count, args.hdim_v, steps, (const uint32_t*)s,
                                                           part<uint32_t>(at.do_across), part<float>(at.dv));
    Products::template product<1, turned, B::hdim_q, true>(count, args.hdim_q, steps, (const uint32_t*)dp,
                                                           part<uint32_t>(at.q_across), part<float>(at.dk));
    const int64_t slices = Config::varlen ? args.total_q * args.heads_q : args.batch * args.heads_q * args.seq_q;
    float* const dq = args.dq_acc + (slice * slices + line_of(item, b, h, i)) * Config::hdim_q;
    static_assert(Config::hdim_q == B::hdim_q, "heads are padded to whole vectors");
    Products::template add_rows<B::n0 / depth, B::hdim_q>(
        rows, args.hdim_q, ceil_div(count, depth), B::pairs ? part<uint32_t>(at.ds) : (const uint32_t*)dp,
        part<uint32_t>(at.k_across), dq, part<float>(at.edge));
  }

  TW_NOINLINE void load_rows(const FmhaItem& item, int64_t b, int64_t h, int64_t i, int64_t rows) const {
    char* const gathered = part<char>(at.gathered);
    const int64_t row = item.q_first + i;
    const GradRows q = Products::template dense<Q>(rows_of<Q>(args.q, row, b, h), rows, args.hdim_q, gathered);
    Products::template groups<Q, B::q_words>(q, rows, args.hdim_q, part<uint32_t>(at.q_rows));
    Products::template across<Q, B::hdim_q>(q, rows, args.hdim_q, part<uint32_t>(at.q_across));
    const GradRows d = Products::template dense<O>(rows_of<O>(args.d_o, row, b, h), rows, args.hdim_v, gathered);
    Products::template groups<O, B::v_words>(d, rows, args.hdim_v, part<uint32_t>(at.do_rows));
    Products::template across<O, B::hdim_v>(d, rows, args.hdim_v, part<uint32_t>(at.do_across));
    float *const lse = part<float>(at.lines), *const delta = lse + round_up(B::m0, 64);
    for (int64_t r = 0; r < rows; r++) {
      const float x = ((const float*)args.lse.ptr)[batch_of(b) * args.lse.batch + h * args.lse.head + (row + r) * args.lse.row];
      lse[r] = x == -__builtin_inff() ? __builtin_inff() : x;  // a row that saw nothing has no probabilities
      delta[r] = args.delta[line_of(item, b, h, i + r)];
    }
  }

  // One row's statistics, mask, bias and dropout; columns count from the block's first.
  struct Row {
    float lse, delta, slope, diagonal;
    int32_t lo, hi;  // columns in [lo, hi), and those below `sink`, are visible
    const char* bias;
    const uint8_t* random;
    float* dbias;
  };

  TW_INLINE Row row_of(const FmhaItem& item, int64_t b, int64_t h, int64_t slice, int64_t i, int64_t r, int64_t rows,
                       int64_t first, int64_t count, uint8_t* random) const {
    const float* const lse = part<float>(at.lines);
    Row row = {};
    row.hi = (int32_t)count;
    if (r >= rows) {  // the other half of a pair
      row.hi = 0, row.lse = __builtin_inff();
      return row;
    }
    row.lse = lse[r], row.delta = lse[round_up(B::m0, 64) + r];
    const int64_t place = i + r + item.off;
    if (masked && args.right >= 0) row.hi = (int32_t)max_of(min_of(count, place + args.right + 1 - first), 0);
    if (masked && args.left >= 0) row.lo = (int32_t)min_of(max_of(place - args.left - first, 0), count);
    if constexpr (Config::bias == FmhaBias::elementwise)
      row.bias = (const char*)args.bias.ptr + (b * args.bias.batch + h * args.bias.head + (i + r) * args.bias.row +
                                               first * args.bias.col) * size_of<Bias>;
    if constexpr (Config::bias == FmhaBias::alibi) {
      row.slope = -args.slopes[b * args.slope_batch + h];
      row.diagonal = (float)(place - first);
    }
    if constexpr (Config::dropout)
      row.random = fmha_random_row(seed, b * args.heads_q + h, i + r, first, B::n0, random);
    if constexpr (Config::dbias) {
      const tw_fmha_tensor& to = args.dbias;
      const int64_t items = to.batch ? args.batch : 1, heads = to.head ? args.heads_q : 1, lines = to.row ? args.seq_q : 1;
      const int64_t columns = to.col ? args.seq_k : 1;
      const int64_t copy = to.col ? 0 : slice * items;
      row.dbias = args.dbias_acc + (((copy + (to.batch ? b : 0)) * heads + (to.head ? h : 0)) * lines +
                                    (to.row ? i + r : 0)) * columns + (to.col ? first : 0);
    }
    return row;
  }

  // P and dS of `rows` rows from S and dP, in their place.
  TW_NOINLINE void scores(const FmhaItem& item, int64_t b, int64_t h, int64_t slice, int64_t i, int64_t rows,
                          int64_t first, int64_t count) const {
    const int64_t n = round_up(count, kLanes * depth);
    const int32_t sink = (int32_t)(args.left >= 0 ? max_of(min_of(args.sink_size - first, count), 0) : 0);
    float *const s = part<float>(at.s), *const dp = part<float>(at.dp);
    uint32_t* const ds = part<uint32_t>(at.ds);
    for (int64_t r = 0; r < rows; r += depth) {
      Row of[depth];
      bool edges = false;
      TW_UNROLL
      for (int d = 0; d < depth; d++) {
        of[d] = row_of(item, b, h, slice, i, r + d, rows, first, count, part<uint8_t>(at.random) + d * B::random_line);
        edges = edges || of[d].hi < n || of[d].lo > 0;
      }
      if (edges) line<true>(of, sink, r, n, count, s, dp, ds);
      else line<false>(of, sink, r, n, count, s, dp, ds);
    }
  }

  template <bool kEdges>
  TW_NOINLINE void line(Row* of, int32_t sink, int64_t r, int64_t n, int64_t count, float* s, float* dp,
                        uint32_t* ds) const {
    f32v sums[depth] = {};  // of dbias that has one column
    for (int64_t j = 0; j < n; j += kLanes * depth) {
      f32v p[depth][depth], grad[depth][depth];
      TW_UNROLL
      for (int d = 0; d < depth; d++)
        TW_UNROLL
        for (int e = 0; e < depth; e++) {
          const int64_t c = j + e * kLanes;
          const f32v x = load_as<f32v>(s + (r + d) * B::n0 + c), y = load_as<f32v>(dp + (r + d) * B::n0 + c);
          both<kEdges>(of[d], sink, c, count, x, y, p[d][e], grad[d][e], sums[d]);
        }
      if constexpr (depth == 1) {
        store_as(s + r * B::n0 + j, p[0][0]);
        store_as(dp + r * B::n0 + j, grad[0][0]);
      } else {
        TW_UNROLL
        for (int e = 0; e < depth; e++) {
          store_as(s + r * B::n0 + j + e * kLanes, bf16_words(p[0][e], p[depth - 1][e]));
          store_as(dp + r * B::n0 + j + e * kLanes, bf16_words(grad[0][e], grad[depth - 1][e]));
        }
        TW_UNROLL
        for (int d = 0; d < depth; d++)
          store_bf16_pair(ds + (r + d) * (B::n0 / 2) + j / 2, grad[d][0], grad[d][depth - 1]);
      }
    }
    if constexpr (Config::dbias)
      if (args.dbias.col == 0)
        for (int d = 0; d < depth; d++)
          if (of[d].dbias) *of[d].dbias += sum_lanes(sums[d]);
  }

  // x: of S, y: of dP; to p (of dV's product) and grad (dS).
  template <bool kEdges>
  TW_INLINE void both(const Row& row, int32_t sink, int64_t c, int64_t count, f32v x, f32v y, f32v& p, f32v& grad,
                      f32v& sum) const {
    f32v t, slope = {};
    if constexpr (Config::softcap) {
      const float cap = (float)args.softcap;
      const f32v bent = tanh(x * ((float)args.scale / cap));
      slope = 1.0f - bent * bent;
      t = bent * cap;
    } else {
      t = x * (float)args.scale;
    }
    if constexpr (Config::bias == FmhaBias::elementwise) {
      if (row.bias) t += bias_at(row.bias, c, count - c);
    }
    if constexpr (Config::bias == FmhaBias::alibi) t += row.slope * abs((row.diagonal - (float)c) - lane_numbers());
    p = exp2((t - row.lse) * kLog2E);  // lse times log2(e) would be rounded once more
    if constexpr (kEdges) {
      const i32v column = __builtin_convertvector(lane_numbers(), i32v) + (int32_t)c;
      p = select(((column >= row.lo) | (column < sink)) & (column < row.hi), p, f32v{});
    }
    f32v kept = p;
    if constexpr (Config::dropout) {
      i32v dropped = {};
      if (row.random) dropped = (i32v)(widen_u8(row.random + c) < (uint32_t)args.drop_below);
      kept = select(dropped, f32v{}, p);
      y = select(dropped, f32v{}, y * (float)args.keep_scale);
    }
    grad = select(p == 0.0f, f32v{}, p * (y - row.delta));
    p = kept;
    if constexpr (Config::dbias) {
      if (args.dbias.col == 0) {
        sum += grad;
      } else if (row.dbias && c < count) {
        float* const to = row.dbias + c;
        store_f32_partial<fp32>(to, load_f32_partial<fp32>(to, count - c) + grad, min_of(count - c, kLanes));
      }
    }
    // Rows beyond the last are there to fill pairs: their scores are whatever lay there, and so is the slope.
    if constexpr (Config::softcap) grad = select(grad == 0.0f, f32v{}, grad * slope);
  }

  TW_INLINE f32v bias_at(const char* row, int64_t j, int64_t count) const {
    if (args.bias.col == 1) return load_f32_partial<Bias>(row + j * size_of<Bias>, max_of(min_of(count, kLanes), 0));
    if (args.bias.col == 0) return splat(to_float<Bias>(row));
    f32v x = {};
    for (int64_t k = 0; k < min_of(count, kLanes); k++)
      x[k] = to_float<Bias>(row + (j + k) * args.bias.col * size_of<Bias>);
    return x;
  }

  // The random bytes of columns [first, first + count) for all rows; zeros beyond the item's rows and columns.
  TW_NOINLINE void store_random(const FmhaItem& item, int64_t b, int64_t hk, int64_t first, int64_t count) const {
    const int64_t g = args.heads_q / args.heads_k, rows = Config::varlen ? item.q_rows : args.seq_q;
    for (int64_t h = hk * g; h < hk * g + g; h++)
      for (int64_t i = 0; i < rows; i++) {
        const int64_t drawn = i < item.q_rows ? item.k_rows - first : 0;
        const uint8_t* const bytes =
            fmha_random_row(seed, b * args.heads_q + h, i, first, count, part<uint8_t>(at.random));
        char* const to = (char*)args.randval.ptr + batch_of(b) * args.randval.batch + h * args.randval.head +
                         (item.q_first + i) * args.randval.row;
        for (int64_t k = 0; k < count; k++) to[(first + k) * args.randval.col] = k < drawn ? (char)bytes[k] : 0;
      }
  }
};

TW_NAMESPACE_END

#define TW_FMHA_BACKWARD(NAME, CONFIG)                               \
  TW_EXPORT void NAME(const void* args, tw_team* team) {             \
    tw::FmhaBackward<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }
#ifndef TW_FMHA_WORKSPACE
#define TW_FMHA_WORKSPACE(NAME, CONFIG) \
  TW_EXPORT int64_t NAME##_workspace(const tw_fmha_args* args) { return tw::FmhaBackward<CONFIG>::workspace(*args); }
#endif
