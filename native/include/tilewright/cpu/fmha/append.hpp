// Appends new keys and values to a cache, in pages or not, and turns keys (and queries) by their positions.
//   TW_FMHA_APPEND(name, Config)   name: tw_cpu_kernel with tw_fmha_args as args
// Row n of item b goes to position len_k[b] + n of the cache k, v; where that is another memory than k_past, v_past, all
// other rows are copied. With a rope, elements (x0, x1) at distance 1 or rotary_dim / 2 become (x0 cos - x1 sin, x0 sin +
// x1 cos), in fp32; so do those of q, which go to o.
#pragma once
#include "tilewright/cpu/fmha/status.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct FmhaAppend {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr bool turns = Config::rope != FmhaRope::none;
  static constexpr bool vectorized = Config::paged && Config::kv_layout == KvLayout::vectorized;
  static constexpr int kRows = 16, kCopied = 64;
  static constexpr int kWidest = (int)max_of(max_of(Config::hdim_q, Config::hdim_v), 256);  // elements of a row

  const tw_fmha_args& args;
  FmhaStatus status = {};

  static void run(const tw_fmha_args& args, const tw_team* team) {
    FmhaAppend self{args};
    run(self, args, team);
  }
  // `self`: this, or what is made of it with an append of its own.
  template <class Self>
  static void run(Self& self, const tw_fmha_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    if (args.k_past.ptr != args.k.ptr || args.v_past.ptr != args.v.ptr) self.copy_all(crew);
    const int64_t blocks = ceil_div(args.new_rows, kRows), pieces = args.batch * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) self.append(piece / blocks, piece % blocks * kRows);
    crew.end_stage(pieces);
    crew.barrier();  // nobody reads lengths any more: lens_out may be len_k
    if (args.lens_out && crew.rank == 0)
      for (int64_t b = 0; b < args.batch; b++) {
        const FmhaItem item = fmha_item<Config>(args, b);
        args.lens_out[b] = (int32_t)min_of(item.k_rows + item.q_rows, item.k_room);
      }
    self.status.publish(crew, args.status);
  }

  TW_NOINLINE void append(int64_t b, int64_t first) {
    const FmhaItem item = fmha_item<Config>(args, b);
    const int64_t items = Config::varlen ? 0 : b;
    if (item.bad) status.add(item.bad, b, item.culprit);
    for (int64_t n = first; n < min_of(first + kRows, item.q_rows); n++) {
      const int64_t position = item.k_rows + n, row = item.q_first + n;
      if (turns && position >= args.k_tiles) status.add(kFmhaBadPosition, b, position);
      if (args.q.ptr && args.o.ptr)
        for (int64_t h = 0; h < args.heads_q; h++) {
          char line[kWidest * size_of<Q>];
          const char* const from = element<Q>(args.q, items, h, row);
          load<Q, turns>(from, args.q.col, args.hdim_q, position, line);
          store_elements<Q>(line, args.hdim_q, (char*)element<Q>(args.o, items, h, row), args.o.col);
        }
      if (position >= item.k_room) {
        status.add(kFmhaCacheFull, b, position + 1);
        continue;
      }
      int64_t page = 0, place = position;
      if constexpr (Config::paged) {
        const int64_t size = Config::page_size > 0 ? Config::page_size : args.page_size;
        page = fmha_page<Config>(args, b, position), place = position & (size - 1);
        if (page < 0) {
          status.add(kFmhaBadPage, b, position);
          continue;
        }
      } else {
        page = item.cache;
      }
      for (int64_t h = 0; h < args.heads_k; h++) {
        char line[kWidest * 4];
        load<K, turns>(element<K>(args.k_new, items, h, row), args.k_new.col, args.hdim_q, position, line);
        store_key(line, page, h, place);
        load<V, false>(element<V>(args.v_new, items, h, row), args.v_new.col, args.hdim_v, position, line);
        store_value(line, page, h, place);
      }
    }
  }

  template <class E>
  static TW_INLINE const char* element(const tw_fmha_tensor& tensor, int64_t b, int64_t h, int64_t row) {
    return (const char*)tensor.ptr + (b * tensor.batch + h * tensor.head + row * tensor.row) * size_of<E>;
  }

  template <class E>
  static TW_INLINE void store_elements(const char* line, int64_t hdim, char* to, int64_t col) {
    if (col == 1) __builtin_memcpy(to, line, (size_t)hdim * size_of<E>);
    else
      for (int64_t c = 0; c < hdim; c++) __builtin_memcpy(to + c * col * size_of<E>, line + c * size_of<E>, size_of<E>);
  }

  // One row, its elements next to each other, turned if kTurn.
  template <class E, bool kTurn>
  TW_NOINLINE void load(const char* from, int64_t col, int64_t hdim, int64_t position, char* line) const {
    if (col == 1) __builtin_memcpy(line, from, (size_t)hdim * size_of<E>);
    else
      for (int64_t c = 0; c < hdim; c++) __builtin_memcpy(line + c * size_of<E>, from + c * col * size_of<E>, size_of<E>);
    if constexpr (kTurn) {
      using Rot = typename Config::Rot;
      if (position >= args.k_tiles) return;
      constexpr bool kHalf = Config::rope == FmhaRope::half;
      const int64_t pairs = args.rotary_dim / 2, at = position * args.rotary_stride;
      const char* const cosines = (const char*)args.rot_cos + at * size_of<Rot>;
      const char* const sines = (const char*)args.rot_sin + at * size_of<Rot>;
      alignas(64) float wide[kWidest + kLanes];
      for (int64_t c = 0; c < 2 * pairs; c += kLanes)
        store_as(wide + c, load_f32_partial<E>(line + c * size_of<E>, 2 * pairs - c));
      for (int64_t t = 0; t < pairs; t += kLanes) {
        const int64_t now = min_of(pairs - t, kLanes);
        float cos[kLanes], sin[kLanes];
        store_as(cos, load_f32_partial<Rot>(cosines + t * size_of<Rot>, now));
        store_as(sin, load_f32_partial<Rot>(sines + t * size_of<Rot>, now));
        for (int64_t k = 0; k < now; k++) {
          float* const one = wide + (kHalf ? t + k : 2 * (t + k));
          float* const other = one + (kHalf ? pairs : 1);
          const float x0 = *one, x1 = *other;
          *one = x0 * cos[k] - x1 * sin[k], *other = x0 * sin[k] + x1 * cos[k];
        }
      }
      for (int64_t c = 0; c < 2 * pairs; c += kLanes)
        store_f32_partial<E>(line + c * size_of<E>, load_as<f32v>(wide + c), min_of(2 * pairs - c, kLanes));
    }
  }

  TW_INLINE void store_key(const char* line, int64_t page, int64_t h, int64_t place) const {
    char* const to = (char*)element<K>(args.k, page, h, place);
    if constexpr (vectorized) {
      constexpr int x = 16 / size_of<K>;
      for (int64_t c = 0; c < args.hdim_q; c += x)
        __builtin_memcpy(to + c / x * args.k.chunk * size_of<K>, line + c * size_of<K>,
                         (size_t)(min_of(args.hdim_q - c, x) * size_of<K>));
    } else {
      store_elements<K>(line, args.hdim_q, to, args.k.col);
    }
  }
  TW_INLINE void store_value(const char* line, int64_t page, int64_t h, int64_t place) const {
    if constexpr (vectorized) {
      constexpr int x = 16 / size_of<V>;
      char* const to = (char*)args.v.ptr +
                       (page * args.v.batch + h * args.v.head + place / x * args.v.chunk + place % x) * size_of<V>;
      store_elements<V>(line, args.hdim_v, to, args.v.col);
    } else {
      store_elements<V>(line, args.hdim_v, (char*)element<V>(args.v, page, h, place), args.v.col);
    }
  }

  // ---- caches that are not written in place ----

  void copy_all(Crew& crew) const {
    const int64_t items = Config::paged ? args.num_pages : args.cache_items;
    const int64_t rows = Config::paged ? (Config::page_size > 0 ? Config::page_size : args.page_size)
                                       : args.total_k / max_of(args.cache_items, 1);
    const int64_t blocks = ceil_div(rows, kCopied), pieces = items * args.heads_k * blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t head = piece / blocks, first = piece % blocks * kCopied, end = min_of(first + kCopied, rows);
      copy<K, false>(args.k_past, args.k, head / args.heads_k, head % args.heads_k, first, end, args.hdim_q);
      copy<V, true>(args.v_past, args.v, head / args.heads_k, head % args.heads_k, first, end, args.hdim_v);
    }
    crew.end_stage(pieces);
    crew.barrier();
  }

  template <class E, bool kValues>
  static TW_NOINLINE void copy(const tw_fmha_tensor& from, const tw_fmha_tensor& to, int64_t b, int64_t h, int64_t first,
                               int64_t end, int64_t hdim) {
    if (from.ptr == to.ptr) return;
    const int64_t base = b * to.batch + h * to.head;
    for (int64_t r = first; r < end; r++)
      for (int64_t c = 0; c < hdim; c++) {
        constexpr int x = 16 / size_of<E>;
        int64_t at = base + r * to.row + c * to.col;
        int64_t run = to.col == 1 ? hdim : 1;  // values side by side
        if constexpr (vectorized && !kValues) at = base + c / x * to.chunk + r * to.row, run = min_of(hdim - c, x);
        if constexpr (vectorized && kValues) at = base + r / x * to.chunk + c * to.col + r % x, run = 1;
        __builtin_memcpy((char*)to.ptr + at * size_of<E>, (const char*)from.ptr + at * size_of<E>,
                         (size_t)(run * size_of<E>));
        c += run - 1;
      }
  }
};

TW_NAMESPACE_END

#define TW_FMHA_APPEND(NAME, CONFIG)                               \
  TW_EXPORT void NAME(const void* args, tw_team* team) {           \
    tw::FmhaAppend<CONFIG>::run(*(const tw_fmha_args*)args, team); \
  }
