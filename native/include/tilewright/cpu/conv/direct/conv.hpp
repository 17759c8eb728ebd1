// Convolution of few channels, and the gradient of its image, without a product: groups so small that panels would be
// mostly empty, and first layers. Channels-last. What a unit exports: cpu/conv/entries.hpp.
//
// Lanes run over channels of the result. The lines of the image that the filter covers are copied, with zeros around
// them, and kept while the filter moves down; a tile is a few pixels of a line. A block of lanes is either
//     some whole groups, each lane of which picks its group's values from one vector of the pixel, or
//     up to four vectors of one group, whose values are spread one by one; taps that are neighbours make one run.
#pragma once
#include "tilewright/cpu/conv/direct/results.hpp"
#include "tilewright/cpu/conv/direct/weights.hpp"
#include "tilewright/cpu/blocks/blocked_summation.hpp"
#include "tilewright/cpu/blocks/stream_store.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct DirectConv {
  static_assert(!Config::channels_first, "channels lie last");
  using E = typename Config::A;
  using W = typename Config::B;
  using C = typename Config::C;
  using Kept = KeptFor<E, W>;
  using Dot = typename Kept::Dot;
  using V = typename Dot::accumulator;
  using Results = DirectResults<Config>;
  using View = DirectView<Config>;
  static constexpr int team = Config::wave_m * Config::wave_n, L = kLanes, depth = Kept::depth, bytes = Kept::bytes;
  static constexpr bool plain = Results::plain;
  static constexpr bool forward = Config::direction == Direction::forward;
  static constexpr int64_t kStripBytes = 256 << 10, kStripLines = 4;  // of a result: about, and at least
  static constexpr bool chains = is_same<E, fp32>;
  static constexpr bool in_place = plain && is_same<C, fp32> && Dot::is_float;  // sums may go where results lie
  static constexpr int kMostVectors = 24, kMostLines = 32;  // of a tile; of taps whose places are known at a time

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

  static void run(const tw_conv_args& args, const tw_team* members, bool) {
    Crew crew = crew_of(members, team);
    if (crew.rank >= crew.size) return;
    char* const own = (char*)args.workspace + weight_bytes(args) + crew.rank * member_bytes(args);
    char* packed = (char*)args.workspace;
    for (int64_t i = 0; i < args.count; i++) {
      const View v(args.problems[i], (uint32_t*)packed);
      DirectWeights<Config>::pack(v, crew);
      packed += weight_bytes(v);
    }
    crew.barrier();
    run_all(args, own, crew);
  }

  // Strips of a few lines that all blocks, and all phases of a gradient, have in turns: what they share of pixels stays
  // in a cache.
  static void run_all(const tw_conv_args& args, char* own, Crew& crew) {
    int64_t height = 0, depth_rows = 0, images = 0, blocks = 0, line_bytes = 1;
    for (int64_t i = 0; i < args.count; i++) {
      const View v(args.problems[i], nullptr);
      if (v.p.gemm.batch <= 0) continue;
      height = max_of(height, v.h->rows), depth_rows = max_of(depth_rows, v.d->rows);
      images = max_of(images, v.p.images), blocks = max_of(blocks, v.blocks);
      line_bytes = max_of(line_bytes, args.count * v.w->rows * v.p.groups * v.n * size_of<C>);
    }
    Strips strips(height, images * depth_rows * blocks, crew.size);
    strips.length = min_of(strips.length, max_of(kStripBytes / line_bytes, kStripLines));
    strips.planes = images * depth_rows;
    const int64_t turns = args.count * blocks, pieces = height > 0 ? strips.pieces() * turns : 0;
    char* packed = (char*)args.workspace;
    int64_t reached = 0;  // the problem whose weights lie at `packed`
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t strip = piece / turns, number = piece % turns / blocks, block = piece % blocks;
      const int64_t plane = strip / strips.per_plane(), begin = strip % strips.per_plane() * strips.length;
      if (number < reached) packed = (char*)args.workspace, reached = 0;
      for (; reached < number; reached++) packed += weight_bytes(View(args.problems[reached], nullptr));
      const View v(args.problems[number], (uint32_t*)packed);
      const int64_t n = plane / depth_rows, z = plane % depth_rows;
      if (v.p.gemm.batch > 0 && block < v.blocks && n < v.p.images && z < v.d->rows)
        Loop(v, own).lines(block, n, z, begin, min_of(begin + strips.length, v.h->rows));
    }
    end_streams();
    crew.end_stage(pieces);
  }
  static void reduce(const tw_conv_args&, const tw_team*) {}

  struct Loop {
    const View& v;
    char* own;  // tags of the kept lines, then the lines
    bool stream;    // results are not kept in a cache
    int64_t chain;  // terms that are summed at a time
    i32v index;     // of each lane's first value in a pixel's vector

    TW_INLINE Loop(const View& view, char* scratch) : v(view), own(scratch) {
      int32_t lanes[L];
      for (int64_t lane = 0; lane < L; lane++)
        lanes[lane] = (int32_t)(v.together > 1 ? min_of(lane / v.n, v.together - 1) * v.words : 0);
      index = load_as<i32v>(lanes);
      chain = chain_of(v.p, v.n, v.taps() * v.p.channels, v.p.groups > 1 ? kUsualGroupChain : kUsualDirectChain);
      stream = plain && is_same<C, fp32> && v.p.row_g == v.n && (v.together > 1 ? v.together * v.n : v.n) % L == 0 &&
               streams_result(v.p, v.p.groups * v.n, size_of<C>);
    }

    TW_INLINE int64_t* tags() const { return (int64_t*)own; }
    TW_INLINE char* line_of(int64_t slot) const { return own + round_up(8 * v.kept(), 64) + slot * v.line_bytes(); }

    void lines(int64_t block, int64_t n, int64_t z, int64_t begin, int64_t end) const {
      const ChannelOperands<Config> operands(v.p, v.n);
      for (int64_t x = 0; x < v.w->rows; x += v.segment()) {
        for (int64_t slot = 0; slot < v.kept(); slot++) tags()[slot] = -1;
        for (int64_t y = begin; y < end; y++) line(operands.problem, block, n, z, y, x);
      }
    }

    // Some pixels of one line of the result.
    struct Tile {
      int64_t block, z, y, x;
      int64_t number;         // of the first pixel
      int64_t pixels, count;  // that exist, and channels
      int64_t column;         // of the first channel
      int64_t lines, words;   // that are summed at a time
      int64_t located;        // the first line of taps in `places`: what each meets for the segment's first pixel, NULL
      const char* places[kMostLines];  // outside the image
    };

    // A stretch of one sum: lines of taps, and of each line of each of its runs some words.
    struct Stretch {
      int64_t line, end;
      int64_t word, words;
      const V* before;  // what the stretch is added to
      char* to;         // where the sums go, those of a pixel `step` bytes behind those of the one before
      int64_t step;
      float alpha;      // and times what, if they are in_place
      bool stream;
    };
    using Sum = void (Loop::*)(const Tile& tile, const Stretch& stretch) const;

    void line(const tw_gemm_problem& operands, int64_t block, int64_t n, int64_t z, int64_t y, int64_t x0) const {
      keep_lines(block, n, z, y, x0);
      const int64_t group = v.group_of(block);
      LineOutput out;
      out.problem = v.together > 1 ? &operands : &v.p.gemm, out.raw = false, out.ld = v.w->row_stride;
      out.item = out.operands_of = v.together > 1 ? 0 : group;
      const int64_t of_group = v.together > 1 ? 0 : group * v.p.gemm.stride_c;
      const int64_t offset = of_group + n * v.p.row_n + z * v.d->row_stride + y * v.h->row_stride;
      const int64_t pixels = min_of(v.w->rows - x0, v.segment());
      const bool near = v.tap_step == 1 && (forward || v.step == 1) && v.step <= 2;
      const bool three = v.w->taps == 3 && near, two = !forward && v.w->taps == 2 && near;
      // Values that meet some taps are read once for all of them.
      const bool shared = (three || two) && v.p.channels % depth == 0 && v.vectors <= 2;
      const Sum sum = sum_of(three, two, shared);
      const int64_t size = v.vectors == 1 ? 14 : v.vectors == 4 ? 6 : shared ? 7 : 12;
      const bool tapped = v.together > 1 || shared;
      Tile tile;
      tile.block = block, tile.z = z, tile.y = y, tile.count = v.count_of(block);
      tile.column = v.together > 1 ? group * v.n : v.channel_of(block);
      cut_chains(tile, tapped);
      locate(tile, 0);
      for (tile.x = 0; tile.x < pixels; tile.x += size) {
        tile.number = ((n * v.d->rows + z) * v.h->rows + y) * v.w->rows + x0 + tile.x;
        tile.pixels = min_of(pixels - tile.x, size);
        out.data = (char*)v.p.gemm.c + (offset + (x0 + tile.x) * v.w->row_stride) * size_of<C>;
        out.old = (const char*)v.p.acc + (out.data - (char*)v.p.gemm.c);
        alignas(64) V sums[kMostVectors];
        const bool direct = in_place && tile.pixels == size && tile.count == v.lanes;
        sum_tile(tile, sum, tapped ? v.words : v.run_words, sums, direct ? &out : nullptr);
        if (!direct) Results::store(out, tile.number, tile.column, tile.pixels, tile.count, v.vectors, sums);
      }
    }

    Sum sum_of(bool three, bool two, bool shared) const {
      constexpr int kTwo = forward ? 3 : 2, kStep = forward ? 2 : 1;  // what else there is but 3 and 1
      const bool usual = v.w->taps == 3 && v.step == 1;
      if (v.together > 1) {
        if (three && usual) return &Loop::template sum_taps<14, 1, 3, 1, true>;
        if (three || two) return &Loop::template sum_taps<14, 1, kTwo, kStep, true>;
        return &Loop::template sum_taps<14, 1, 0, 0, true>;
      }
      if (shared && v.vectors == 1) {
        if (usual) return &Loop::template sum_taps<14, 1, 3, 1, false>;
        return &Loop::template sum_taps<14, 1, kTwo, kStep, false>;
      }
      if (shared) {
        if (usual) return &Loop::template sum_taps<7, 2, 3, 1, false>;
        return &Loop::template sum_taps<7, 2, kTwo, kStep, false>;
      }
      if (v.vectors == 1) return &Loop::template sum_spread<14, 1>;
      if (v.vectors == 2) return &Loop::template sum_spread<12, 2>;
      return &Loop::template sum_spread<6, 4>;
    }

    // Cuts sums into chains: some whole lines of taps, or equal parts of one.
    TW_INLINE void cut_chains(Tile& tile, bool tapped) const {
      tile.lines = min_of(max_of(v.lines(), 1), kMostLines), tile.words = max_of(tapped ? v.words : v.run_words, 1);
      if constexpr (chains) {
        const int64_t terms = max_of(tile.words * (tapped ? v.w->taps : v.runs), 1);  // of a line
        tile.lines = min_of(max_of(chain / terms, 1), kMostLines);
        if (terms > chain) tile.words = ceil_div(tile.words, ceil_div(terms, chain));
      }
    }

    // All products of a tile, one chain after the other; the last one's sums go to `out` if that is given.
    TW_INLINE void sum_tile(Tile& tile, Sum sum, int64_t words, V* sums, const LineOutput* out) const {
      alignas(64) static const V zeros[kMostVectors] = {};
      const int64_t lines = v.lines();
      Stretch stretch = {0, 0, 0, 0, zeros, (char*)sums, v.vectors * kVectorBytes, 1.0f, false};
      do {
        stretch.end = min_of(stretch.line + tile.lines, lines);
        stretch.word = 0;
        if (lines > kMostLines) locate(tile, stretch.line);
        do {
          stretch.words = min_of(words - stretch.word, tile.words);
          if (out && stretch.end == lines && stretch.word + tile.words >= words) {
            stretch.to = out->data + tile.column * size_of<C>, stretch.step = out->ld * size_of<C>;
            stretch.alpha = (float)out->problem->alpha, stretch.stream = stream;
          }
          (this->*sum)(tile, stretch);
          stretch.before = sums;
          stretch.word += tile.words;
        } while (stretch.word < words);
        stretch.line += tile.lines;
      } while (stretch.line < lines);
    }
    template <int kP, int kV>
    static TW_INLINE void put(V* sums, const Stretch& stretch) {
      TW_UNROLL
      for (int i = 0; i < kP * kV; i++) {
        sums[i] += stretch.before[i];
        if constexpr (in_place) sums[i] *= stretch.alpha;
      }
      char* to = stretch.to;
      if (in_place && stretch.stream) {
        TW_UNROLL
        for (int i = 0; i < kP * kV; i++) {
          stream_as(to + i % kV * kVectorBytes, sums[i]);
          if (i % kV == kV - 1) to += stretch.step;
        }
      } else {
        TW_UNROLL
        for (int i = 0; i < kP * kV; i++) {
          store_as(to + i % kV * kVectorBytes, sums[i]);
          if (i % kV == kV - 1) to += stretch.step;
        }
      }
    }

    TW_INLINE int64_t slot_of(int64_t line, int64_t row) const {
      const int64_t span = max_of(v.span(), 1);
      return line / v.h->taps * span + row % span;
    }

    TW_NOINLINE void keep_lines(int64_t block, int64_t n, int64_t z, int64_t y, int64_t x0) const {
      const int64_t offset = n * v.p.image_n + v.group_of(block) * v.p.image_g;
      const char* const image = (const char*)v.p.gemm.a + offset * size_of<E>;
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
        const bool same = size_of<E> == bytes && (is_same<E, bf16> || is_same<E, fp32>);
        constexpr int64_t kHalf = sizeof(u16_half);
        if (same && values * bytes % kHalf == 0) {
          // Here a call for every pixel would take longer than the copy.
          for (int64_t i = low; i < high; i++, from += distance, to += v.pixel)
            for (int64_t at = 0; at < values * bytes; at += kHalf) store_as(to + at, load_as<u16_half>(from + at));
        } else {
          for (int64_t i = low; i < high; i++, from += distance, to += v.pixel)
            Kept::template copy<E>(from, to, values);
        }
      }
    }

    TW_NOINLINE void locate(Tile& tile, int64_t first) const {
      tile.located = first;
      for (int64_t l = first; l < min_of(v.lines(), first + kMostLines); l++) {
        int64_t plane, row;
        const bool inside = v.line_at(l, tile.z, tile.y, plane, row);
        tile.places[l - first] = inside ? line_of(slot_of(l, row)) : nullptr;
      }
    }
    TW_INLINE const uint32_t* weights_of(const Tile& tile, const Stretch& stretch) const {
      return v.weights + ((tile.block * v.lines() + stretch.line) * v.line_words() + stretch.word) * v.lanes;
    }

    // kT taps that are neighbours and pixels kS apart, so that each value is picked once for all of its taps; or any.
    // kPick: each lane picks its group's value, else one value is spread over all lanes.
    template <int kP, int kV, int kT, int kS, bool kPick>
    TW_NOINLINE void sum_taps(const Tile& tile, const Stretch& stretch) const {
      static_assert(kV == 1 || !kPick, "groups that share a vector have no other");
      V sums[kP * kV];
      TW_UNROLL
      for (int i = 0; i < kP * kV; i++) sums[i] = V{};
      const int64_t words = v.words, pixel = kPick ? kVectorBytes : v.pixel;
      const int64_t step = v.step * pixel, tap_step = v.tap_step * pixel, taps = v.w->taps;
      const uint32_t* of_line = weights_of(tile, stretch);
      for (int64_t l = stretch.line; l < stretch.end; l++, of_line += v.line_words() * kV * L) {
        const char* from = tile.places[l - tile.located];
        if (!from) continue;
        const uint32_t* weights = of_line;
        from += tile.x * step + (kPick ? 0 : 4 * stretch.word);
        i32v lanes = index + (int32_t)stretch.word;
        for (int64_t j = 0; j < stretch.words; j++, lanes += 1, weights += kV * L, from += kPick ? 0 : 4) {
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
      put<kP, kV>(sums, stretch);
    }

    template <int kP, int kV>
    TW_NOINLINE void sum_spread(const Tile& tile, const Stretch& stretch) const {
      V sums[kP * kV];
      TW_UNROLL
      for (int i = 0; i < kP * kV; i++) sums[i] = V{};
      const int64_t step = v.step * v.pixel, end = stretch.word + stretch.words;
      const int64_t whole = min_of(end, v.run_words - (v.rest > 0));
      const uint32_t* of_run = weights_of(tile, stretch);
      for (int64_t l = stretch.line; l < stretch.end; l++) {
        const char* const line = tile.places[l - tile.located];
        for (int64_t r = 0; r < v.runs; r++, of_run += v.run_words * kV * L) {
          if (!line) continue;
          const char* from = line + tile.x * step + r * v.tap_step * v.pixel + 4 * stretch.word;
          const uint32_t* weights = of_run;
          for (int64_t i = stretch.word; i < whole; i++, from += 4, weights += kV * L)
            spread<kP, kV>(from, step, ~0u, weights, sums);
          // The last group has a value too few: what stands there belongs to another pixel.
          if (depth > 1 && whole < end) spread<kP, kV>(from, step, 0xffffu, weights, sums);
        }
      }
      put<kP, kV>(sums, stretch);
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
  };
};

template <class Config>
using ConvKernel = DirectConv<Config>;

TW_NAMESPACE_END
