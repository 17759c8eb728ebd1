// Convolution of few channels, and the gradient of its image, without a product: groups so small that panels would be
// mostly empty, and first layers. Channels-last. What a unit exports: conv_entries.hpp.
//
// Lanes run over channels of the result. The lines of the image that the filter covers are copied, with zeros around
// them, and kept while the filter moves down; a tile is a few pixels of a line. A block of lanes is either
//     some whole groups, each lane of which picks its group's values from one vector of the pixel, or
//     up to four vectors of one group, whose values are spread one by one; taps that are neighbours make one run.
//
// Workspace, in bytes, every part a multiple of 64, maxima over problems:
//     weights                 4 * sum over problems of taps * words * groups * round_up(n, lanes)
//     then for each member:   8 * kept rounded up to 64, and kept * round_up(reach * pixel, 64)
// with words = ceil(channels / depth), depth 2 for bf16 and 8 bits, else 1; lanes = 4 * L, 2 * L or L for n from 4 * L,
// from 2 * L, and below; kept = taps along D times the lines that H's taps span; reach = (pixels - 1) * row step of W +
// (taps - 1) * |tap_step| + 1, pixels = min(rows, kDirectPixels) + 14; pixel = 4 * L where two groups fit into a vector,
// that is max(n, words) <= L / 2, else channels * 4 / depth.
#pragma once
#include "tilewright/cpu/direct_lines.hpp"
#include "tilewright/cpu/pack.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kDirectPixels = 252;  // pixels of a line at a time: a multiple of every tile

// Lane i becomes x[index[i]].
TW_INLINE u32v pick_lanes(u32v x, i32v index) {
#if !defined(__clang__)
  return __builtin_shuffle(x, (u32v)index);
#elif TW_VECTOR_BYTES == 64
  return (u32v)__builtin_ia32_permvarsi512((i32v)x, index);
#elif TW_VECTOR_BYTES == 32 && defined(__x86_64__)
  return (u32v)__builtin_ia32_permvarsi256((i32v)x, index);
#else
  u32v y = {};
  for (int i = 0; i < kLanes; i++) y[i] = x[index[i]];
  return y;
#endif
}

// What elements are kept as: fp32, or 16 bits of which two make a group.
template <class A, class B>
struct KeptFor {
  static constexpr bool integers = is_same<A, int8>;
  static constexpr bool pairs = integers || ((is_same<A, bf16> || size_of<A> == 1) && (is_same<B, bf16> || size_of<B> == 1));
  static constexpr int depth = pairs ? 2 : 1, bytes = 4 / depth;
  using Dot = typename DotFor<A, B, depth>::type;

  // L elements as kept ones.
  template <class E>
  static TW_INLINE void store(void* to, f32v x) {
    if constexpr (integers) store_low_u16(to, (u32v)round_to_i32(x));
    else if constexpr (pairs) store_low_u16(to, (u32v)x >> 16);  // exact: they are bf16 or less
    else store_as(to, x);
  }
  // `count` elements from E to kept ones, side by side.
  template <class E>
  static TW_INLINE void copy(const char* from, char* to, int64_t count) {
    if constexpr (size_of<E> == bytes && (is_same<E, bf16> || is_same<E, fp32>)) {
      __builtin_memcpy(to, from, (size_t)count * bytes);
    } else {
      for (int64_t i = 0; i < count; i += kLanes) {
        alignas(64) char kept[kVectorBytes];
        store<E>(kept, load_f32_partial<E>(from + i * size_of<E>, count - i));
        __builtin_memcpy(to + i * bytes, kept, (size_t)min_of(count - i, kLanes) * bytes);
      }
    }
  }
};

template <class Config>
struct DirectConv {
  static_assert(!Config::channels_first, "channels lie last");
  using E = typename Config::A;
  using W = typename Config::B;
  using C = typename Config::C;
  using Kept = KeptFor<E, W>;
  using Dot = typename Kept::Dot;
  using V = typename Dot::accumulator;
  using Accumulator = typename Dot::scalar;
  using Out = Epilogue<Config, Dot, LineRows<Config>>;
  static constexpr int team = Config::wave_m * Config::wave_n, L = kLanes, depth = Kept::depth, bytes = Kept::bytes;
  static constexpr bool plain = Out::plain && !Config::accumulate;

