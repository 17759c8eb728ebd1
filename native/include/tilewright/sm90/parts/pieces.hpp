// The producer's side of pieces of work of attention for few rows: which pieces a workgroup has, and how consumers are
// told. Pieces are drawn from a counter, for they differ in length; or every workgroup has an equal share of all keys
// (sm90/parts/shares.hpp).
#pragma once
#include "tilewright/sm90/parts/shares.hpp"

namespace tw::sm90 {

// Pieces that are drawn: each a tile of rows and a part of its keys.
struct FmhaDrawn {
  static constexpr int kPiecesWord = 4;
  const tw_fmha_args& args;
  int id;

  TW_SM90 FmhaDrawn(const tw_fmha_args& args) : args(args), id((int)blockIdx.x) {}
  TW_SM90 bool more() const { return id < (int)args.tiles; }
  TW_SM90 void cut(FmhaPiece&) const {}

  // When all loads of a piece are on their way: as late as that, for who draws early holds what others could have
  // begun.
  TW_SM90 void next() {
    if (threadIdx.x % kWarp == 0) {
      uint32_t drawn;
      asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;"
                   : "=r"(drawn)
                   : "l"(args.counters + kPiecesWord)
                   : "memory");
      // Every piece draws once; the last one to draw leaves the counter as it was.
      if ((int)drawn == (int)args.tiles - 1) gpu::store_coherent(args.counters + kPiecesWord, gpu::Words<1>{0});
      id = (int)(drawn + gridDim.x);
    }
    id = __shfl_sync(0xffffffffu, id, 0);
  }
};

// Either, as the launch says: so that what is done with a piece stands once in the code.
template <class C>
struct FmhaDrawnOrShare {
  FmhaDrawn drawn;
  FmhaShare<C> share;
  const bool shares;
  int id;

  TW_SM90 FmhaDrawnOrShare(const tw_fmha_args& args)
      : drawn(args), share(args), shares(fmha_shares(args)), id(shares ? share.tile() : drawn.id) {}
  TW_SM90 bool more() const { return shares ? share.more() : drawn.more(); }
  TW_SM90 void cut(FmhaPiece& piece) {
    if (shares) share.cut(piece);
  }
  TW_SM90 void next() {
    if (shares) share.next(), id = share.tile();
    else drawn.next(), id = drawn.id;
  }
};

template <class C, bool kShares>
struct FmhaPiecesOf {
  using type = FmhaDrawn;
};
template <class C>
struct FmhaPiecesOf<C, true> {
  using type = FmhaDrawnOrShare<C>;
};

// All threads of the producer's warp: consumers are told of each piece, then `load` has it.
template <class C, class Plan, class Barriers, class Load>
TW_SM90 void fmha_each_piece(const tw_fmha_args& args, const Barriers& barriers, Load load) {
  const int lane = threadIdx.x % kWarp;
  RingState<2> next;
  for (typename FmhaPiecesOf<C, Plan::shares>::type pieces(args);; pieces.next()) {
    const bool more = pieces.more();
    FmhaPiece piece;
    piece.count = -1;
    if (more) {
      int bad, culprit;
      piece = fmha_piece<C>(args, pieces.id, bad, culprit);
      pieces.cut(piece);
      if (bad && lane == 0) gpu::fmha_tell(args, bad, piece.b, culprit);
    }
    if (!more || piece.rows > 0) {
      barriers.next().wait_empty(next);
      if (lane == 0) {
        store_message(barriers.slot(next.stage), piece);
        arrive(barriers.next().full(next.stage));
      }
      next.next();
      __syncwarp();
    }
    if (!more) return;
    if (piece.rows > 0) load(piece);
  }
}

}  // namespace tw::sm90
