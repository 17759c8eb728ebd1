// The products of attention for few rows: S^T = K Q^T and O^T = V^T P^T, of keys and values where they lie or, of 8
// bits, through registers. See sm90/fmha/decode.hpp. `shared`: of the workgroup; a block: a slot of its ring.
#pragma once
#include "tilewright/sm90/fmha/columns.hpp"
#include "tilewright/sm90/blocks/store.hpp"
#include "tilewright/sm90/blocks/wgmma_rs.hpp"

namespace tw::sm90 {

// D (64 x N) += A (64 x 16, registers, see sm90/blocks/wgmma_rs.hpp) x B (16 x N), B with k contiguous.
#define TW_WGMMA_RS_COLUMNS(N, A0, A1, A2, A3, B, ACCUMULATE, TYPES)                                               \
  template <class X>                                                                                               \
  TW_SM90 void wgmma_rs_columns(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate) {           \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k%" \
                 #TYPES " {" TW_NAMES_##N "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B                      \
                 ", p, 1, 1, 0;\n}\n"                                                                              \
                 : TW_REGISTERS_##N("+f")                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),                            \
                   "C"(WgmmaRsText<X>::types));                                                                    \
  }
TW_WGMMA_RS_COLUMNS(8, 4, 5, 6, 7, 8, 9, 10)
TW_WGMMA_RS_COLUMNS(16, 8, 9, 10, 11, 12, 13, 14)
TW_WGMMA_RS_COLUMNS(32, 16, 17, 18, 19, 20, 21, 22)
#undef TW_WGMMA_RS_COLUMNS

template <class C, class P = FmhaDecodePlan<C>>
struct FmhaTransposed {
  using Plan = P;
  using X = typename Plan::X;
  using K = typename Plan::K;
  using Columns = FmhaColumns<C, P>;
  static constexpr int m0 = Plan::m0, n0 = C::n0, tiles = Plan::tiles, value_tiles = C::hdim_v / 64, pairs = m0 / 8;
  using Scores = float[tiles][m0 / 2];
  using Results = float[value_tiles][m0 / 2];

  // Line `line`, chunk `chunk` (16 bytes) of a block of an 8-bit cache.
  template <int kElements>
  static TW_SM90 uint32_t byte_place(uint32_t block, int line, int chunk) {
    if constexpr (kElements == 64) return block + line * 64 + ((chunk ^ (line >> 1 & 3)) << 4);
    else return swizzled(block + chunk / 8 * (n0 * 128), line, chunk % 8);
  }

  // Where warps leave their maxima: two places that take turns.
  static TW_SM90 uint32_t place_of_maxima(uint32_t shared, uint32_t& turn) {
    turn ^= 1;
    return shared + Plan::warps_at + turn * (4 * m0 * 4);
  }

