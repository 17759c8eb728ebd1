// Appends new keys and values to a cache, in pages or not, and turns keys (and queries) by their positions.
//   TW_FMHA_APPEND_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; a workgroup for 16 new rows of a key
//   head,
//                                           or of a query head
// Row n of item b goes to position len_k[b] + n of the cache k, v; where that is another memory than k_past, v_past,
// all other rows are copied. With a rope, elements (x0, x1) at distance 1 or rotary_dim / 2 become (x0 cos - x1 sin, x0
// sin + x1 cos), in fp32; so do those of q, which go to o.
#pragma once
#include "tilewright/gpu/fmha/params.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaAppend {
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr int threads = 128, min_blocks = 1, rows = 16, shared_bytes = 0;
  static constexpr bool turns = Config::rope != FmhaRope::none;
  static constexpr bool vectorized = Config::paged && Config::kv_layout == KvLayout::vectorized;

  const tw_fmha_args& args;
  const int thread;

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const FmhaAppend self = {args, thread_index()};
    const int blocks = max_of(ceil_div((int)args.new_rows, rows), 1), heads = (int)(args.heads_k + args.heads_q);
    const int id = block_index(), first = id % blocks * rows, head = id / blocks % heads, b = id / blocks / heads;
    if (b < (int)args.batch) self.append(b, head, first);
    const FmhaAppend again = {read_again(args), self.thread};
    again.template copy<K, false>(again.args.k_past, again.args.k, (int)again.args.hdim_q);
    const FmhaAppend last = {read_again(args), self.thread};
    last.template copy<V, true>(last.args.v_past, last.args.v, (int)last.args.hdim_v);
    const tw_fmha_args& end = read_again(args);
    fmha_publish(end, self.thread, [&] {  // nobody reads lengths any more: lens_out may be len_k
      if (!end.lens_out) return;
      TW_NO_UNROLL
      for (int64_t i = 0; i < end.batch; i++) {
        const FmhaItem item = fmha_item<Config>(end, i);
        store_global<int32_t>(end.lens_out + i, (int32_t)fmha_min(item.k_rows + item.q_rows, item.k_room));
      }
    });
  }

  TW_DEVICE void append(int b, int head, int first) const {
    const FmhaItem item = fmha_item<Config>(args, b);
    const bool keys = head < (int)args.heads_k;
    const int h = keys ? head : head - (int)args.heads_k, items = Config::varlen ? 0 : b;
    if (item.bad && thread == 0 && head == 0) fmha_tell(args, item.bad, b, item.culprit);
    if (!keys && (!args.q.ptr || !args.o.ptr)) return;
    const int end = min_of(first + rows, (int)item.q_rows);
    for (int n = first; n < end; n++) {
      const int64_t position = item.k_rows + n, row = item.q_first + n;
      const bool tells = thread == 0 && head == 0;
      if (turns && position >= args.k_tiles && tells) fmha_tell(args, kFmhaBadPosition, b, position);
      if (!keys) {
        const char* const from = element<Q>(args.q, items, h, row);
        char* const to = (char*)element<Q>(args.o, items, h, row);
        for (int c = thread; c < (int)args.hdim_q; c += threads)
          store_global(to + c * args.o.col * size_of<Q>, turned<Q, turns>(from, args.q.col, c, position));
        continue;
      }
      if (position >= item.k_room) {
        if (tells) fmha_tell(args, kFmhaCacheFull, b, position + 1);
        continue;
      }
      int64_t page = item.cache, place = position;
      if constexpr (Config::paged) {
        page = fmha_page<Config>(args, b, position), place = position & (page_size() - 1);
        if (page < 0) {
          if (tells) fmha_tell(args, kFmhaBadPage, b, position);
          continue;
        }
      }
      const char* const key = element<K>(args.k_new, items, h, row);
      for (int c = thread; c < (int)args.hdim_q; c += threads)
        store_global((char*)args.k.ptr + place_of<K, false>(args.k, page, h, place, c) * size_of<K>,
                     turned<K, turns>(key, args.k_new.col, c, position));
      const char* const value = element<V>(args.v_new, items, h, row);
      for (int c = thread; c < (int)args.hdim_v; c += threads)
        store_global((char*)args.v.ptr + place_of<V, true>(args.v, page, h, place, c) * size_of<V>,
                     turned<V, false>(value, args.v_new.col, c, position));
    }
  }

  TW_DEVICE int64_t page_size() const { return Config::page_size > 0 ? Config::page_size : args.page_size; }
  template <class E>
  TW_DEVICE static const char* element(const tw_fmha_tensor& tensor, int64_t b, int64_t h, int64_t row) {
    return (const char*)tensor.ptr + (b * tensor.batch + h * tensor.head + row * tensor.row) * size_of<E>;
  }
  // Offset of an element of a cache, in elements.
  template <class E, bool kValues>
  TW_DEVICE static int64_t place_of(const tw_fmha_tensor& cache, int64_t page, int64_t h, int64_t r, int64_t c) {
    constexpr int x = 16 / size_of<E>;
    const int64_t base = page * cache.batch + h * cache.head;
    if constexpr (vectorized && !kValues) return base + c / x * cache.chunk + r * cache.row + c % x;
    if constexpr (vectorized && kValues) return base + r / x * cache.chunk + c * cache.col + r % x;
    return base + r * cache.row + c * cache.col;
  }

  // Element c of a row. What is not turned keeps its bits.
  template <class E, bool kTurn>
  TW_DEVICE typename E::storage turned(const char* from, int64_t col, int c, int64_t position) const {
    using S = typename E::storage;
    const auto at = [&](int i) { return load_global<S>(from + i * col * size_of<E>); };
    if constexpr (kTurn && !is_same<E, fp8>) {
      using Rot = typename Config::Rot;
      constexpr bool kHalf = Config::rope == FmhaRope::half;
      const int pairs = (int)args.rotary_dim / 2;
      float x = to_float<E>(at(c));
      if (c < 2 * pairs && position < args.k_tiles) {
        const int pair = kHalf ? c % pairs : c / 2, other = kHalf ? c < pairs ? c + pairs : c - pairs : c ^ 1;
        const int64_t line = position * args.rotary_stride + pair;
        const float cos = angle((const char*)args.rot_cos + line * size_of<Rot>);
        const float sin = angle((const char*)args.rot_sin + line * size_of<Rot>), with = to_float<E>(at(other));
        x = x * cos + with * ((kHalf ? c >= pairs : (c & 1) != 0) ? sin : -sin);
      }
      return from_float<E>(x);
    } else {
      return at(c);
    }
  }

  TW_DEVICE static float angle(const char* from) {
    return to_float<typename Config::Rot>(load_global<typename Config::Rot::storage>(from));
  }

  // ---- caches that are not written in place: every row but the new ones ----

  TW_DEVICE bool is_new(int64_t page, int64_t r) const {
    for (int64_t b = 0; b < args.batch; b++) {
      const FmhaItem item = fmha_item<Config>(args, b);
      const int64_t end = fmha_min(item.k_rows + item.q_rows, item.k_room);
      if constexpr (Config::paged) {
        const int64_t size = page_size();
        for (int64_t j = item.k_rows; j < end; j = (j / size + 1) * size)
          if (fmha_page<Config>(args, b, j) == page && r >= j % size && r - j % size < end - j) return true;
      } else {
        if (item.cache == page && r >= item.k_rows && r < end) return true;
      }
    }
    return false;
  }

  template <class E, bool kValues>
  TW_DEVICE void copy(const tw_fmha_tensor& from, const tw_fmha_tensor& to, int hdim) const {
    if (from.ptr == to.ptr) return;
    const int64_t items = Config::paged ? args.num_pages : args.cache_items;
    const int64_t length = Config::paged ? page_size() : args.total_k / fmha_max(args.cache_items, 1);
    TW_NO_UNROLL
    for (int64_t line = (int64_t)block_index() * threads + thread; line < items * length;
         line += (int64_t)block_count() * threads) {
      const int64_t page = line / length, r = line % length;
      if (is_new(page, r)) continue;
      for (int64_t h = 0; h < args.heads_k; h++)
        for (int c = 0; c < hdim; c++) {
          const int64_t at = place_of<E, kValues>(to, page, h, r, c) * size_of<E>;
          using S = typename E::storage;
          store_global((char*)to.ptr + at, load_global<S>((const char*)from.ptr + at));
        }
    }
  }
};

}  // namespace tw::gpu

#define TW_FMHA_APPEND_KERNEL(NAME, ...)                                                                   \
  TW_KERNEL(tw::gpu::FmhaAppend<__VA_ARGS__>::threads, tw::gpu::FmhaAppend<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_args, tw::gpu::FmhaAppend<__VA_ARGS__>::run(params);)
