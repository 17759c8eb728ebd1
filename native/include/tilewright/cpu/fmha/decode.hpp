// The products of attention for a few rows (decoding): keys and values are read once, where they lie. Packing them
// would take longer than fetching them from memory, and what counts is that memory is always being read:
//  * A row of one head takes keys as they lie, by few instructions in a loop: the processor then fetches ahead by
//    itself, farther than it can be asked to.
//  * Several rows, or several heads whose lines lie side by side, use what is in the caches in their own order, while
//    lines farther on are asked for in the order of memory, a few at every step: of many at once most are dropped. They
//    are asked into the second-level cache, since the first one can wait for no more than two dozen lines.
// S: some keys and some rows at a time, each pair with a vector of partial sums along the head dimension. O: as the
// register tiles do it, with values straight from their rows.
#pragma once
#include "tilewright/cpu/fmha/paged.hpp"

TW_NAMESPACE_BEGIN

// Adds neighbours within a and b (vectors of partial sums in runs of kRun lanes each): half as many runs, a's sums in
// the lower lanes of each pair of runs, b's in the upper ones.
template <int kRun, int... kI>
TW_INLINE f32v fold_pair(f32v a, f32v b, Sequence<kI...>) {
  const f32v low = __builtin_shufflevector(a, b, (kI % (2 * kRun) < kRun ? kI : kI - kRun + kLanes)...);
  const f32v high = __builtin_shufflevector(a, b, (kI % (2 * kRun) < kRun ? kI + kRun : kI + kLanes)...);
  return low + high;
}
template <int kRun>
TW_INLINE void fold_all(f32v* x) {
  TW_UNROLL
  for (int i = 0; i < kRun; i++) x[i] = fold_pair<kRun>(x[i], x[i + kRun], MakeSequence<kLanes>::type{});
  if constexpr (kRun > 1) fold_all<kRun / 2>(x);
}
// Lane i: the sum of the lanes of x[i], L vectors in all. Changes x.
TW_INLINE f32v fold(f32v* x) {
  fold_all<kLanes / 2>(x);
  return x[0];
}

// Lines of keys (or values) in the order of memory: those of all heads of one key, then those of the next key.
struct FmhaLines {
  const char* at;
  int64_t row, head;  // bytes from key to key, and from head to head
  int64_t heads;
  int64_t left = 0;            // lines from `at` on
  const char* then = nullptr;  // where memory goes on after them, null: nowhere
  int64_t of = 0;              // the head of `at`

  TW_INLINE void next() {
    at += head;
    if (++of == heads) at += row - heads * head, of = 0;
    if (--left == 0 && then) at = then, of = 0;
  }
  // Lines of the run that comes next, if there is one.
  TW_INLINE FmhaLines after() const { return {then ? then : at, row, head, heads}; }
  TW_INLINE FmhaLines ahead(int64_t lines) const {
    FmhaLines x = *this;
    if (then && lines >= left) x.at = then, lines -= left, x.then = nullptr;
    x.at += lines / heads * row + lines % heads * head;
    x.of = lines % heads, x.left -= lines;
    return x;
  }
  // Asks for a piece of `kBytes` bytes, `from` bytes behind the beginning of the line.
  template <int kBytes>
  TW_INLINE void ask(int64_t from = 0) const {
    TW_UNROLL
    for (int byte = 0; byte < kBytes; byte += 64) __builtin_prefetch(at + from + byte, 0, 2);
  }
};

template <class Config>
struct FmhaDecode {
  using B = FmhaBlocking<Config>;
  using Dot = typename B::Dot;
  using K = typename Config::K;
  using V = typename Config::V;
  using Keys = FmhaSource<Config, K, false>;
  using Values = FmhaSource<Config, V, true>;
  static constexpr int most = (int)min_of(B::m0 / 4 * 4, 16);         // rows of a head
  static constexpr int most_merged = (int)min_of(B::m0 / 4 * 4, 32);  // rows of heads that an item has together
  static constexpr int together = kLanes / 4;                         // rows of a tile, unless there is one
  static constexpr int steps = (B::q_words + kLanes - 1) / kLanes, q_words = steps * kLanes;
  static constexpr int step_bytes = kLanes * Dot::depth * size_of<K>, line_bytes = steps * step_bytes;
  static constexpr int64_t kAhead = 16384;  // bytes