  // One problem as the loops see it: along W coordinates rise from tap to tap, be it that taps are counted backwards.
  struct View {
    const tw_conv_problem& p;
    const tw_conv_axis *d, *h, *w;
    int64_t n, words;                // channels of the result, and groups of gathered ones, of one group
    int64_t together, vectors;       // groups of a block (1: parts of one), vectors of a block
    int64_t blocks, lanes, pixel;    // bytes of a pixel that are kept
    int64_t most_pixel;              // and what they may be for other operands
    int64_t step, tap_step, origin;  // along W
    int64_t runs, run_words, rest;   // of a line of taps; values that its last group has too few
    uint32_t* weights;               // [block][line of taps][run][word][lane]

    TW_INLINE View(const tw_conv_problem& problem, uint32_t* packed)
        : p(problem), d(problem.axes), h(problem.axes + 1), w(problem.axes + 2), weights(packed) {
      n = p.gemm.n, words = ceil_div(p.channels, depth);
      together = L / max_of(max_of(n, words), 1);
      most_pixel = together > 1 ? L * 4 : p.channels * bytes;
      if (together < 2 || !ChannelOperands<Config>::suits(p, n)) together = 1;
      vectors = together > 1 || n < 2 * L ? 1 : n < 4 * L ? 2 : 4;
      lanes = vectors * L;
      blocks = together > 1 ? ceil_div(p.groups, together) : p.groups * ceil_div(n, lanes);
      pixel = together > 1 ? L * 4 : p.channels * bytes;
      const int64_t last = max_of(w->taps - 1, 0);
      step = w->row_step, tap_step = w->tap_step < 0 ? -w->tap_step : w->tap_step;
      origin = w->origin + (w->tap_step < 0 ? last * w->tap_step : 0);
      const bool one_run = together == 1 && tap_step == 1;
      const int64_t run = (one_run ? w->taps : 1) * p.channels;
      runs = one_run ? 1 : w->taps, run_words = ceil_div(run, depth), rest = run_words * depth - run;
    }
    TW_INLINE int64_t taps() const { return d->taps * h->taps * w->taps; }
    TW_INLINE int64_t lines() const { return w->taps > 0 ? d->taps * h->taps : 0; }
    TW_INLINE int64_t span() const {  // lines of H from the first tap's to the last's
      return h->taps > 0 ? (h->taps - 1) * (h->tap_step < 0 ? -h->tap_step : h->tap_step) + 1 : 0;
    }
    TW_INLINE int64_t kept() const { return lines() > 0 ? d->taps * span() : 0; }
    TW_INLINE int64_t segment() const { return max_of(min_of(w->rows, kDirectPixels), 1); }
    TW_INLINE int64_t reach(int64_t pixels) const {
      return (pixels - 1) * step + max_of(w->taps - 1, 0) * tap_step + 1;
    }
    TW_INLINE int64_t line_bytes() const { return round_up(reach(segment() + 14) * most_pixel, 64); }
    TW_INLINE int64_t member_bytes() const { return round_up(8 * kept(), 64) + kept() * line_bytes(); }
    TW_INLINE int64_t line_words() const { return runs * run_words; }
    TW_INLINE int64_t block_words() const { return lines() * line_words() * lanes; }
    // What a line of taps meets for a pixel at (d, h), and whether that lies in the image.
    TW_INLINE bool line_at(int64_t line, int64_t at_d, int64_t at_h, int64_t& plane, int64_t& row) const {
      plane = d->origin + at_d * d->row_step + line / h->taps * d->tap_step;
      row = h->origin + at_h * h->row_step + line % h->taps * h->tap_step;
      return plane >= 0 && plane < d->size && row >= 0 && row < h->size;
    }
    // First group, and first channel within it, of a block; and the channels that exist.
    TW_INLINE int64_t group_of(int64_t block) const { return together > 1 ? block * together : block / ceil_div(n, lanes); }
    TW_INLINE int64_t channel_of(int64_t block) const {
      return together > 1 ? 0 : block % ceil_div(n, lanes) * lanes;
    }
    TW_INLINE int64_t count_of(int64_t block) const {
      return together > 1 ? min_of(p.groups - block * together, together) * n : min_of(n - channel_of(block), lanes);
    }
  };

