// The producer of sm90/latent/latent.hpp: a thread that keeps the ring of panels full, and a warp where pages are
// smaller than blocks of keys. As sm90/fmha/decode_producer.hpp, with as little as can be between a panel that comes
// free and the copy that fills it.
#pragma once
#include "tilewright/sm90/fmha/decode_producer.hpp"

namespace tw::sm90 {

template <class C, class Plan>
struct LatentRowsProducer {
  using Common = FmhaDecodeProducer<C, Plan>;
  static constexpr int n0 = C::n0, parts = Plan::parts;

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaDecodeBarriers<Plan> barriers;

  TW_SM90 void produce() const {
    const Common common = {params, args, shared, barriers};
    int block = 0;
    fmha_each_piece<C, Plan>(args, barriers, [&](const FmhaPiece& piece) {
      load(common, piece, block);
      block += piece.count;
    });
  }

  // Blocks of a piece; `block` counts those of the workgroup.
  TW_SM90 void load(const Common& common, const FmhaPiece& piece, int block) const {
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k), lane = threadIdx.x % kWarp;
    const int key_head = C::pack_gqa ? piece.head : piece.head / group;
    const int first = C::varlen && !C::paged ? piece.k_place : 0, item = C::varlen ? 0 : piece.k_place;
    const int size = C::paged ? (int)args.page_size : n0, rows = min(size, n0);
    int page = C::paged && piece.count > 0 ? common.look_up(piece, 0) : 0;
#pragma unroll 1
    for (int i = 0; i < piece.count; i++, block++) {
      const int c0 = fmha_block_of<C>(piece, i) * n0, row = lane * rows;
      const uint32_t absent = C::paged ? __ballot_sync(0xffffffffu, page == -1) : 0;
      FmhaPlace place = {first + c0, key_head, item};
      if constexpr (C::paged)
        place = {(c0 + row) & (size - 1), key_head, page < 0 ? (int)args.num_pages : page};
      const int stage = (block & 1) * parts;
      const uint32_t parity = (uint32_t)block >> 1 & 1 ^ 1, to = shared + stage * Plan::slot_bytes + row * 128;
      if (rows == n0) {
        if (lane == 0) copy<true>(stage, parity, to, place, absent);
      } else {
        copy<false>(stage, parity, to, place, absent);
      }
      __syncwarp();
      if constexpr (C::paged)
        if (i + 1 < piece.count) page = common.look_up(piece, i + 1);  // while there is no room for its block
    }
  }

  // kAlone: by the calling thread, else by a warp of which each lane has rows of a page.
  template <bool kAlone>
  TW_SM90 void copy(int stage, uint32_t parity, uint32_t to, const FmhaPlace& place, uint32_t absent) const {
    const int row = threadIdx.x % kWarp * (int)args.page_size;
#pragma unroll
    for (int part = 0; part < parts; part++) {
      const uint32_t full = barriers.ring().full(stage + part);
      wait(barriers.ring().empty(stage + part), parity);
      if (kAlone || threadIdx.x % kWarp == 0) {
        if (C::paged && part == 0) store_word(barriers.absent(stage), absent);
        arrive_expecting(full, Plan::slot_bytes);
      }
      if constexpr (!kAlone) __syncwarp();
      if (kAlone || row < n0)
        load_rows(to + part * Plan::slot_bytes, params.maps[1], Plan::first_panel(part) * Plan::panel, place, full);
    }
  }
};

}  // namespace tw::sm90
