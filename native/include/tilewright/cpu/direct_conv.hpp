// Convolution of few channels, and the gradient of its image, without a product: groups so small that panels would be
// mostly empty, and first layers. Channels-last. What a unit exports: conv_entries.hpp.
//
// Lanes run over channels of the result. The lines of the image that the filter covers are copied, with zeros around
// them, and kept while the filter moves down; a tile is a few pixels of a line. A block of lanes is either
//     some whole groups, each lane of which picks its group's values from one vector of the pixel, or
//     up to four vectors of one group, whose values are spread one by one; taps that are neighbours make one run.
#pragma once
#include "tilewright/cpu/direct_weights.hpp"
#include "tilewright/cpu/short_chains.hpp"
#include "tilewright/cpu/stream_store.hpp"

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
  using Accumulator = typename Dot::scalar;
  using Out = Epilogue<Config, Dot, LineRows<Config>>;
  using View = DirectView<Config>;
  static constexpr int team = Config::wave_m * Config::wave_n, L = kLanes, depth = Kept::depth, bytes = Kept::bytes;
  static constexpr bool plain = Out::plain && !Config::accumulate;
  static constexpr bool forward = Config::direction == Direction::forward;
  static constexpr int64_t kStripBytes = 256 << 10, kStripLines = 4;  // of a result: about, and at least
  template <int kCount>
  using Chains = ShortChains<V, kCount, is_same<E, fp32>>;

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
    bool stream;  // results are not kept in a cache
    i32v index;   // of each lane's first value in a pixel's vector

    TW_INLINE Loop(const View& view, char* scratch) : v(view), own(scratch) {
      int32_t lanes[L];
      for (int64_t lane = 0; lane < L; lane++)
        lanes[lane] = (int32_t)(v.together > 1 ? min_of(lane / v.n, v.together - 1) * v.words : 0);
      index = load_as<i32v>(lanes);
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
      const bool near = v.tap_step == 1 && (forward || v.step == 1) && v.step <= 2;
      const bool three = v.w->taps == 3 && near, two = !forward && v.w->taps == 2 && near;
      const int64_t wide = v.vectors == 4 ? 6 : v.vectors == 2 ? 12 : 14;
      // Values that meet some taps are read once for all of them.
      const bool shared = (three || two) && v.p.channels % depth == 0 && v.vectors <= 2;
      const int64_t size = shared && v.vectors == 2 ? 7 : wide;
      Tile tile;
      tile.block = block, tile.z = z, tile.y = y, tile.count = v.count_of(block);
      tile.column = v.together > 1 ? group * v.n : v.channel_of(block);
      for (tile.x = 0; tile.x < pixels; tile.x += size) {
        tile.number = ((n * v.d->rows + z) * v.h->rows + y) * v.w->rows + x0 + tile.x;
        tile.pixels = min_of(pixels - tile.x, size);
        out.data = (char*)v.p.gemm.c + (offset + (x0 + tile.x) * v.w->row_stride) * size_of<C>;
        out.old = (const char*)v.p.acc + (out.data - (char*)v.p.gemm.c);
        constexpr int kTwo = forward ? 3 : 2, kStep = forward ? 2 : 1;  // what else there is but 3 and 1
        const bool usual = v.w->taps == 3 && v.step == 1;
        if (v.together > 1) {
          if (three && usual) tap_tile<14, 1, 3, 1, true>(tile, out);
          else if (three || two) tap_tile<14, 1, kTwo, kStep, true>(tile, out);
          else tap_tile<14, 1, 0, 0, true>(tile, out);
        } else if (shared && v.vectors == 1) {
          if (usual) tap_tile<14, 1, 3, 1, false>(tile, out);
          else tap_tile<14, 1, kTwo, kStep, false>(tile, out);
        } else if (shared && v.vectors == 2) {
          if (usual) tap_tile<7, 2, 3, 1, false>(tile, out);
          else tap_tile<7, 2, kTwo, kStep, false>(tile, out);
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

    // kT taps that are neighbours and pixels kS apart, so that each value is picked once for all of its taps; or any.
    // kPick: each lane picks its group's value, else one value is spread over all lanes.
    template <int kP, int kV, int kT, int kS, bool kPick>
    TW_NOINLINE void tap_tile(const Tile& tile, const LineOutput& out) const {
      static_assert(kV == 1 || !kPick, "groups that share a vector have no other");
      V sums[kP * kV];
      Chains<kP * kV> chains;
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
          chains.passed(sums, taps);
        }
      }
      chains.end(sums);
      finish<kP, kV>(tile, out, sums);
    }

    template <int kP, int kV>
    TW_NOINLINE void spread_tile(const Tile& tile, const LineOutput& out) const {
      V sums[kP * kV];
      Chains<kP * kV> chains;
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
          for (int64_t i = 0; i < whole; i++, from += 4, weights += kV * L) {
            spread<kP, kV>(from, step, ~0u, weights, sums);
            chains.passed(sums, 1);
          }
          if (whole < v.run_words) {
            // The last group has a value too few: what stands there belongs to another pixel.
            spread<kP, kV>(from, step, 0xffffu, weights, sums);
            weights += kV * L;
          }
        }
      }
      chains.end(sums);
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
          char* to = out.data + tile.column * size_of<C>;
          TW_UNROLL
          for (int p = 0; p < kP; p++, to += out.ld * size_of<C>) {
            if (p >= tile.pixels) continue;
            TW_UNROLL
            for (int i = 0; i < kV; i++) {
              const f32v x = widened(sums[p * kV + i]) * alpha;
              if (stream) stream_as(to + i * L * size_of<C>, x);
              else store_as(to + i * L * size_of<C>, x);
            }
          }
          return;
        }
      }
#if TW_PAIRS_OF_BF16
      if constexpr (plain && is_same<C, bf16> && is_same<Dot, DotBf16>) {
        // No sum of products of pairs is subnormal, and so all of them are rounded as elsewhere.
        if (tile.count == kV * L && alpha == 1.0f) {
          constexpr int kStep = kV == 1 ? 2 : 1;
          char* to = out.data + tile.column * size_of<C>;
          TW_UNROLL
          for (int p = 0; p < kP; p += kStep, to += kStep * out.ld * size_of<C>) {
            if (p >= tile.pixels) continue;
            TW_UNROLL
            for (int i = 0; i < kV; i += 2) {
              const int next = kV > 1 ? p * kV + i + 1 : min_of(p + 1, kP - 1);
              const u16v x = narrow_to_bf16(sums[p * kV + i], sums[next]);
              if constexpr (kV > 1) {
                store_as(to + i * L * size_of<C>, x);
              } else {
                store_as(to, half_of<0>(x, MakeSequence<L>::type{}));
                if (p + 1 < kP && p + 1 < tile.pixels)
                  store_as(to + out.ld * size_of<C>, half_of<L>(x, MakeSequence<L>::type{}));
              }
            }
          }
          return;
        }
      }
#endif
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
    template <int kFirst, int... kI>
    static TW_INLINE u16_half half_of(u16v x, Sequence<kI...>) {
      return __builtin_shufflevector(x, x, (kFirst + kI)...);
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