  static int64_t weight_bytes(const View& v) {
    return round_up(4 * v.taps() * v.words * v.p.groups * round_up(v.n, v.lanes), 64);
  }
  static int64_t weight_bytes(const tw_conv_args& args) {
    int64_t all = 0;
    for (int64_t i = 0; i < args.count; i++) all += weight_bytes(View(args.problems[i], nullptr));
    return all;
  }
  static int64_t member_bytes(const tw_conv_args& args) {
    int64_t most = 0;
    for (int64_t i = 0; i < args.count; i++) most = max_of(most, View(args.problems[i], nullptr).member_bytes());
    return most;
  }
  static int64_t workspace(const tw_conv_args& args) { return weight_bytes(args) + team * member_bytes(args); }

  // The weights of one block as panels of pack.hpp, if its lanes and values lie at one distance each.
  template <int kVectors>
  static TW_NOINLINE void pack_panels_of(const View& v, int64_t block, bool flat) {
    using Panels = Rows<W, Config::b_col>;
    constexpr int kR = kVectors * L;
    const tw_conv_problem& p = v.p;
    const int64_t ld = Config::b_col ? p.weight_n : p.weight_c, count = v.count_of(block);
    const int64_t first = v.group_of(block) * p.weight_g + v.channel_of(block) * p.weight_n;
    for (int64_t line = 0; line < v.lines(); line++)
      for (int64_t t = 0; t < (flat ? 1 : v.w->taps); t++) {
        const int64_t tap = v.w->tap_step < 0 ? v.w->taps - 1 - t : t;
        const int64_t offset = first + line / v.h->taps * v.d->tap_stride +
                               line % v.h->taps * v.h->tap_stride + tap * v.w->tap_stride;
        uint32_t* const to = v.weights + block * v.block_words() + (line * v.line_words() + t * v.words) * kR;
        pack_panels<W, Dot, kR, Config::b_col, false>(Panels{(const char*)p.gemm.b + offset * size_of<W>, ld}, count,
                                                      flat ? v.w->taps * p.channels : p.channels, to, 0, nullptr);
      }
  }

  static TW_INLINE bool pack_fast(const View& v, int64_t block) {
    const tw_conv_problem& p = v.p;
    const bool whole = p.channels % depth == 0;  // values of a tap fill their groups
    const bool flat = v.runs == 1 && Config::b_col && v.w->tap_step > 0 && v.w->tap_stride == p.channels;
    if ((Config::b_col ? p.weight_c : p.weight_n) != 1 || (v.runs == 1 && !whole && !flat) ||
        (v.together > 1 && p.weight_g != v.n * p.weight_n))
      return false;
    if (v.vectors == 1) pack_panels_of<1>(v, block, flat);
    else if (v.vectors == 2) pack_panels_of<2>(v, block, flat);
    else pack_panels_of<4>(v, block, flat);
    return true;
  }