  // Sixteen elements of a row at a time. For 8-bit caches they become fp16, scaled by a power of two so that none
  // overflows, and change places as gpu/fmha/bytes.hpp says. Returns what scores are to be multiplied by.
  static TW_SM90 float load_queries(const tw_fmha_args& args, uint32_t shared, const FmhaPiece& piece, int group,
                                    uint32_t& turn) {
    using Q = typename C::Q;
    constexpr bool kScales = Plan::bytes && is_same<Q, bf16>;
    constexpr int kParts = C::hdim_q / 16, kAll = m0 * kParts, kOwn = (kAll + kWarpgroup - 1) / kWarpgroup;
    const int g = C::pack_gqa ? group : 1, thread = Columns::thread();
    uint32_t w[kOwn][8], exponent = 0;
#pragma unroll
    for (int n = 0; n < kOwn; n++) {
      const int i = n * kWarpgroup + thread, row = i / kParts, c = i % kParts * 16, p = piece.first + row, query = p / g;
      const bool exists = i < kAll && query < piece.q_rows;
      const int head = C::pack_gqa ? piece.head * group + (p - query * g) : piece.head;
      const char* from = (const char*)args.q.ptr + ((C::varlen ? 0 : piece.b) * args.q.batch + head * args.q.head +
                                                    (int64_t)(piece.q_first + query) * args.q.row + c) * 2;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        gpu::Words<4> x = {};
        if (exists && c + h * 8 < (int)args.hdim_q) x = gpu::load_constant<gpu::Words<4>>(from + h * 16);
#pragma unroll
        for (int e = 0; e < 4; e++) w[n][4 * h + e] = x.w[e];
      }
      if constexpr (kScales)
#pragma unroll
        for (int e = 0; e < 16; e++) {
          const uint32_t own = w[n][e / 2] >> (e % 2 * 16 + 7) & 255u;
          exponent = own != 255 && own > exponent ? own : exponent;
        }
    }
    uint32_t down = 127;
    if constexpr (kScales) {
      exponent = __reduce_max_sync(0xffffffffu, exponent);
      const uint32_t at = place_of_maxima(shared, turn);
      if (thread % kWarp == 0) store_word(at + thread / kWarp * 4, exponent);
      Columns::meet();
      const gpu::Words<4> all = gpu::load_shared<4>(at);
      exponent = max(max(all.w[0], all.w[1]), max(all.w[2], all.w[3]));
      // The largest becomes 2^14 to 2^15. Both powers of two are normal numbers.
      down = max(exponent, 41u) + 113 - 127;
      const float up = gpu::float_of((254 - down) << 23);
#pragma unroll
      for (int n = 0; n < kOwn; n++)
#pragma unroll
        for (int e = 0; e < 8; e++)
          w[n][e] = gpu::pack_halves(gpu::float_of(w[n][e] << 16) * up, gpu::float_of(w[n][e] & 0xffff0000u) * up);
    }
#pragma unroll
    for (int n = 0; n < kOwn; n++) {
      const int i = n * kWarpgroup + thread, row = i / kParts, part = i % kParts;
      const uint32_t to = shared + Plan::rows_at + part / 4 * (m0 * 128);
      const uint32_t (&x)[8] = w[n];
      constexpr int kStep = Plan::bytes ? 2 : 1, kHigh = Plan::bytes ? 1 : 4;
      const gpu::Words<4> low = {x[0], x[kStep], x[2 * kStep], x[3 * kStep]};
      const gpu::Words<4> high = {x[kHigh], x[kHigh + kStep], x[kHigh + 2 * kStep], x[kHigh + 3 * kStep]};
      if (kAll % kWarpgroup == 0 || i < kAll) {
        gpu::store_shared(swizzled(to, row, part % 4 * 2), low);
        gpu::store_shared(swizzled(to, row, part % 4 * 2 + 1), high);
      }
    }
    fence_async_proxy();
    Columns::meet();
    return kScales ? gpu::float_of(down << 23) : 1.0f;
  }

  // S^T = K Q^T. Keys of 8 bits are no longer needed at the end.
  static TW_SM90 void multiply_keys(uint32_t shared, uint32_t block, Scores& s) {
    const Descriptor q = k_major(shared + Plan::rows_at);
    constexpr int kSteps = C::hdim_q / 16;
#pragma unroll
    for (int t = 0; t < tiles; t++) {
#pragma unroll
      for (int i = 0; i < m0 / 2; i++) s[t][i] = 0.0f;
      pin(s[t]);
    }
    if constexpr (Plan::bytes) {
      const int lane = Columns::lane(), line = Columns::warp() * 16 + lane % 16;
      uint32_t a[tiles][kSteps][4];
#pragma unroll
      for (int t = 0; t < tiles; t++)
#pragma unroll
        for (int c = 0; c < kSteps; c += 2) {
          const gpu::Words<4> w =
              gpu::load_matrices<4, false>(byte_place<C::hdim_q>(block, t * 64 + line, c + lane / 16));
#pragma unroll
          for (int i = 0; i < 4; i++) {  // lines 0 to 7 and 8 to 15 of a chunk, then of the next
            const gpu::Words<2> x = gpu::fmha_widen<X>(w.w[i]);
            a[t][c + i / 2][i % 2] = x.w[0], a[t][c + i / 2][i % 2 + 2] = x.w[1];
          }
        }
      wgmma_fence();
#pragma unroll
      for (int t = 0; t < tiles; t++)
#pragma unroll
        for (int c = 0; c < kSteps; c++)
          wgmma_rs_columns<X>(s[t], a[t][c], q.plus(c / 4 * (m0 * 8) + c % 4 * 2), c > 0);
    } else {
      const Descriptor k = k_major(block);
      wgmma_fence();
#pragma unroll
      for (int t = 0; t < tiles; t++)
#pragma unroll
        for (int c = 0; c < kSteps; c++)
          wgmma<WgmmaText<X, X, false, false>>(s[t], k.plus(t * 512 + c / 4 * (n0 * 8) + c % 4 * 2),
                                               q.plus(c / 4 * (m0 * 8) + c % 4 * 2), c > 0);
    }
    wgmma_commit();
  }