  // True if these operands can be read where they lie.
  static TW_INLINE bool fits(const tw_fmha_args& args, int64_t count) {
    if (Keys::vectorized || count > most || args.k.col != 1 || args.v.col != 1) return false;
    return !Config::paged || Keys::page_size(args) >= 4;
  }

  // Key heads of an item: several where there is one query and their lines lie side by side, so that memory is read in
  // its order; but so few that every member has some items, unless lines become short.
  static TW_INLINE int64_t heads(const tw_fmha_args& args, int64_t members) {
    constexpr int64_t kShort = 2048;  // bytes
    const int64_t sharing = args.heads_q / args.heads_k, others = args.batch * max_of(args.splits, 1);
    if (args.seq_q != 1 || !fits(args, sharing) || args.k.head >= args.k.row || args.v.head >= args.v.row) return 1;
    const int64_t wanted = members > 1 ? 2 * members : 1;
    int64_t n = max_of(min_of(args.heads_k, most_merged / sharing), 1);
    while (n > 1 && (args.heads_k % n > 0 ||
                     (args.heads_k / n * others < wanted && n * args.hdim_q * size_of<K> > kShort)))
      n--;
    return n;
  }

  // Queries as groups, each row a whole number of vectors, zeros behind and below.
  static TW_INLINE void queries(const uint32_t* from, int64_t count, int64_t words, uint32_t* to) {
    __builtin_memset(to, 0, sizeof(uint32_t) * (size_t)most_merged * q_words);
    for (int64_t r = 0; r < count; r++)
      __builtin_memcpy(to + r * q_words, from + r * B::q_words, (size_t)words * 4);
  }

  // The lines of a run's first `keys` keys. then: the run that comes next.
  template <class E, class Source>
  static TW_INLINE FmhaLines lines_of(const Source& source, const FmhaRun& run, int64_t heads, int64_t keys,
                                      const char* then) {
    return {run.at, run.row * size_of<E>, source.tensor.head * size_of<E>, heads, keys * heads, then};
  }
  // True if values lie as keys do.
  static TW_INLINE bool alike(const tw_fmha_args& args) {
    return size_of<K> == size_of<V> && args.hdim_q == args.hdim_v && args.k.row == args.v.row &&
           args.k.head == args.v.head;
  }

  // S of the key heads from the source's on, `each` rows of every one. then: where the values begin.
  static TW_INLINE void scores(const Keys& source, int64_t first, int64_t count, int64_t heads, int64_t each,
                               const uint32_t* q, float* s, const char* then) {
    if (!alike(source.args)) then = nullptr;
    FmhaRun run = source.run(first);
    for (int64_t j = 0; j < count;) {
      const int64_t here = min_of(run.count, count - j), next = j + here;
      const FmhaRun after = next < count ? source.run(first + next) : FmhaRun{then, 0, 0, 0};
      const FmhaLines line = lines_of<K>(source, run, heads, here, after.at);
      if (run.at && source.hdim * size_of<K> == line_bytes) scores_of(line, here, each, q, s + j);
      else if (run.at) scores_of_copies(line, here, source.hdim, each, q, s + j);
      run = after, j = next;
    }
  }

  // The same for lines that are no whole number of vectors: copies with zeros behind them.
  static TW_NOINLINE void scores_of_copies(const FmhaLines& line, int64_t keys, int64_t hdim, int64_t each,
                                           const uint32_t* q, float* s) {
    alignas(64) char copy[kLanes * line_bytes] = {};
    for (int64_t j = 0; j < keys; j += kLanes)
      for (int64_t h = 0; h < line.heads; h++) {
        const int64_t now = min_of(keys - j, kLanes);
        for (int64_t n = 0; n < now; n++)
          __builtin_memcpy(copy + n * line_bytes, line.at + (j + n) * line.row + h * line.head,
                           (size_t)hdim * size_of<K>);
        scores_of({copy, line_bytes, 0, 1, now}, now, each, q + h * each * q_words, s + h * each * B::s_words + j);
      }
  }

