// The producer of attention for few rows (sm90/fmha/decode.hpp, latent.hpp): a warp that keeps the ring of shared memory
// full through the copy engine, across pieces of work, and tells the consumers which piece is next.
#pragma once
#include "tilewright/sm90/fmha/copy.hpp"
#include "tilewright/sm90/parts/pieces.hpp"
#include "tilewright/sm90/blocks/store.hpp"

namespace tw::sm90 {

// Block `i` of a piece.
template <class C>
TW_SM90 int fmha_block_of(const FmhaPiece& piece, int i) {
  return !C::token_sinks || i < piece.sinks ? i + (C::token_sinks ? 0 : piece.from) : piece.from + i - piece.sinks;
}

// The plan says which parts of a block fill slots of their own.
template <class C, class Plan>
struct FmhaDecodeProducer {
  using Ring = RingState<Plan::stages>;
  static constexpr int n0 = C::n0;

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaDecodeBarriers<Plan> barriers;

  TW_SM90 void produce() const {
    Ring ring;
    fmha_each_piece<C, Plan>(args, barriers, [&](const FmhaPiece& piece) { load(piece, ring); });
  }

  TW_SM90 void load(const FmhaPiece& piece, Ring& ring) const {
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k);
    const int key_head = C::pack_gqa ? piece.head : piece.head / group, lane = threadIdx.x % kWarp;
    const int first = C::varlen && !C::paged ? piece.k_place : 0, item = C::varlen ? 0 : piece.k_place;
    int page = 0, ahead = 0;
#pragma unroll 1
    for (int i = C::paged ? -1 : 0; i < piece.count; i++, page = ahead) {
      if constexpr (C::paged) {
        if (i + 1 < piece.count) ahead = look_up(piece, i + 1);  // on its way while this block waits for room
        if (i < 0) continue;
      }
      const int c0 = fmha_block_of<C>(piece, i) * n0;
      const uint32_t absent = C::paged ? __ballot_sync(0xffffffffu, page == -1) : 0;
#pragma unroll 1
      for (int part = 0; part < Plan::parts; part++) {
        const uint32_t full = barriers.ring().full(ring.stage), to = shared + ring.stage * Plan::slot_bytes;
        const int panels = Plan::panels_of(part), from = Plan::first_panel(part);
        const void* const map = params.maps[Plan::map_of(part)];
        const int line = Plan::line(C::hdim_q);  // values have the same, or both fill it
        barriers.ring().wait_empty(ring);
        if (lane == 0) {
          if (C::paged && part == 0) store_word(barriers.absent(ring.stage), absent);
          arrive_expecting(full, Plan::bytes_of(part));
        }
        __syncwarp();
        if constexpr (C::paged) {
          const int size = (int)args.page_size, rows = min(size, n0), row = lane * rows;
          if (row < n0)
#pragma unroll 1
            for (int x = 0; x < panels; x++)
              load_rows(to + x * (n0 * line) + row * line, map, (from + x) * Plan::panel,
                        {(c0 + row) & (size - 1), key_head, page < 0 ? (int)args.num_pages : page}, full);
        } else if (lane < panels) {
          load_rows(to + lane * (n0 * line), map, (from + lane) * Plan::panel, {first + c0, key_head, item}, full);
        }
        ring.next();
      }
    }
  }

  // The page of this lane's part of block i: -1 if the cache has none there, -2 if there are no keys.
  TW_SM90 int look_up(const FmhaPiece& piece, int i) const {
    const int rows = min((int)args.page_size, n0), row = threadIdx.x % kWarp * rows;
    const int column = fmha_block_of<C>(piece, i) * n0 + row;
    if (row >= n0 || column >= piece.k_rows) return -2;
    const int page = (int)fmha_page<C>(args, piece.b, column);
    if (page < 0) gpu::fmha_tell(args, kFmhaBadPage, piece.b, column);
    return page;
  }
};

}  // namespace tw::sm90