  // O^T += V^T P^T. Of 8-bit values a thread has two neighbouring elements, which become its two rows.
  static TW_SM90 void multiply_values(uint32_t shared, uint32_t block, Results& o) {
    const Descriptor p = k_major(shared + Plan::p_at);
    constexpr int kSteps = n0 / 16;
#pragma unroll
    for (int i = 0; i < value_tiles; i++) pin(o[i]);
    if constexpr (Plan::bytes) {
      const int lane = Columns::lane(), warp = Columns::warp();
      uint32_t a[value_tiles][kSteps][4];
#pragma unroll
      for (int i = 0; i < value_tiles; i++)
#pragma unroll
        for (int c = 0; c < kSteps; c += 2) {
          const gpu::Words<4> w =
              gpu::load_matrices<4, true>(byte_place<C::hdim_v>(block, c * 16 + lane, i * 4 + warp));
#pragma unroll
          for (int e = 0; e < 4; e++) {  // keys 0 to 7, 8 to 15, ...: two keys of each of two elements
            const gpu::Words<2> x = gpu::fmha_widen<X>(gpu::permute_bytes(w.w[e], 0, 0x3120));
            a[i][c + e / 2][e % 2 * 2] = x.w[0], a[i][c + e / 2][e % 2 * 2 + 1] = x.w[1];
          }
        }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < value_tiles; i++)
#pragma unroll
        for (int c = 0; c < kSteps; c++) wgmma_rs_columns<X>(o[i], a[i][c], p.plus(c / 4 * (m0 * 8) + c % 4 * 2), 1);
    } else {
      const Descriptor v = mn_major(block, n0 * 128);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < value_tiles; i++)
#pragma unroll
        for (int c = 0; c < kSteps; c++)
          wgmma<WgmmaText<X, X, true, false>>(o[i], v.plus(i * (n0 * 8) + c * 128),
                                              p.plus(c / 4 * (m0 * 8) + c % 4 * 2), 1);
    }
    wgmma_commit();
  }

  // P, rounded, with keys contiguous: what is eight keys of eight queries in registers becomes eight lines of 16 bytes.
  static TW_SM90 void store_probabilities(uint32_t shared, const Scores& s) {
    const int lane = Columns::lane(), warp = Columns::warp(), block = warp * 2 + lane / 8 % 2;
    const auto round = [](float x, float y) {
      return is_same<X, fp16> ? gpu::pack_halves(x, y) : gpu::pack_bfloats(x, y);
    };
#pragma unroll
    for (int t = 0; t < tiles; t++) {
      const uint32_t to = shared + Plan::p_at + t * (m0 * 128);
      uint32_t x[m0 / 4];
#pragma unroll
      for (int i = 0; i < m0 / 4; i++) x[i] = round(s[t][2 * i], s[t][2 * i + 1]);
      if constexpr (pairs == 1) {
        store_fragments_transposed(swizzled(to, lane % 8, block), x);
      } else {
#pragma unroll
        for (int j = 0; j < pairs; j += 2) {
          const uint32_t four[4] = {x[2 * j], x[2 * j + 1], x[2 * j + 2], x[2 * j + 3]};
          store_fragments_transposed(swizzled(to, j * 8 + lane / 16 * 8 + lane % 8, block), four);
        }
      }
    }
    fence_async_proxy();
  }

  // Values beyond an item's keys are not to be multiplied, not even by zero: the copy engine knows only where the
  // tensor ends.
  static TW_SM90 void clear_tail(uint32_t block, int rows) {
    constexpr int kChunks = C::hdim_v * size_of<K> / 16, kPanel = Plan::line(C::hdim_v) / 16;
    for (int i = Columns::thread(); i < (n0 - rows) * kChunks; i += kWarpgroup) {
      const int row = rows + i / kChunks, chunk = i % kChunks;
      const uint32_t to = block + chunk / kPanel * (n0 * kPanel * 16) + row * (kPanel * 16) + chunk % kPanel * 16;
      gpu::store_shared(to, gpu::Words<4>{});
    }
    fence_async_proxy();
    Columns::meet();
  }
};

}  // namespace tw::sm90
