// Convolution of few channels, and the gradient of its image, without a product: groups so small that panels would be
// mostly empty, and first layers. Channels-last. What a unit exports: conv_entries.hpp.
//
// Lanes run over channels of the result. The lines of the image that the filter covers are copied, with zeros around
// them, and kept while the filter moves down; a tile is a few pixels of a line. A block of lanes is either
//     some whole groups, each lane of which picks its group's values from one vector of the pixel, or
//     up to four vectors of one group, whose values are spread one by one; taps that are neighbours make one run.
#pragma once
#include "tilewright/cpu/direct_view.hpp"
#include "tilewright/cpu/short_chains.hpp"

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
      for (int64_t lane = 0; lane < L; lane++)
        lanes[lane] = (int32_t)(v.together > 1 ? min_of(lane / v.n, v.together - 1) * v.words : 0);
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
        for (int64_t i = low; i < high; i++, from += distance, to += v.pixel) Kept::template copy<E>(from, to, values);
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