  // Weights as groups, those of one block together.
  static TW_NOINLINE void pack_weights(const View& v, Crew& crew) {
    const int64_t pieces = v.blocks;
    for (int64_t block; (block = crew.claim(pieces)) >= 0;) {
      if (v.taps() > 0 && pack_fast(v, block)) continue;
      const int64_t count = v.count_of(block), first = v.channel_of(block), group = v.group_of(block);
      char* const to = (char*)(v.weights + block * v.block_words());
      __builtin_memset(to, 0, (size_t)v.block_words() * 4);
      for (int64_t lane = 0; lane < count; lane++) {
        const int64_t of_group = v.together > 1 ? group + lane / v.n : group;
        const int64_t own = v.together > 1 ? lane % v.n : first + lane;
        const char* const from =
            (const char*)v.p.gemm.b + (of_group * v.p.weight_g + own * v.p.weight_n) * size_of<W>;
        for (int64_t line = 0; line < v.lines(); line++)
          for (int64_t t = 0; t < v.w->taps; t++) {
            const int64_t tap = v.w->tap_step < 0 ? v.w->taps - 1 - t : t;
            const int64_t offset =
                line / v.h->taps * v.d->tap_stride + line % v.h->taps * v.h->tap_stride + tap * v.w->tap_stride;
            const bool one_run = v.runs == 1;
            for (int64_t c = 0; c < v.p.channels; c++) {
              const int64_t value = one_run ? t * v.p.channels + c : c, run = one_run ? 0 : t;
              const int64_t word = (line * v.runs + run) * v.run_words + value / depth;
              Kept::template copy<W>(from + (offset + c * v.p.weight_c) * size_of<W>,
                                     to + (word * v.lanes + lane) * 4 + value % depth * bytes, 1);
            }
          }
      }
    }
    crew.end_stage(pieces);
  }

  static void run(const tw_conv_args& args, const tw_team* members, bool) {
    Crew crew = crew_of(members, team);
    if (crew.rank >= crew.size) return;
    char* const own = (char*)args.workspace + weight_bytes(args) + crew.rank * member_bytes(args);
    char* packed = (char*)args.workspace;
    for (int64_t i = 0; i < args.count; i++) {
      const View v(args.problems[i], (uint32_t*)packed);
      pack_weights(v, crew);
      packed += weight_bytes(v);
    }
    crew.barrier();
    packed = (char*)args.workspace;
    for (int64_t i = 0; i < args.count; i++) {
      const View v(args.problems[i], (uint32_t*)packed);
      if (v.p.gemm.batch > 0) Loop(v, own).run(crew);
      packed += weight_bytes(v);
    }
  }
  static void reduce(const tw_conv_args&, const tw_team*) {}

  struct Loop {
    const View& v;
    char* own;  // tags of the kept lines, then the lines
    i32v index;  // of each lane's first value in a pixel's vector

    TW_INLINE Loop(const View& view, char* scratch) : v(view), own(scratch) {
      int32_t lanes[L];
      for (int64_t lane = 0; lane < L; lane++) lanes[lane] = (int32_t)(v.together > 1 ? min_of(lane / v.n, v.together - 1) * v.words : 0);
      index = load_as<i32v>(lanes);
    }

    TW_INLINE int64_t* tags() const { return (int64_t*)own; }
    TW_INLINE char* line_of(int64_t slot) const { return own + round_up(8 * v.kept(), 64) + slot * v.line_bytes(); }

    void run(Crew& crew) const {
      const Strips strips(v.h->rows, v.p.images * v.d->rows * v.blocks, crew.size);
      const ChannelOperands<Config> operands(v.p, v.n);
      const int64_t pieces = strips.pieces();
      for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
        const int64_t block = piece % v.blocks, strip = piece / v.blocks;
        const int64_t plane = strip / strips.per_plane(), begin = strip % strips.per_plane() * strips.length;
        for (int64_t x = 0; x < v.w->rows; x += v.segment()) {
          for (int64_t slot = 0; slot < v.kept(); slot++) tags()[slot] = -1;
          for (int64_t y = begin; y < min_of(begin + strips.length, strips.lines); y++)
            line(operands.problem, block, plane / v.d->rows, plane % v.d->rows, y, x);
        }
      }
      crew.end_stage(pieces);
    }

    // Some pixels of one line of the result.
    struct Tile {
      int64_t block, z, y, x;
      int64_t number;         // of the first pixel
      int64_t pixels, count;  // that exist, and channels
      int64_t column;         // of the first channel
    };

    void line(const tw_gemm_problem& operands, int64_t block, int64_t n, int64_t z, int64_t y, int64_t x0) const {
      keep_lines(block, n, z, y, x0);
      const int64_t group = v.group_of(block);
      LineOutput out;
      out.problem = v.together > 1 ? &operands : &v.p.gemm, out.raw = false, out.ld = v.w->row_stride;
      out.item = out.operands_of = v.together > 1 ? 0 : group;
      const int64_t of_group = v.together > 1 ? 0 : group * v.p.gemm.stride_c;
      const int64_t offset = of_group + n * v.p.row_n + z * v.d->row_stride + y * v.h->row_stride;
      const int64_t pixels = min_of(v.w->rows - x0, v.segment());
      const bool three = v.w->taps == 3 && v.tap_step == 1;
      const int64_t wide = v.vectors == 4 ? 6 : v.vectors == 2 ? 12 : 14;
      // Values that meet three taps are read once for all of them.
      const bool shared = three && v.step == 1 && v.p.channels % depth == 0 && v.vectors <= 2;
      const bool narrow = shared && (v.vectors == 2 || (v.together > 1 && pixels <= 7));
      const int64_t size = narrow ? 7 : wide;
      Tile tile;
      tile.block = block, tile.z = z, tile.y = y, tile.count = v.count_of(block);
      tile.column = v.together > 1 ? group * v.n : v.channel_of(block);
      for (tile.x = 0; tile.x < pixels; tile.x += size) {
        tile.number = ((n * v.d->rows + z) * v.h->rows + y) * v.w->rows + x0 + tile.x;
        tile.pixels = min_of(pixels - tile.x, size);
        out.data = (char*)v.p.gemm.c + (offset + (x0 + tile.x) * v.w->row_stride) * size_of<C>;
        out.old = (const char*)v.p.acc + (out.data - (char*)v.p.gemm.c);
        if (v.together > 1) {
          if (three && v.step == 1 && size == 14) tap_tile<14, 1, 3, 1, true>(tile, out);
          else if (three && v.step == 2) tap_tile<14, 1, 3, 2, true>(tile, out);
          else if (three && v.step == 1) tap_tile<7, 1, 3, 1, true>(tile, out);
          else tap_tile<14, 1, 0, 0, true>(tile, out);
        } else if (shared && v.vectors == 1) {
          tap_tile<14, 1, 3, 1, false>(tile, out);
        } else if (shared && v.vectors == 2) {
          tap_tile<7, 2, 3, 1, false>(tile, out);
        } else if (v.vectors == 1) {
          spread_tile<14, 1>(tile, out);
        } else if (v.vectors == 2) {
          spread_tile<12, 2>(tile, out);
        } else {
          spread_tile<6, 4>(tile, out);
        }
      }
    }

    TW_INLINE int64_t slot_of(int64_t line, int64_t row) const {
      const int64_t span = max_of(v.span(), 1);
      return line / v.h->taps * span + row % span;
    }

    TW_NOINLINE void keep_lines(int64_t block, int64_t n, int64_t z, int64_t y, int64_t x0) const {
      const char* const image = (const char*)v.p.gemm.a + (n * v.p.image_n + v.group_of(block) * v.p.image_g) * size_of<E>;
      for (int64_t l = 0; l < v.lines(); l++) {
        int64_t plane, row;
        if (!v.line_at(l, z, y, plane, row)) continue;
        const int64_t slot = slot_of(l, row);
        if (tags()[slot] != row)
          keep(image + (plane * v.d->image_stride + row * v.h->image_stride) * size_of<E>, block, x0, line_of(slot));
        tags()[slot] = row;
      }
    }

