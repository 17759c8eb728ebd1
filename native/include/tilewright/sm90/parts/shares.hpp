// Equal shares: all keys of all sequences and heads, one after the other, are cut into as many equal runs as there are
// workgroups, so that sequences of any lengths keep the device busy to the end. Every workgroup finds its own share from
// the lengths, which are data: nothing is planned beforehand, and a launch serves in a CUDA graph.
//
// Up to eight heads go through the same keys side by side, each in a workgroup of its own: rows of a token lie next to
// each other in memory, head by head, which reads them best at about the same time. So eight neighbouring workgroups
// have the same share, of eight heads; with more heads, their eights follow each other.
//
// A share begins and ends anywhere. What it has of a tile of rows (those of a sequence's key head) is a part of it, and
// who comes last adds the parts of a tile. A workgroup begins at most one tile that others go on with, and goes on with
// at most one, so there are two places of accumulators for each: 2 w of the tile that it goes on with, 2 w + 1.
//
// Launches say so by split_rows = -overhead, below zero: blocks of keys that a tile counts more than it has. There is
// one tile of rows for each key head (q_tiles = 1) and splits is 1.
#pragma once
#include "tilewright/sm90/fmha/decode_plan.hpp"

namespace tw::sm90 {

TW_SM90 bool fmha_shares(const tw_fmha_args& args) { return args.split_rows < 0; }

// Heads side by side.
template <class C>
TW_SM90 int fmha_abreast(const tw_fmha_args& args) {
  const int heads = (int)(C::pack_gqa ? args.heads_k : args.heads_q);
  return min(heads & -heads, 8);
}

template <class C>
struct FmhaShare {
  static constexpr int kLeast = 2;  // blocks of a share: fewer are not worth a part
  static constexpr int kHeld = 4;   // so many sequences a lane looks at but once
  const tw_fmha_args& args;
  const int abreast, lines, place;  // lines of tiles side by side in a sequence; the share's number
  int line, at;                     // the tile, and where it begins
  int share, own, end, blocks, over;  // over: what a tile counts more than it has

  // The share of this workgroup, and the tile in which it begins. All lanes of a warp, of which each looks at some of
  // the sequences: what they have in all first, then those before its own.
  TW_SM90 FmhaShare(const tw_fmha_args& args)
      : args(args), abreast(fmha_abreast<C>(args)), lines((int)(C::pack_gqa ? args.heads_k : args.heads_q) / abreast),
        place((int)blockIdx.x / abreast) {
    const int lane = threadIdx.x % kWarp, batch = (int)args.batch, none = lines * batch;
    int all = 0, before = 0, least = 1 << 30, most = 0, held[kHeld] = {};
    line = none, share = 0, own = at = end = blocks = 0, over = -(int)args.split_rows;
    if (!fmha_shares(args)) return;
    fetch(args.len_k, batch), fetch(args.len_q, batch);
    if constexpr (C::varlen) fetch(args.cu_q, batch), fetch(args.cu_k, batch);
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
      for (int first = 0; first < batch && line == none; first += kWarp) {
        const bool exists = first + lane < batch;
        int count = 0;
        if (pass > 0 && first < kHeld * kWarp) {
#pragma unroll
          for (int n = 0; n < kHeld; n++) count = first == n * kWarp ? held[n] : count;
        } else if (exists) {
          count = count_of(first + lane);
        }
        const int cost = exists ? count + over : 0;
        if (pass > 0) {
          find(cost, first, before);
          continue;
        }
        all += cost, most = max(most, cost), least = min(least, exists ? cost : least);
#pragma unroll
        for (int n = 0; n < kHeld; n++) held[n] = first == n * kWarp ? count : held[n];
      }
      if (pass > 0) break;
      const int shares = (int)gridDim.x / abreast;
      all = (int)__reduce_add_sync(0xffffffffu, all) * lines;
      share = max((all + shares - 1) / shares, kLeast);
      least = __reduce_min_sync(0xffffffffu, least), most = __reduce_max_sync(0xffffffffu, most);
      if (least == most) all += none * fit(most);
      own = at = place * share, end = min(own + share, all);
      if (own >= all) break;
    }
  }

