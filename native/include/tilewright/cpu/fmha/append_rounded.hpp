// Appends new keys and values to a cache of 8-bit floats and rounds them on their way: rows of the queries' type become
// the cache's, divided by the factors of k and v.
//   TW_FMHA_APPEND_ROUNDED(name, Config)   otherwise as TW_FMHA_APPEND in append.hpp
// A row is turned in fp32 and rounded to its own type first, so that a cache of 8 bits holds what one of 16 bits would,
// divided and rounded once more. What lies beyond the largest value, infinity included, becomes that value.
#pragma once
#include "tilewright/cpu/fmha/append.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaAppendRounded : FmhaAppend<Config> {
  using Base = FmhaAppend<Config>;
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  using Base::args, Base::status, Base::kRows, Base::turns, Base::kWidest;

  static void run(const tw_fmha_args& args, const tw_team* team) {
    FmhaAppendRounded self{{args}};
    Base::run(self, args, team);
  }

  TW_NOINLINE void append(int64_t b, int64_t first) {
    const FmhaItem item = fmha_item<Config>(args, b);
    const int64_t items = Config::varlen ? 0 : b;
    if (item.bad) status.add(item.bad, b, item.culprit);
    for (int64_t n = first; n < min_of(first + kRows, item.q_rows); n++) {
      const int64_t position = item.k_rows + n, row = item.q_first + n;
      if (turns && position >= args.k_tiles) status.add(kFmhaBadPosition, b, position);
      char line[kWidest * 4], bytes[kWidest + kLanes];
      if (args.q.ptr && args.o.ptr)
        for (int64_t h = 0; h < args.heads_q; h++) {
          this->template load<Q, turns>(Base::template element<Q>(args.q, items, h, row), args.q.col, args.hdim_q, position,
                                        line);
          Base::template store_elements<Q>(line, args.hdim_q, (char*)Base::template element<Q>(args.o, items, h, row),
                                           args.o.col);
        }
      if (position >= item.k_room) {
        status.add(kFmhaCacheFull, b, position + 1);
        continue;
      }
      int64_t page = item.cache, place = position;
      if constexpr (Config::paged) {
        const int64_t size = Config::page_size > 0 ? Config::page_size : args.page_size;
        page = fmha_page<Config>(args, b, position), place = position & (size - 1);
        if (page < 0) {
          status.add(kFmhaBadPage, b, position);
          continue;
        }
      }
      for (int64_t h = 0; h < args.heads_k; h++) {
        this->template load<Q, turns>(Base::template element<Q>(args.k_new, items, h, row), args.k_new.col, args.hdim_q,
                                      position, line);
        round_line<K>(line, args.hdim_q, factor_of(args.k_scale, b, h), bytes);
        this->store_key(bytes, page, h, place);
        this->template load<Q, false>(Base::template element<Q>(args.v_new, items, h, row), args.v_new.col, args.hdim_v,
                                      position, line);
        round_line<V>(line, args.hdim_v, factor_of(args.v_scale, b, h), bytes);
        this->store_value(bytes, page, h, place);
      }
    }
  }

  static TW_INLINE float factor_of(const tw_fmha_scale& scale, int64_t b, int64_t h) {
    return scale.ptr ? scale.ptr[b * scale.batch + h * scale.head] : 1.0f;
  }

  template <class E>
  static TW_INLINE void round_line(const char* line, int64_t hdim, float factor, char* to) {
    for (int64_t c = 0; c < hdim; c += kLanes)
      store_f32_partial<E>(to + c * size_of<E>, load_f32_partial<Q>(line + c * size_of<Q>, hdim - c) / factor,
                           min_of(hdim - c, kLanes));
  }
};

TW_NAMESPACE_END

#define TW_FMHA_APPEND_ROUNDED(NAME, CONFIG)                              \
  TW_EXPORT void NAME(const void* args, tw_team* team) {                  \
    tw::FmhaAppendRounded<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }
