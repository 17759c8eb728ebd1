// Blocks of queries of the gradients (gpu/amd/fmha/backward.hpp): which ones there are, where a thread has its part of
// them in memory and in LDS, and their way from one to the other.
#pragma once
#include "tilewright/gpu/amd/fmha/turned.hpp"
#include "tilewright/gpu/fmha/backward/gradient.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaBackwardBlocks {
  using X = typename Config::Q;
  static constexpr int waves = 4, threads = waves * kWave, min_blocks = 1, m0 = Config::m0, n0 = Config::n0;
  static constexpr int hq = Config::hdim_q, hv = Config::hdim_v, steps = hq / 16;
  static_assert(size_of<X> == 2 && m0 == 32 && n0 == 128 && hq == 128 && hv == 128 && Config::wave_n0 == waves,
                "a wave has 32 keys, and 32 columns of dQ");
  using TileQ = LdsTile<X, true, m0, hq>;   // also that of dO
  using TileQx = LdsTile<X, false, hq, m0>;
  using TileKx = LdsTile<X, false, hq, n0>;
  using Queries = FmhaTurnedValues<TileQx, threads>;
  using Keys = FmhaTurnedValues<TileKx, threads>;
  static_assert(Queries::per_thread == 1, "a block of 4 x 4 for every thread");
  using Four = Vector<uint32_t, 4>;
  using Sums = Vector<float, 16>;
  using Pair = Vector<float, 2>;

  // dS, a line of keys, in the order of Kx, for every query; 16 bytes more, so that neither those of two runs of four
  // queries meet in a bank, nor 16 bytes of neighbouring lines, and all places of a lane are one, and a constant.
  static constexpr int s_line = n0 * 2 + 16;
  static constexpr int o_at = TileQ::bytes, qx_at = o_at + TileQ::bytes, ox_at = qx_at + TileQx::bytes;
  static constexpr int s_at = ox_at + TileQx::bytes, lines_at = s_at + m0 * s_line;
  static constexpr int shared_bytes = max_of(lines_at + 2 * m0 * 4, TileKx::bytes);

  const tw_fmha_args& args;
  const FmhaItem& item;
  const int b, hk, thread, lane, wave;
  const uint32_t shared;

  TW_DEVICE int half() const { return lane / 32; }

  // ---- rows of memory, as buffers that end with them ----

  struct Place {
    const char* base;  // of row 0 of a head
    uint32_t ld;
    int count;
    TW_DEVICE __amdgpu_buffer_rsrc_t at(int row, int rows) const {
      const int left = min_of(count - row, rows);
      const uint32_t records = uniform(left > 0 ? (uint32_t)(left - 1) * ld + hq * 2 : 0);
      return __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base + (int64_t)row * ld), 0, (int)records, kBufferFlags);
    }
  };
  TW_DEVICE Place place(const tw_fmha_tensor& tensor, int h, int64_t first, int64_t count) const {
    const int64_t at = (Config::varlen ? 0 : b * tensor.batch) + h * tensor.head + first * tensor.row;
    return {uniform((const char*)tensor.ptr + at * 2), uniform((uint32_t)tensor.row * 2), (int)count};
  }

  // ---- which blocks ----

  // A block of queries on its way.
  struct Arriving {
    Queries q, o;
    uint32_t lse, delta;  // zeros beyond the rows; see line_of
  };
  // The next block of queries: i0 and those of its head, in buffers that end with its rows.
  struct Cursor {
    const char *q, *o, *lse, *delta, *dq;
    uint32_t q_ld, o_ld, lse_ld;  // bytes from row to row
    int h, i0;
  };
  // Places of a thread, which the compiler takes as they are: it would rather compute them anew than keep them.
  struct Places {
    uint32_t q, o, lse, delta;                  // in memory, from a block's first row on
    uint32_t rows[steps], turned[steps];        // in LDS, of the products
    uint32_t put_rows[4], put_turned[4];
    uint32_t numbers, lines, s, s_key;
  };
  // Blocks of queries from `first` to `end`, in every one of the heads up to last_h; those from `whole` on and up to
  // `whole_end` see all keys.
  struct Range {
    int first, end, last_h, whole, whole_end;
  };
  TW_DEVICE Range range_of(int j0) const {
    const int group = (int)(args.heads_q / args.heads_k), count = max_of(min_of((int)item.k_rows - j0, n0), 0);
    Range range = {0, 0, (int)uniform((uint32_t)(hk * group + group)), 0x7fffffff, 0};
    if (count > 0) {
      // Whole blocks of the queries that see any of the keys.
      const int first = (int)fmha_min(FmhaGradient<Config>::first_seer(args, item, j0), item.q_rows) / m0 * m0;
      range.first = (int)uniform((uint32_t)first);
      range.end = (int)uniform((uint32_t)FmhaGradient<Config>::last_seer(args, item, j0 + count - 1) + 1);
    }
    if (count == n0) {
      const int last = j0 + n0 - 1, sink = Config::mask == FmhaMask::no ? 0 : (int)args.sink_size;
      const int64_t whole = FmhaGradient<Config>::first_seer(args, item, last);
      range.whole = (int)uniform((uint32_t)fmha_min(whole, 0x7fffffff));
      // The first of the keys that are no sink is the first that later queries do not see.
      const int first = min_of(max_of(j0, sink), last);
      range.whole_end = (int)uniform((uint32_t)FmhaGradient<Config>::last_seer(args, item, first) + 1);
    }
    return range;
  }
  TW_DEVICE Cursor first_block(int h, int i0, int slice) const {
    const int64_t row = item.q_first, lse = (Config::varlen ? 0 : b * args.lse.batch) + h * args.lse.head;
    const int64_t line = fmha_line_of<Config>(args, item, b, h, 0);
    return {place(args.q, h, row, 0).base,
            place(args.d_o, h, row, 0).base,
            uniform((const char*)args.lse.ptr + (lse + row * args.lse.row) * 4),
            uniform((const char*)(args.delta + line)),
            uniform((const char*)(args.dq_acc + (slice * fmha_lines<Config>(args) + line) * hq)),
            uniform((uint32_t)args.q.row * 2),
            uniform((uint32_t)args.d_o.row * 2),
            uniform((uint32_t)args.lse.row * 4),
            (int)uniform((uint32_t)h),
            (int)uniform((uint32_t)i0)};
  }
  // Is made where it stands, not where it is used.
  TW_DEVICE static uint32_t kept(uint32_t x) { return (uint32_t)compute_again((int)x); }
  TW_DEVICE static void here(int& x) {
    x = (int)uniform((uint32_t)x);
    asm volatile("" : "+s"(x));
  }
  TW_DEVICE static void here(const char*& x) {
    x = uniform(x);
    asm volatile("" : "+s"(x));
  }
  // Step `part` of seven from one block to the next; the last one is asked for again. In numbers: conditions would go
  // by way of lanes. wraps: all bits, or none.
  TW_DEVICE void advance(Cursor& at, int& wraps, const Range& range, int part) const {
    if (part == 0) {
      const int more = (at.i0 + m0 - range.end) >> 31;
      wraps = ~more & (at.h + 1 - range.last_h) >> 31, at.i0 += m0 & more;
      here(at.i0), here(wraps);
    }
    if (part == 1) at.i0 ^= (at.i0 ^ range.first) & wraps, at.h -= wraps, here(at.i0), here(at.h);
    const int64_t mask = wraps, lines = Config::varlen ? args.total_q : args.seq_q;
    if (part == 2) at.q += args.q.head * 2 & mask, here(at.q);
    if (part == 3) at.o += args.d_o.head * 2 & mask, here(at.o);
    if (part == 4) at.lse += args.lse.head * 4 & mask, here(at.lse);
    if (part == 5) at.delta += lines * 4 & mask, here(at.delta);
    if (part == 6) at.dq += lines * (hq * 4) & mask, here(at.dq);
  }

  // A block that some query or key of has no part in.
  TW_DEVICE int cuts(const Range& range, int i0) const {  // all bits, or none
    if constexpr (Config::mask == FmhaMask::no) return range.whole != 0 ? -1 : 0;
    return ((i0 - range.whole) | (range.whole_end - min_of(i0 + m0, (int)item.q_rows))) >> 31;
  }

  // ---- from memory to LDS ----

  static constexpr int parts = 17;  // of what comes to LDS: four lines of each tile, and numbers of rows

  template <int kWidth>
  TW_DEVICE __amdgpu_buffer_rsrc_t rows_at(const char* base, uint32_t ld) const {
    const uint32_t records = item.q_rows > 0 ? (uint32_t)(item.q_rows - 1) * ld + kWidth : 0;
    return __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)uniform(records), kBufferFlags);
  }
  TW_DEVICE Places places(const Cursor& at) const {
    Places own;
    const int line = lane % 32, first = Queries::key_of(thread, 0), element = Queries::element_of(thread, 0);
    own.q = kept((uint32_t)first * at.q_ld + element * 2), own.o = kept((uint32_t)first * at.o_ld + element * 2);
    TW_UNROLL
    for (int r = 0; r < 4; r++) {
      own.put_rows[r] = kept(shared + TileQ::offset(first + r, element / 8) + element % 8 * 2);
      const int byte = Queries::key_run(first);
      own.put_turned[r] = kept(shared + qx_at + TileQx::offset(element + r, byte / 16) + byte % 16);
    }
    TW_UNROLL
    for (int i = 0; i < steps; i++) {
      own.rows[i] = kept(shared + TileQ::template place<2>(0, line, 0, half(), i * 2));
      own.turned[i] = kept(shared + qx_at + TileQx::template place<2>(0, line, i % 4 * 32, half(), i / 4 * 2));
    }
    const int key = wave * 32 + line;
    own.lse = kept((uint32_t)(thread % m0) * at.lse_ld), own.delta = kept((uint32_t)(thread % m0) * 4);
    own.numbers = kept(shared + lines_at + half() * 16), own.lines = kept(shared + lines_at + thread % m0 * 4);
    own.s = kept(shared + s_at + line * s_line + half() * 16);
    own.s_key = kept(shared + s_at + half() * 4 * s_line + Keys::key_run(key / 4 * 4) + key % 4 * 2);
    return own;
  }
  // Part `part` of the block at `at`; the buffers' ends count from where they begin, so i0 is added by the instruction.
  TW_DEVICE void fetch(Arriving& to, const Cursor& at, const Places& own, int part) const {
    const uint32_t i0 = (uint32_t)at.i0;
    const auto rows = [&](Queries& x, __amdgpu_buffer_rsrc_t buffer, uint32_t from, uint32_t ld) {
      TW_UNROLL
      for (int r = 0; r < 4; r++) {
        const int row = (int)((i0 + r) * ld);
        x.data[0][r] = bits_as<Words<2>>(__builtin_amdgcn_raw_buffer_load_b64(buffer, (int)from, row, 0));
      }
    };
    const auto number = [&](__amdgpu_buffer_rsrc_t buffer, uint32_t from, uint32_t first) {
      return (uint32_t)__builtin_amdgcn_raw_buffer_load_b32(buffer, (int)from, (int)first, 0);
    };
    if (part == 0) rows(to.q, rows_at<hq * 2>(at.q, at.q_ld), own.q, at.q_ld);
    if (part == 2) rows(to.o, rows_at<hv * 2>(at.o, at.o_ld), own.o, at.o_ld);
    if (part == 4) to.lse = number(rows_at<4>(at.lse, at.lse_ld), own.lse, i0 * at.lse_ld);
    if (part == 6) to.delta = number(rows_at<4>(at.delta, 4), own.delta, i0 * 4);
  }
  // P's share of a row's sum. One that saw nothing has no probabilities, nor has one that does not exist.
  TW_DEVICE uint32_t line_of(const Arriving& from, int i0) const {
    const float lse = float_of(from.lse);
    const bool seen = (i0 + thread % m0 < (int)item.q_rows) & (lse != minus_infinity());
    return kept(bits_of(seen ? lse * -kLog2E : minus_infinity()));
  }
  TW_DEVICE void put(const Arriving& from, const Places& own, int part) const {
    if (part < 16) {
      const Queries& x = part / 4 % 2 == 0 ? from.q : from.o;
      const int r = part % 4, of_o = part / 4 % 2;
      if (part < 8) store_shared(own.put_turned[r] + of_o * (ox_at - qx_at), Queries::Block::line(x.data[0], r));
      else store_shared(own.put_rows[r] + of_o * o_at, x.data[0][r]);
    } else if (thread < m0) {
      store_shared(own.lines, Words<1>{from.lse}), store_shared(own.lines + m0 * 4, Words<1>{from.delta});
    }
  }
};

}  // namespace tw::gpu