  static TW_NOINLINE void scores_of(const FmhaLines& line, int64_t keys, int64_t each, const uint32_t* q, float* s) {
    if (together > 1 && each > 1) return scores_of_rows(line, keys, each, q, s);
    for (int64_t r = 0; r < each; r++)
      if (line.heads == 1) scores_of_row(line, keys, q + r * q_words, s + r * B::s_words);
      else scores_of_heads(line, keys, each, q + r * q_words, s + r * B::s_words);
  }

  static TW_INLINE f32v dot(const char* at, const uint32_t* q) {
    f32v c = {};
    TW_UNROLL
    for (int e = 0; e < steps; e++)
      c = Dot::step(c, load_as<u32v>(q + e * kLanes), load_groups_along_k<K, Dot>(at + e * step_bytes));
    return c;
  }
  static TW_INLINE f32v sum_of_all(const f32v* x) {
    f32v c[kLanes];
    TW_UNROLL
    for (int n = 0; n < kLanes; n++) c[n] = load_as<f32v>(x + n);
    return fold(c);
  }

  // A row of one head: sums wait in memory, since a loop over keys is what the processor fetches ahead for. Only what
  // it cannot know of, the next run, is asked for along with the last lines.
  static TW_INLINE void scores_of_row(const FmhaLines& line, int64_t keys, const uint32_t* q, float* s) {
    alignas(64) f32v sums[kLanes] = {};
    FmhaLines after = line.after();
    const int64_t last = line.then ? keys - max_of(kAhead / line_bytes, 1) : keys;
    const char* at = line.at;
    for (int64_t j = 0; j < keys; j += kLanes) {
      const int64_t now = min_of(keys - j, kLanes);
      for (int64_t n = 0; n < now; n++, at += line.row) {
        if (j + n >= last) after.template ask<line_bytes>(), after.next();
        store_as(sums + n, dot(at, q));
      }
      const f32v found = sum_of_all(sums);
      if (now == kLanes) store_as(s + j, found);
      else __builtin_memcpy(s + j, &found, (size_t)now * 4);
    }
  }

  // kKeys sums of each of some rows: row i's to s + i * step.
  template <int kKeys>
  static TW_INLINE void store_sums(f32v sums, int64_t rows, int64_t keys, float* s, int64_t step) {
    struct Line {
      float x[kKeys];
    } of_rows[kLanes / kKeys];
    static_assert(sizeof of_rows == sizeof sums, "one lane for each pair");
    store_as(&of_rows, sums);
    for (int64_t i = 0; i < rows; i++)
      if (keys >= kKeys) store_as(s + i * step, of_rows[i]);
      else __builtin_memcpy(s + i * step, &of_rows[i], (size_t)keys * 4);
  }

  // A row of each of several heads, some keys at a time, so that queries are fetched less often.
  static TW_INLINE void scores_of_heads(const FmhaLines& line, int64_t keys, int64_t each, const uint32_t* q,
                                        float* s) {
    constexpr int kKeys = 4, kHeads = kLanes / kKeys;
    alignas(64) f32v sums[kLanes] = {};
    FmhaLines ahead = line.ahead(max_of(kAhead / line_bytes, 1));
    for (int64_t j = 0; j < keys; j += kKeys)
      for (int64_t h = 0; h < line.heads; h += kHeads) {
        const int64_t now = min_of(keys - j, kKeys), heads = min_of(line.heads - h, kHeads);
        for (int64_t i = 0; i < heads; i++) {
          const char* at = line.at + j * line.row + (h + i) * line.head;
          for (int64_t n = 0; n < now; n++, at += line.row, ahead.next()) {
            ahead.template ask<line_bytes>();
            store_as(sums + i * kKeys + n, dot(at, q + (h + i) * each * q_words));
          }
        }
        store_sums<kKeys>(sum_of_all(sums), heads, now, s + h * each * B::s_words + j, each * B::s_words);
      }
  }

  // Several rows of each head.
  static TW_INLINE void scores_of_rows(const FmhaLines& line, int64_t keys, int64_t each, const uint32_t* q, float* s) {
    constexpr int kKeys = kLanes / together;
    FmhaLines ahead = line.ahead(max_of(kAhead / line_bytes, 1));
    for (int64_t j = 0; j < keys; j += kKeys)
      for (int64_t h = 0; h < line.heads; h++)
        tile(line.at + j * line.row + h * line.head, line.row, min_of(keys - j, kKeys), ahead, each,
             q + h * each * q_words, s + h * each * B::s_words + j);
  }

