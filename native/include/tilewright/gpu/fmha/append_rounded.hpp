// Appends new keys and values to a cache of 8-bit floats and rounds them on their way: rows of the queries' type become
// the cache's, divided by the factors of k and v (Config::qscale), and rows of 8 bits are turned by their positions.
//   TW_FMHA_APPEND_ROUNDED_KERNEL(symbol, Config)   otherwise as TW_FMHA_APPEND_KERNEL in append.hpp
// A row is turned in fp32 and rounded to its own type first, so that a cache of 8 bits holds what one of 16 bits would,
// divided and rounded once more. What lies beyond the largest value, infinity included, becomes that value.
#pragma once
#include "tilewright/gpu/fmha/append.hpp"

namespace tw::gpu {

// OCP E4M3, to nearest even; see encode_lanes in core/types.hpp.
TW_DEVICE uint8_t fp8_of(float x) {
  constexpr uint32_t kRebias = (uint32_t)(127 - fp8::bias) << 23, kUnit = (uint32_t)(127 - fp8::bias + 21) << 23;
  const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffffu;
  uint32_t code = magnitude < kRebias + (1u << 23)
                      ? bits_of(float_of(magnitude) + float_of(kUnit)) - kUnit
                      : (magnitude - kRebias + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  if (code > 0x7eu || magnitude >= 0x7f800000u) code = 0x7eu;
  if (magnitude > 0x7f800000u) code = 0x7fu;
  return (uint8_t)(code | bits >> 31 << 7);
}

template <class Config>
struct FmhaAppendRounded : FmhaAppend<Config> {
  using Base = FmhaAppend<Config>;
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr bool scales = Config::qscale != FmhaScale::no;
  using New = Choose<scales, Q, K>;  // of the new rows
  using Base::args, Base::thread, Base::threads, Base::rows, Base::turns;

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const FmhaAppendRounded self = {{args, thread_index()}};
    const int blocks = max_of(ceil_div((int)args.new_rows, rows), 1), heads = (int)(args.heads_k + args.heads_q);
    const int id = block_index(), first = id % blocks * rows, head = id / blocks % heads, b = id / blocks / heads;
    if (b < (int)args.batch) {
      if (head < (int)args.heads_k) self.append_keys(b, head, first);
      else static_cast<const Base&>(self).append(b, head, first);  // queries are turned, and not rounded further
    }
    self.finish();
  }

  TW_DEVICE void append_keys(int b, int h, int first) const {
    const FmhaItem item = fmha_item<Config>(args, b);
    const int items = Config::varlen ? 0 : b;
    if (item.bad && thread == 0 && h == 0) fmha_tell(args, item.bad, b, item.culprit);
    const int end = min_of(first + rows, (int)item.q_rows);
    for (int n = first; n < end; n++) {
      const int64_t position = item.k_rows + n, row = item.q_first + n;
      const bool tells = thread == 0 && h == 0;
      if (turns && position >= args.k_tiles && tells) fmha_tell(args, kFmhaBadPosition, b, position);
      if (position >= item.k_room) {
        if (tells) fmha_tell(args, kFmhaCacheFull, b, position + 1);
        continue;
      }
      int64_t page = item.cache, place = position;
      if constexpr (Config::paged) {
        page = fmha_page<Config>(args, b, position), place = position & (this->page_size() - 1);
        if (page < 0) {
          if (tells) fmha_tell(args, kFmhaBadPage, b, position);
          continue;
        }
      }
      put<K, false, turns>(args.k_new, args.k, args.k_scale, b, h, items, row, page, place, args.hdim_q, position);
      put<V, true, false>(args.v_new, args.v, args.v_scale, b, h, items, row, page, place, args.hdim_v, position);
    }
  }

  template <class E, bool kValues, bool kTurn>
  TW_DEVICE void put(const tw_fmha_tensor& from, const tw_fmha_tensor& cache, const tw_fmha_scale& scale, int b, int h,
                     int items, int64_t row, int64_t page, int64_t place, int64_t hdim, int64_t position) const {
    const float factor = scales ? fmha_scale_at(scale, b, h, 0) : 1.0f;
    const char* const line = Base::template element<New>(from, items, h, row);
    for (int c = thread; c < (int)hdim; c += threads) {
      const int64_t at = Base::template place_of<E, kValues>(cache, page, h, place, c);
      store_global((char*)cache.ptr + at * size_of<E>, rounded<kTurn>(line, from.col, c, position, factor));
    }
  }

  // Element c of a row. What is neither turned nor divided keeps its bits.
  template <bool kTurn>
  TW_DEVICE uint8_t rounded(const char* from, int64_t col, int c, int64_t position, float factor) const {
    if constexpr (scales) {
      return fp8_of(to_float<Q>(this->template turned<Q, kTurn>(from, col, c, position)) / factor);
    } else {
      const auto at = [&](int i) { return load_global<uint8_t>(from + i * col); };
      if constexpr (kTurn) {
        using Rot = typename Config::Rot;
        constexpr bool kHalf = Config::rope == FmhaRope::half;
        const int pairs = (int)args.rotary_dim / 2;
        if (c < 2 * pairs && position < args.k_tiles) {
          const int pair = kHalf ? c % pairs : c / 2, other = kHalf ? c < pairs ? c + pairs : c - pairs : c ^ 1;
          const int64_t line = position * args.rotary_stride + pair;
          const float cos = Base::angle((const char*)args.rot_cos + line * size_of<Rot>);
          const float sin = Base::angle((const char*)args.rot_sin + line * size_of<Rot>);
          const float x = to_float<K>(at(c)), with = to_float<K>(at(other));
          return fp8_of(x * cos + with * ((kHalf ? c >= pairs : (c & 1) != 0) ? sin : -sin));
        }
      }
      return at(c);
    }
  }

  // Rows that are not new, of caches that are not written in place, and lengths.
  TW_DEVICE void finish() const {
    const Base again = {read_again(args), thread};
    again.template copy<K, false>(again.args.k_past, again.args.k, (int)again.args.hdim_q);
    const Base last = {read_again(args), thread};
    last.template copy<V, true>(last.args.v_past, last.args.v, (int)last.args.hdim_v);
    const tw_fmha_args& end = read_again(args);
    fmha_publish(end, thread, [&] {  // nobody reads lengths any more: lens_out may be len_k
      if (!end.lens_out) return;
      TW_NO_UNROLL
      for (int64_t i = 0; i < end.batch; i++) {
        const FmhaItem item = fmha_item<Config>(end, i);
        store_global<int32_t>(end.lens_out + i, (int32_t)fmha_min(item.k_rows + item.q_rows, item.k_room));
      }
    });
  }
};

}  // namespace tw::gpu

#define TW_FMHA_APPEND_ROUNDED_KERNEL(NAME, ...)                                                                         \
  TW_KERNEL(tw::gpu::FmhaAppendRounded<__VA_ARGS__>::threads, tw::gpu::FmhaAppendRounded<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_args, tw::gpu::FmhaAppendRounded<__VA_ARGS__>::run(params);)