  // Where all tiles cost the same, shares are whole tiles, or as many as make one, if these are little more. Returns what
  // a tile counts more then.
  TW_SM90 int fit(int tile) {
    const int parts = max(tile / share, 1), each = (tile + parts - 1) / parts;  // one part if the share is larger
    const int fitted = share > tile ? (share + tile - 1) / tile * tile : each, more = parts * each - tile;
    if (fitted - share > share / 12) return 0;
    share = fitted, over += more;
    return more;
  }

  // On their way to the first-level cache, all at once.
  static TW_SM90 void fetch(const int32_t* of, int batch) {
    if (!of) return;
#pragma unroll 1
    for (int b = (int)threadIdx.x % kWarp * 8; b < batch; b += kWarp * 8)
      asm volatile("prefetch.global.L1 [%0];" ::"l"(of + b));
  }

  // Blocks of keys that each tile of a sequence has: as many as fmha_piece says, or one.
  TW_SM90 int count_of(int b) const {
    const FmhaItem item = fmha_item<C>(args, b);
    const int g = C::pack_gqa ? (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k) : 1;
    const int rows = C::skip_min && item.skip ? 0 : min(C::m0, (int)item.q_rows * g);
    if (rows <= 0) return 1;
    const FmhaRange range = gpu::fmha_part<C>(args, item, 0, 0, (rows - 1) / g + 1);
    if (range.first >= range.last) return 1;
    return ((int)range.last + C::n0 - 1) / C::n0 - (int)range.first / C::n0;
  }

  // Looks among the sequences whose costs the lanes have, from `first` on; `before`: of all that come before them.
  TW_SM90 void find(int cost, int first, int& before) {
    const int lane = threadIdx.x % kWarp;
    int upto = cost;
#pragma unroll
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, upto, step);
      if (lane >= step) upto += other;
    }
    if (const uint32_t behind = __ballot_sync(0xffffffffu, (before + upto) * lines > own)) {
      const int at_lane = __ffs(behind) - 1, each = __shfl_sync(0xffffffffu, cost, at_lane);
      const int start = (before + __shfl_sync(0xffffffffu, upto, at_lane) - each) * lines, more = (own - start) / each;
      line = (first + at_lane) * lines + more, at = start + more * each;
    }
    before += __shfl_sync(0xffffffffu, upto, kWarp - 1);
  }

  TW_SM90 bool more() const { return at < end; }
  TW_SM90 int tile() const { return line * abreast + (int)blockIdx.x % abreast; }

  // Leaves of a piece the keys that the share has: no rows if it has none.
  TW_SM90 void cut(FmhaPiece& piece) {
    blocks = max(piece.count, 1);
    const int from = max(own - at, 0), to = min(end - at, blocks), first = at / share;
    piece.parts = (at + blocks - 1) / share - first + 1, piece.part = place - first;
    piece.from += from, piece.count = piece.count > 0 ? to - from : 0;
    if (to <= from) piece.rows = 0;
  }

  TW_SM90 void next() { at += blocks + over, line++; }
};

// The parts of a tile, as the reduction (gpu/fmha/splitkv_reduce.hpp) sees them: of shares, or as many of each.
struct FmhaPieceRows : gpu::FmhaRows {
  int parts;
};

template <class C>
struct FmhaPieceParts {
  using Rows = FmhaPieceRows;
  static TW_SM90 int count(const tw_fmha_args&, const Rows& work) { return work.parts; }
  static TW_SM90 int64_t first(const tw_fmha_args& args, const Rows& work, int r, int64_t line) {
    if (!fmha_shares(args)) return line;
    return (2 * ((int)blockIdx.x - work.part * fmha_abreast<C>(args)) + 1) * C::m0 + r;
  }
  static TW_SM90 int64_t behind(const tw_fmha_args& args, int64_t lines, int p) {
    return fmha_shares(args) ? p * 2 * fmha_abreast<C>(args) * C::m0 - (p > 0 ? C::m0 : 0) : p * lines;
  }
};

}  // namespace tw::sm90