  static TW_INLINE void tile(const char* from, int64_t row, int64_t count, FmhaLines& ahead, int64_t each,
                             const uint32_t* q, float* s) {
    constexpr int kKeys = kLanes / together;
    const char *at[kKeys], *next[kKeys];
    TW_UNROLL
    for (int n = 0; n < kKeys; n++, ahead.next()) at[n] = from + (n < count ? n : 0) * row, next[n] = ahead.at;
    for (int64_t r = 0; r < each; r += together) {
      f32v c[kLanes];
      TW_UNROLL
      for (int k = 0; k < kLanes; k++) c[k] = f32v{};
      TW_UNROLL
      for (int e = 0; e < steps; e++) {
        u32v x[kKeys];
        TW_UNROLL
        for (int n = 0; n < kKeys; n++) {
          const int place = e * kKeys + n;
          x[n] = load_groups_along_k<K, Dot>(at[n] + e * step_bytes);
          if (r == 0) __builtin_prefetch(next[place / steps] + place % steps * step_bytes, 0, 2);
        }
        TW_UNROLL
        for (int k = 0; k < together; k++) {
          const u32v of_row = load_as<u32v>(q + (r + k) * q_words + e * kLanes);
          TW_UNROLL
          for (int n = 0; n < kKeys; n++) c[k * kKeys + n] = Dot::step(c[k * kKeys + n], of_row, x[n]);
        }
      }
      store_sums<kKeys>(fold(c), min_of(each - r, together), count, s + r * B::s_words, B::s_words);
    }
  }

  // O = O * rescale + P V. then: where the next keys begin, null: there are none.
  static TW_NOINLINE void add_values(const Values& source, int64_t first, int64_t count, int64_t heads, int64_t each,
                                     const uint32_t* p, float* o, const float* rescale, const char* then) {
    if (!alike(source.args)) then = nullptr;
    for (int64_t r = 0; r < heads * each; r++)
      for (int64_t c = 0; c < B::hdim_v; c += kLanes)
        store_as(o + r * B::hdim_v + c, load_as<f32v>(o + r * B::hdim_v + c) * rescale[r]);
    FmhaRun run = source.run(first);
    for (int64_t j = 0; j < count;) {
      const int64_t here = min_of(run.count, count - j), next = j + here;
      const FmhaRun after = next < count ? source.run(first + next) : FmhaRun{then, 0, 0, 0};
      if (run.at)
        values_of(lines_of<V>(source, run, heads, here, after.at), here, source.hdim, each, p + j / Dot::depth, o);
      run = after, j = next;
    }
  }

  // The part of the keys that a head's rows use before the next ones come: `count` keys.
  struct Part {
    const char* at;
    int64_t line, count, hdim;
  };
  // Asks for pieces of lines farther on.
  struct Ahead {
    FmhaLines line;
    int64_t bytes, done = 0;

    template <int kBytes>
    TW_INLINE void ask() {
      line.template ask<kBytes>(done);
      done += kBytes;
      if (done >= bytes) done = 0, line.next();
    }
  };
  // Keys of a part: lines that stay in the first-level cache while several rows use them; of several heads fewer, since
  // their lines often lie in the same places of that cache.
  static constexpr int64_t kPart = max_of(8192 / (Config::hdim_v * size_of<V>) / 4 * 4, 4), kOfHeads = min_of(kPart, 8);

