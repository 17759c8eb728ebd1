// Hopper's attention of many rows over parts of the keys: the loop of sm90/fmha/forward.hpp, whose tiles are each of a
// part of the keys, so that few tiles over many keys (a prefix that sequences share) fill the device. Results of parts
// are added by gpu/fmha/combine.hpp.
//
//   TW_FMHA_WS_PARTS_KERNEL(symbol, Config)   its only parameter is tw_fmha_ws_params; 1-D grid
//
// Valid configurations: those of sm90/fmha/forward.hpp without masks and learned sinks. With pack_gqa the query heads of
// a key head are rows of one tile, a query's heads next to each other; their number divides m0, and rows of items follow
// each other. The map of q is then (elements, heads of a key head, rows of all items, key heads), its boxes 64 x heads x
// m0 / heads x 1.
//
// A part is what the combine stage takes: o_acc = (P V) / l of its columns, lse_acc = log(l), natural; zeros and -inf
// where it saw nothing. A single part is the result.
#pragma once
#include "tilewright/gpu/fmha/splitkv_reduce.hpp"
#include "tilewright/sm90/fmha/forward.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaParts {
  using X = typename C::Q;
  static constexpr int results = C::hdim_v / 2;

  static TW_SM90 int group(const tw_fmha_args& args) {
    return C::pack_gqa ? (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k) : 1;
  }

  // Tile `id`: tiles of rows of one part follow each other, which read the same keys, then parts.
  static TW_SM90 FmhaSpan span(const tw_fmha_args& args, int id) {
    const uint32_t tiles = (uint32_t)args.q_tiles, splits = (uint32_t)args.splits;
    const uint32_t heads = (uint32_t)(C::pack_gqa ? args.heads_k : args.heads_q);
    const uint32_t part = (uint32_t)id / tiles, line = part / splits;
    const int g = group(args);
    FmhaSpan span;
    span.b = (int)(line / heads), span.head = (int)(line - (uint32_t)span.b * heads), span.off = (int)(part - line * splits);
    const FmhaItem item = fmha_item<C>(args, span.b);
    span.q_first = (int)item.q_first, span.k_place = (int)(C::varlen ? item.k_first : item.cache);
    span.k_rows = (int)item.k_rows, span.bad = item.bad, span.culprit = item.culprit;
    span.first = (id - (int)(part * tiles)) * C::m0;
    span.all = (int)(C::varlen ? item.q_rows : args.seq_q) * g;
    const bool skipped = C::skip_min && item.skip;
    span.end = skipped ? span.first : max(min(span.first + C::m0, (int)item.q_rows * g), span.first);
    span.last = span.blocks = span.count = 0;
    if (span.end > span.first) {
      const FmhaRange range = gpu::fmha_part<C>(args, item, span.off, 0, 1);
      const int from = (int)range.first / C::n0, to = ((int)range.last + C::n0 - 1) / C::n0;
      span.last = to, span.blocks = span.count = range.first < range.last ? to - from : 0;
    }
    return span;
  }

  // Where a packed tile's queries begin: the first head, the row among those of all items, the key head.
  static TW_SM90 FmhaPlace queries(const tw_fmha_args& args, const FmhaSpan& span) {
    const int row = span.q_first + (int)((uint32_t)span.first / (uint32_t)group(args));
    return {0, C::varlen ? row : span.b * (int)args.seq_q + row, span.head};
  }

  // Results of the thread's rows, `row` and the one 8 behind it, from its registers.
  template <class Rows>
  static TW_SM90 void put(const tw_fmha_args& args, const FmhaSpan& span, Rows& rows, const float (&o)[results], int row) {
    float scale[2], lse[2];
    rows.finish(span.head, scale, lse);
    const bool alone = args.splits == 1;
    const int g = group(args), column = (int)threadIdx.x % 4 * 2;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int p = row + h * 8, query = (int)((uint32_t)p / (uint32_t)g);
      if (p >= span.all) continue;
      const int head = C::pack_gqa ? span.head * g + p - query * g : span.head;
      const float factor = p < span.end ? scale[h] : 0.0f, sum = p < span.end ? lse[h] : minus_infinity();
      float x[results / 2];
#pragma unroll
      for (int i = 0; i < results / 2; i++) x[i] = factor == 0.0f ? 0.0f : o[i / 2 * 4 + h * 2 + i % 2] * factor;
      if (alone) {
        const int64_t place = (C::varlen ? 0 : span.b) * args.o.batch + head * args.o.head +
                              (int64_t)(span.q_first + query) * args.o.row + column;
        char* const to = (char*)args.o.ptr + place * 2;
#pragma unroll
        for (int i = 0; i < results / 4; i++)
          if (i * 8 < (int)args.hdim_v) gpu::store_global<uint32_t>(to + i * 16, Fmha<C>::round(x[2 * i], x[2 * i + 1]));
        if constexpr (C::lse)
          if (column == 0)
            gpu::store_global((float*)args.lse.ptr + (C::varlen ? 0 : span.b) * args.lse.batch + head * args.lse.head +
                                  (int64_t)(span.q_first + query) * args.lse.row, sum);
        continue;
      }
      FmhaItem item = {};
      item.q_first = span.q_first;
      const int64_t line =
          span.off * gpu::fmha_lines<C>(args) + gpu::fmha_line_of<C>(args, item, span.b, head, query);
      float* const to = args.o_acc + line * C::hdim_v + column;
#pragma unroll
      for (int i = 0; i < results / 4; i++)
        gpu::store_global(to + i * 8, gpu::Words<2>{gpu::bits_of(x[2 * i]), gpu::bits_of(x[2 * i + 1])});
      if (column == 0) gpu::store_global(args.lse_acc + line, sum);
    }
  }
};

}  // namespace tw::sm90

#define TW_FMHA_WS_PARTS_KERNEL(NAME, ...) TW_FMHA_WS_KERNEL(NAME, __VA_ARGS__)