    // One line of the image from pixel x0's first tap on: all pixels side by side.
    TW_NOINLINE void keep(const char* from, int64_t block, int64_t x0, char* to) const {
      const int64_t reach = v.reach(v.segment()), begin = v.origin + x0 * v.step;
      const int64_t low = min_of(max_of(-begin, 0), reach), high = max_of(min_of(v.w->size - begin, reach), low);
      const int64_t groups = v.together > 1 ? min_of(v.p.groups - block * v.together, v.together) : 1;
      const int64_t values = groups * v.p.channels;
      __builtin_memset(to, 0, (size_t)(low * v.pixel));
      __builtin_memset(to + high * v.pixel, 0, (size_t)((reach - high) * v.pixel));
      from += (begin + low) * v.w->image_stride * size_of<E>, to += low * v.pixel;
      const int64_t distance = v.w->image_stride * size_of<E>;
      const bool dense = v.p.image_g == v.p.channels || groups == 1;  // and groups fill their words
      if (v.together > 1 && !(dense && v.p.channels % depth == 0)) {
        for (int64_t i = low; i < high; i++, from += distance, to += v.pixel) {
          __builtin_memset(to, 0, (size_t)v.pixel);
          for (int64_t g = 0; g < groups; g++)
            Kept::template copy<E>(from + g * v.p.image_g * size_of<E>, to + g * v.words * 4, v.p.channels);
        }
      } else if (v.together == 1 && v.w->image_stride == v.p.channels) {
        Kept::template copy<E>(from, to, (high - low) * v.p.channels);
      } else if (v.together > 1) {
        for (int64_t i = low; i < high; i++, from += distance, to += v.pixel) {
          __builtin_prefetch(from + 16 * distance, 0, 3);
          if (values * bytes == kVectorBytes && size_of<E> == bytes) {
            store_as(to, load_as<u32v>(from));
          } else {
            store_as(to, u32v{});
            Kept::template copy<E>(from, to, values);
          }
        }
      } else {
        for (int64_t i = low; i < high; i++, from += distance, to += v.pixel) Kept::template copy<E>(from, to, values);
      }
    }

    // kT taps that are neighbours and pixels kS apart, so that each value is picked once for all of its taps; or any.
    // kPick: each lane picks its group's value, else one value is spread over all lanes.
    template <int kP, int kV, int kT, int kS, bool kPick>
    TW_NOINLINE void tap_tile(const Tile& tile, const LineOutput& out) const {
      static_assert(kV == 1 || !kPick, "groups that share a vector have no other");
      V sums[kP * kV];
      TW_UNROLL
      for (int i = 0; i < kP * kV; i++) sums[i] = V{};
      const int64_t words = v.words, pixel = kPick ? kVectorBytes : v.pixel;
      const int64_t step = v.step * pixel, tap_step = v.tap_step * pixel, taps = v.w->taps;
      for (int64_t l = 0; l < v.lines(); l++) {
        int64_t plane, row;
        if (!v.line_at(l, tile.z, tile.y, plane, row)) continue;
        const char* from = line_of(slot_of(l, row)) + tile.x * step;
        const uint32_t* weights = v.weights + (tile.block * v.lines() + l) * v.line_words() * kV * L;
        i32v lanes = index;
        for (int64_t j = 0; j < words; j++, lanes += 1, weights += kV * L, from += kPick ? 0 : 4) {
          const auto value = [&](const char* at) {
            if constexpr (kPick) return pick_lanes(load_as<u32v>(at), lanes);
            else return splat_bits(load_as<uint32_t>(at));
          };
          if constexpr (kT > 0) {
            u32v w[kT * kV];
            TW_UNROLL
            for (int t = 0; t < kT; t++)
              TW_UNROLL
              for (int i = 0; i < kV; i++) w[t * kV + i] = load_as<u32v>(weights + (t * words * kV + i) * L);
            const char* at = from;
            TW_UNROLL
            for (int q = 0; q < (kP - 1) * kS + kT; q++, at += pixel) {
              const u32v x = value(at);
              TW_UNROLL
              for (int t = 0; t < kT; t++)
                if (q >= t && (q - t) % kS == 0 && (q - t) / kS < kP)
                  TW_UNROLL
                  for (int i = 0; i < kV; i++)
                    sums[(q - t) / kS * kV + i] = Dot::step(sums[(q - t) / kS * kV + i], x, w[t * kV + i]);
            }
          } else {
            for (int64_t t = 0; t < taps; t++) {
              const u32v w = load_as<u32v>(weights + t * words * L);
              const char* const at = from + t * tap_step;
              TW_UNROLL
              for (int p = 0; p < kP; p++) sums[p] = Dot::step(sums[p], value(at + p * step), w);
            }
          }
        }
      }
      finish<kP, kV>(tile, out, sums);
    }