  static TW_INLINE void values_of(const FmhaLines& line, int64_t keys, int64_t hdim, int64_t each, const uint32_t* p,
                                  float* o) {
    constexpr int64_t kLines = max_of(kAhead / (Config::hdim_v * size_of<V>), 1);
    // A row of one head whose sums are all in registers takes values as they lie, like scores_of_row.
    if (each == 1 && line.heads == 1 && Dot::depth == 1 && hdim <= 8 * kLanes) {
      const int64_t last = line.then ? max_of(keys - kLines, 0) : keys;
      Ahead after = {line.after(), hdim * size_of<V>};
      add_part({line.at, line.row, last, hdim}, nullptr, each, each, p, o);
      add_part({line.at + last * line.row, line.row, keys - last, hdim}, &after, each, each, p + last, o);
      return;
    }
    const int64_t count = line.heads > 1 ? kOfHeads : kPart;
    const int64_t room = line.heads == 1 ? round_up(each, together) : each;
    Ahead ahead = {line.ahead(kLines), hdim * size_of<V>};
    for (int64_t j = 0; j < keys; j += count)
      for (int64_t h = 0; h < line.heads; h++) {
        const Part part = {line.at + j * line.row + h * line.head, line.row, min_of(keys - j, count), hdim};
        add_part(part, &ahead, room, each, p + h * each * B::s_words + j / Dot::depth, o + h * each * B::hdim_v);
      }
  }

  // `room` rows of P and O can be used, `rows` are.
  static TW_INLINE void add_part(const Part& part, Ahead* ahead, int64_t room, int64_t rows, const uint32_t* p,
                                 float* o) {
    int64_t r = 0;
    if constexpr (together > 1)
      for (; rows > 1 && r < rows && r + together <= room; r += together)
        lines<together, 4>(part, r == 0 ? ahead : nullptr, p + r * B::s_words, o + r * B::hdim_v);
    for (; r < rows; r++) lines<1, 8>(part, r == 0 ? ahead : nullptr, p + r * B::s_words, o + r * B::hdim_v);
  }

  template <int kRows, int kColumns>
  static TW_NOINLINE void lines(const Part& part, Ahead* ahead, const uint32_t* p, float* o) {
    int64_t c = 0;
    for (; c + kColumns * kLanes <= part.hdim; c += kColumns * kLanes)
      value_tile<kRows, kColumns>(part, c, kColumns * kLanes, ahead, p, o + c);
    for (; c < part.hdim; c += kLanes) value_tile<kRows, 1>(part, c, min_of(part.hdim - c, kLanes), ahead, p, o + c);
  }

  // Columns from `first` on, `width` of them.
  template <int kRows, int kColumns>
  static TW_INLINE void value_tile(const Part& part, int64_t first, int64_t width, Ahead* ahead, const uint32_t* p,
                                   float* o) {
    const char* at = part.at + first * size_of<V>;
    const int64_t line = part.line, count = part.count;
    f32v c[kRows][kColumns];
    TW_UNROLL
    for (int r = 0; r < kRows; r++)
      TW_UNROLL
      for (int v = 0; v < kColumns; v++) c[r][v] = load_as<f32v>(o + r * B::hdim_v + v * kLanes);
    const auto multiply = [&c, &p](const u32v* x) {
      TW_UNROLL
      for (int r = 0; r < kRows; r++) {
        const u32v spread = splat_bits(load_as<uint32_t>(p + r * B::s_words));
        TW_UNROLL
        for (int v = 0; v < kColumns; v++) c[r][v] = Dot::step(c[r][v], spread, x[v]);
      }
    };
    int64_t j = 0;
    const bool whole = width == kColumns * kLanes;
    for (; whole && j + Dot::depth <= count; j += Dot::depth, at += Dot::depth * line, p++) {
      if (ahead)
        TW_UNROLL
        for (int d = 0; d < Dot::depth; d++) ahead->template ask<kColumns * kLanes * size_of<V>>();
      u32v x[kColumns];
      TW_UNROLL
      for (int v = 0; v < kColumns; v++) x[v] = load_groups_across_k<V, Dot>(at + v * kLanes * size_of<V>, line);
      multiply(x);
    }
    for (; j < count; j += Dot::depth, at += Dot::depth * line, p++) {
      u32v x[kColumns];
      for (int v = 0; v < kColumns; v++)
        x[v] = load_groups_across_k<V, Dot>(at + v * kLanes * size_of<V>, line, count - j, width - v * kLanes);
      multiply(x);
    }
    TW_UNROLL
    for (int r = 0; r < kRows; r++)
      TW_UNROLL
      for (int v = 0; v < kColumns; v++) store_as(o + r * B::hdim_v + v * kLanes, c[r][v]);
  }
};

TW_NAMESPACE_END