    template <int kP, int kV>
    TW_NOINLINE void spread_tile(const Tile& tile, const LineOutput& out) const {
      V sums[kP * kV];
      TW_UNROLL
      for (int i = 0; i < kP * kV; i++) sums[i] = V{};
      const int64_t step = v.step * v.pixel, whole = v.run_words - (v.rest > 0);
      for (int64_t l = 0; l < v.lines(); l++) {
        int64_t plane, row;
        if (!v.line_at(l, tile.z, tile.y, plane, row)) continue;
        const char* const line = line_of(slot_of(l, row)) + tile.x * step;
        const uint32_t* weights = v.weights + (tile.block * v.lines() + l) * v.line_words() * kV * L;
        for (int64_t r = 0; r < v.runs; r++) {
          const char* from = line + r * v.tap_step * v.pixel;
          for (int64_t i = 0; i < whole; i++, from += 4, weights += kV * L)
            spread<kP, kV>(from, step, ~0u, weights, sums);
          if (whole < v.run_words) {
            // The last group has a value too few: what stands there belongs to another pixel.
            spread<kP, kV>(from, step, 0xffffu, weights, sums);
            weights += kV * L;
          }
        }
      }
      finish<kP, kV>(tile, out, sums);
    }

    template <int kP, int kV>
    static TW_INLINE void spread(const char* from, int64_t step, uint32_t mask, const uint32_t* weights, V* sums) {
      u32v w[kV];
      TW_UNROLL
      for (int i = 0; i < kV; i++) w[i] = load_as<u32v>(weights + i * L);
      TW_UNROLL
      for (int p = 0; p < kP; p++) {
        const u32v x = splat_bits(load_as<uint32_t>(from + p * step) & mask);
        TW_UNROLL
        for (int i = 0; i < kV; i++) sums[p * kV + i] = Dot::step(sums[p * kV + i], x, w[i]);
      }
    }

    template <int kP, int kV>
    TW_INLINE void finish(const Tile& tile, const LineOutput& out, const V* sums) const {
      const float alpha = (float)out.problem->alpha;
      if constexpr (plain && is_same<C, fp32>) {
        if (tile.count == kV * L) {
          TW_UNROLL
          for (int p = 0; p < kP; p++)
            if (p < tile.pixels)
              TW_UNROLL
              for (int i = 0; i < kV; i++)
                store_f32<C>(out.data + (p * out.ld + tile.column + i * L) * size_of<C>,
                             widened(sums[p * kV + i]) * alpha);
          return;
        }
      }
      alignas(64) Accumulator kept[kP * kV * L];
      TW_UNROLL
      for (int i = 0; i < kP * kV; i++) store_as(kept + i * L, sums[i]);
      if constexpr (plain && is_same<C, int32>) {
        if (alpha == 1.0f) {  // integers as they are
          for (int64_t p = 0; p < tile.pixels; p++)
            __builtin_memcpy(out.data + (p * out.ld + tile.column) * 4, kept + p * kV * L, (size_t)tile.count * 4);
          return;
        }
      }
      Out::store(out, tile.number, tile.column, tile.pixels, tile.count, kept, kV * L, nullptr);
    }
    static TW_INLINE f32v widened(V sum) {
      if constexpr (Dot::is_float) return sum;
      else return __builtin_convertvector(sum, f32v);
    }
  };
};

template <class Config>
using ConvKernel = DirectConv<Config>;

TW_NAMESPACE_END
