// Depthwise convolution of channels-last images, and the gradient of the image: lanes run over channels.
//
// A tile is a few pixels of two lines of the result (of one where bf16 is multiplied in pairs), all channels one vector
// after the other. Every line of the image that it meets is read once for all of its taps and both lines of the result;
// what lies outside the image is read from a vector of zeros, by tiles that meet an edge only. The phases of a gradient
// are computed a few lines at a time in turns, so that the gradient that they share stays in a cache.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/cpu/conv/depthwise/view.hpp"
#include "tilewright/cpu/blocks/dot.hpp"
#include "tilewright/cpu/conv/line_pairs.hpp"
#include "tilewright/cpu/blocks/stream_store.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct DepthwiseLast {
  using E = typename Config::A;
  using W = typename Config::B;
  using C = typename Config::C;
  using Dot = FloatSums<is_same<C, int32>>;
  using Out = Epilogue<Config, Dot, LineRows<Config>>;
  using View = DepthwiseView<Config>;
  // Two lines of bf16 are multiplied at a time where the processor adds products of pairs.
  static constexpr bool pairs = TW_PAIRS_OF_BF16 && is_same<E, bf16> && is_same<W, bf16>;
  using PackedWeight = Choose<pairs, bf16, fp32>;

  static constexpr int P = kTilePixels, L = kLanes, kRows = pairs || TW_VECTOR_BYTES < 64 ? 1 : 2;
  static constexpr bool plain = Out::plain && !Config::accumulate;
  static constexpr bool forward = Config::direction == Direction::forward;
  static constexpr bool repeatable = !Config::accumulate && Config::D::size == 0;  // results may be computed twice
  static constexpr int64_t kTurn = 8;              // lines of a phase
  static constexpr int64_t kFetchBytes = 6 << 20;  // of an image, at stride 1

  const View& v;

  // A line of the image, and the taps along W that each line of the result multiplies it with: NULL if none.
  struct Line {
    const char* image;
    const char* weights[kRows];
  };
  static_assert(sizeof(Line) * kRows <= kLineTableBytes, "what member_bytes counts");
  Line* lines;

  // Computes all problems of a launch; they differ in their phases only.
  static void run(const tw_conv_args& args, char* weights, char* own, Crew& crew) {
    int64_t height = 0, depth = 0, images = 0;
    for (int64_t i = 0; i < args.count; i++) {
      const tw_conv_problem& p = args.problems[i];
      if (p.gemm.batch <= 0) continue;
      height = max_of(height, p.axes[1].rows), depth = max_of(depth, p.axes[0].rows), images = max_of(images, p.images);
    }
    const Strips strips(height, images * depth, crew.size);
    const int64_t pieces = height > 0 ? strips.pieces() : 0;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t plane = piece / strips.per_plane(), begin = piece % strips.per_plane() * strips.length;
      const int64_t end = min_of(begin + strips.length, height), turn = args.count > 1 ? kTurn : strips.length;
      for (int64_t y = begin; y < end; y += turn) {
        char* packed = weights;
        for (int64_t i = 0; i < args.count; i++) {
          const View v(args.problems[i], packed);
          packed += v.weight_bytes();
          const int64_t z = plane % depth, n = plane / depth;
          if (v.p.gemm.batch > 0 && z < v.d->rows && n < v.p.images)
            DepthwiseLast{v, (Line*)own}.some_lines(n, z, y, min_of(min_of(y + turn, end), v.h->rows));
        }
      }
    }
    end_streams();
    crew.end_stage(pieces);
  }

  void some_lines(int64_t n, int64_t z, int64_t y, int64_t end) const {
    const ChannelOperands<Config> operands(v.p, 1);
    constexpr bool whole = is_same<C, fp32> || (pairs && is_same<C, bf16>);
    const bool stream = plain && whole && streams_result(v.p, v.p.groups, size_of<C>);
    for (int64_t c = 0; c < v.p.groups; c += kTileChannels)
      for (int64_t at = y; at < end; at += kRows) line(operands.problem, n, z, at, min_of(end - at, kRows), c, stream);
  }

  // Images that come from memory are asked for a line ahead; where they come from a cache, asking only takes time.
  bool fetches() const {
    const int64_t pixels = v.p.images * v.d->size * v.h->size * v.w->size;
    return pixels * v.p.groups * size_of<E> > kFetchBytes * v.step * v.step;
  }

  struct Tile {
    int64_t lines;         // of the image
    int64_t begin;         // the first pixel of the image that a line's taps meet,
    int64_t offset;        // and where it lies in a line, in bytes
    uint64_t inside;       // a bit for each pixel from there on that lies in the image
    int64_t number;        // of the first pixel
    int64_t rows, pixels;  // that exist
    int64_t first, count;  // channels
    int64_t ahead;         // bytes from a line to one that is read soon,
    int64_t fresh;         // and the first line that is so; none if the image lies in a cache
    bool edge;             // meets pixels outside the image
    bool stream;           // results are not kept in a cache
  };

  // `rows` lines of the result and some of their channels.
  void line(const tw_gemm_problem& operands, int64_t n, int64_t z, int64_t y, int64_t rows, int64_t c,
            bool stream) const {
    Tile tile;
    tile.lines = find_lines(n, z, y, rows, c);
    tile.rows = rows, tile.first = c, tile.count = min_of(v.p.groups - c, kTileChannels), tile.stream = stream;
    tile.ahead = kRows * v.h->row_step * v.h->image_stride * size_of<E>;
    tile.fresh = fetches() ? max_of(tile.lines - kRows * v.h->row_step, 0) : tile.lines;
    const int64_t number = ((n * v.d->rows + z) * v.h->rows + y) * v.w->rows;
    const int64_t offset = n * v.p.row_n + z * v.d->row_stride + y * v.h->row_stride;
    const int64_t taps = v.w->taps, reach = v.reach(P);
    LineOutput out;
    out.problem = &operands, out.item = 0, out.raw = false, out.ld = v.w->row_stride, out.operands_of = 0;
    for (int64_t x = 0; x < v.w->rows; x += P) {
      out.data = (char*)v.p.gemm.c + (offset + x * v.w->row_stride) * size_of<C>;
      out.old = (const char*)v.p.acc + (out.data - (char*)v.p.gemm.c);
      tile.begin = v.origin + x * v.step, tile.offset = tile.begin * v.w->image_stride * size_of<E>;
      tile.number = number + x, tile.pixels = min_of(v.w->rows - x, P);
      tile.edge = tile.begin < 0 || tile.begin + reach > v.w->size;
      if (tile.edge && reach <= 64) {
        const int64_t low = min_of(max_of(-tile.begin, 0), 63), high = v.w->size - tile.begin;
        tile.inside = high <= low ? 0 : (~0ull >> (64 - min_of(high, 64))) & (~0ull << low);
      }
      const bool near = v.tap_step == 1 || taps == 1;
      if (!near) all_channels<0, 0, false>(tile, out);
      else if (taps == 3 && v.step == 1) taps_of<3, 1>(tile, out);
      else if (forward && taps == 3 && v.step == 2) taps_of<3, forward ? 2 : 1>(tile, out);
      else if (!forward && taps == 2 && v.step == 1) taps_of<forward ? 3 : 2, 1>(tile, out);
      else if (!forward && taps == 1 && v.step == 1) taps_of<forward ? 3 : 1, 1>(tile, out);
      else all_channels<0, 0, false>(tile, out);
    }
  }

  // The lines of the image that taps of lines [y, y + rows) of the result meet, plane by plane: each line of the result
  // meets them from the first to the last, whichever lines it is computed with.
  int64_t find_lines(int64_t n, int64_t z, int64_t y, int64_t rows, int64_t c) const {
    const char* const image = (const char*)v.p.gemm.a + (n * v.p.image_n + c * v.p.image_g) * size_of<E>;
    int64_t count = 0;
    for (int64_t td = 0; td < v.d->taps; td++) {
      const int64_t first = count;
      for (int64_t r = 0; r < rows; r++) {
        int64_t i = r == 0 ? count : first;
        for (int64_t k = 0; k < v.h->taps; k++, i++) {
          const int64_t l = td * v.h->taps + (v.h->tap_step < 0 ? v.h->taps - 1 - k : k);
          int64_t plane, row;
          if (!v.line_at(l, z, y + r, plane, row)) {
            i--;
            continue;
          }
          const char* const at = image + (plane * v.d->image_stride + row * v.h->image_stride) * size_of<E>;
          while (i < count && lines[i].image != at) i++;
          if (i == count) {
            lines[count++].image = at;
            for (int other = 0; other < kRows; other++) lines[i].weights[other] = nullptr;
          }
          lines[i].weights[r] = v.weights + (l * v.w->taps * v.channels + c) * size_of<PackedWeight>;
        }
      }
    }
    return count;
  }

  template <int kT, int kS>
  void taps_of(const Tile& tile, const LineOutput& out) const {
    static_assert((P - 1) * kS + kT <= 64, "bits of Tile::inside");
    if (tile.edge && !keeps<kT, kS>) all_channels<kT, kS, true>(tile, out);
    else all_channels<kT, kS, false>(tile, out);
  }

  // kT taps that are neighbours and pixels kS apart; or any. What is left of an odd number of vectors is computed with
  // those before it, where results may be computed twice.
  template <int kT, int kS, bool kEdge>
  TW_NOINLINE void all_channels(const Tile& tile, const LineOutput& out) const {
    constexpr bool two = pairs && kT > 0;
    constexpr int64_t kWide = two ? 2 * L : L;
    const int64_t count = tile.count;
    int64_t c = 0;
    if (repeatable && count >= kWide) {
      for (; c < count; c += kWide) vectors<kT, kS, kEdge, two>(tile, out, min_of(c, count - kWide));
      return;
    }
    if constexpr (!repeatable)
      for (; c + kWide <= count; c += kWide) vectors<kT, kS, kEdge, two>(tile, out, c);
    if (c < count) rest(tile, out, c);
  }
  template <int kT, int kS, bool kEdge, bool kTwo>
  TW_INLINE void vectors(const Tile& tile, const LineOutput& out, int64_t c) const {
#if TW_PAIRS_OF_BF16
    if constexpr (kTwo) return multiply_pairs<kT, kS, kEdge>(tile, out, c);
#endif
    if constexpr (kT == 0) multiply_any<true>(tile, out, c);
    else multiply<kT, kS, kEdge>(tile, out, c);
  }
  TW_NOINLINE void rest(const Tile& tile, const LineOutput& out, int64_t c) const {
    for (; c < tile.count; c += L) multiply_any<false>(tile, out, c);
  }

  alignas(64) static constexpr char zeros[64] = {};

  template <bool kWhole>
  static TW_INLINE f32v load(const char* at, int64_t count) {
    if constexpr (kWhole) return load_f32<E>(at);
    else return load_f32_partial<E>(at, count);
  }
  template <bool kEdge>
  static TW_INLINE const char* inside(const Tile& tile, int q, const char* at) {
    return !kEdge || (tile.inside >> q & 1) ? at : zeros;
  }

  // All taps along W of one line of the image, for those lines of the result that kOf has a bit for.
  template <int kT, int kS, bool kEdge, int kOf>
  TW_INLINE void add(const Tile& tile, const Line& line, int64_t c, f32v (&sums)[kRows][P]) const {
    const int64_t pixel = v.w->image_stride * size_of<E>, next = v.channels * size_of<PackedWeight>;
    f32v w[kRows][kT];
    TW_UNROLL
    for (int r = 0; r < kRows; r++)
      if (kOf >> r & 1)
        TW_UNROLL
        for (int t = 0; t < kT; t++)
          w[r][t] = load_f32<PackedWeight>(line.weights[r] + c * size_of<PackedWeight> + t * next);
    const char* at = line.image + tile.offset + c * size_of<E>;
    TW_UNROLL
    for (int q = 0; q < (P - 1) * kS + kT; q++, at += pixel) {
      const f32v x = load_f32<E>(inside<kEdge>(tile, q, at));
      TW_UNROLL
      for (int t = 0; t < kT; t++)
        if (q >= t && (q - t) % kS == 0 && (q - t) / kS < P)
          TW_UNROLL
          for (int r = 0; r < kRows; r++)
            if (kOf >> r & 1) sums[r][(q - t) / kS] += x * w[r][t];
    }
  }

  // True if the pixels of a line that its taps meet fit into registers beside all sums.
  template <int kT, int kS>
  static constexpr bool keeps = kRows > 1 && kS == 1 && kT > 0;

  // The same with all pixels in registers, which lines of the result and tiles at an edge share.
  template <int kT>
  TW_INLINE void add_kept(const Tile& tile, const Line& line, const char* at, int64_t c, int64_t pixel, int64_t next,
                          f32v (&sums)[kRows][P]) const {
    f32v x[P - 1 + kT];
    if (tile.edge) {
      TW_UNROLL
      for (int q = 0; q < P - 1 + kT; q++, at += pixel) x[q] = load_f32<E>(inside<true>(tile, q, at));
    } else {
      TW_UNROLL
      for (int q = 0; q < P - 1 + kT; q++, at += pixel) x[q] = load_f32<E>(at);
    }
    TW_UNROLL
    for (int r = 0; r < kRows; r++) {
      const char* weights = line.weights[r];
      if (!weights) continue;
      weights += c * size_of<PackedWeight>;
      TW_UNROLL
      for (int t = 0; t < kT; t++, weights += next) {
        const f32v w = load_f32<PackedWeight>(weights);
        TW_UNROLL
        for (int p = 0; p < P; p++) sums[r][p] += x[p + t] * w;
      }
    }
  }

  template <int kT, int kS, bool kEdge>
  TW_INLINE void multiply(const Tile& tile, const LineOutput& out, int64_t c) const {
    f32v sums[kRows][P];
    TW_UNROLL
    for (int r = 0; r < kRows; r++)
      TW_UNROLL
      for (int p = 0; p < P; p++) sums[r][p] = f32v{};
    fetch<kS>(tile, c);
    const int64_t pixel = v.w->image_stride * size_of<E>, next = v.channels * size_of<PackedWeight>;
    const int64_t offset = tile.offset + c * size_of<E>, count = tile.lines;
    const Line* line = lines;
    for (int64_t i = 0; i < count; i++, line++) {
      if constexpr (keeps<kT, kS>) {
        add_kept<kT>(tile, *line, line->image + offset, c, pixel, next, sums);
      } else if constexpr (kRows == 1) {
        add<kT, kS, kEdge, 1>(tile, *line, c, sums);
      } else {
        if (line->weights[0] && line->weights[kRows - 1]) add<kT, kS, kEdge, 3>(tile, *line, c, sums);
        else if (line->weights[0]) add<kT, kS, kEdge, 1>(tile, *line, c, sums);
        else add<kT, kS, kEdge, 2>(tile, *line, c, sums);
      }
    }
    finish<kRows, true>(tile, out, 0, c, sums[0]);
  }

  // Any taps, for one line of the result after the other: they share nothing.
  template <bool kWhole>
  TW_INLINE void multiply_any(const Tile& tile, const LineOutput& out, int64_t c) const {
    const int64_t pixel = v.w->image_stride * size_of<E>, next = v.channels * size_of<PackedWeight>;
    const int64_t taps = v.w->taps, step = v.step * pixel, tap_step = v.tap_step * pixel;
    const int64_t offset = tile.offset + c * size_of<E>;
    for (int r = 0; r < tile.rows; r++) {
      f32v sums[P];
      TW_UNROLL
      for (int p = 0; p < P; p++) sums[p] = f32v{};
      for (int64_t i = 0; i < tile.lines; i++) {
        const char* weights = lines[i].weights[r];
        if (!weights) continue;
        weights += c * size_of<PackedWeight>;
        const char* from = lines[i].image + offset;
        if (kWhole && !tile.edge) {
          for (int64_t t = 0; t < taps; t++, weights += next, from += tap_step) {
            const f32v w = load_f32<PackedWeight>(weights);
            const char* at = from;
            TW_UNROLL
            for (int p = 0; p < P; p++, at += step) sums[p] += load_f32<E>(at) * w;
          }
        } else {
          for (int64_t t = 0; t < taps; t++, weights += next, from += tap_step) {
            const f32v w = load_f32<PackedWeight>(weights);
            const char* at = from;
            uint64_t x = (uint64_t)(tile.begin + t * v.tap_step);  // more than any size if it lies before the image
            TW_UNROLL
            for (int p = 0; p < P; p++, at += step, x += (uint64_t)v.step)
              sums[p] += load<kWhole>(x < (uint64_t)v.w->size ? at : zeros, tile.count - c) * w;
          }
        }
      }
      finish<1, kWhole>(tile, out, r, c, sums);
    }
  }

  template <int kS>
  TW_INLINE void fetch(const Tile& tile, int64_t c) const {
    const int64_t pixel = v.w->image_stride * size_of<E>;
    for (int64_t i = tile.fresh; i < tile.lines; i++) {
      const char* at = lines[i].image + tile.offset + c * size_of<E> + tile.ahead;
      TW_UNROLL
      for (int q = 0; q < P * kS; q++, at += pixel) __builtin_prefetch(at, 0, 3);
    }
  }

  // Stores kCount lines of the result from line r on, of those that exist.
  template <int kCount, bool kWhole>
  TW_INLINE void finish(const Tile& tile, const LineOutput& of, int r, int64_t c, const f32v* sums) const {
    if constexpr (plain && kWhole) {
      if (tile.pixels == P && of.problem->alpha == 1.0) {
        char* line = of.data + (r * v.h->row_stride + tile.first + c) * size_of<C>;
        const int64_t next = v.w->row_stride * size_of<C>;
        TW_UNROLL
        for (int k = 0; k < kCount; k++, line += v.h->row_stride * size_of<C>) {
          if (k > 0 && k >= tile.rows) break;
          char* to = line;
          if (is_same<C, fp32> && tile.stream) {
            TW_UNROLL
            for (int p = 0; p < P; p++, to += next) stream_as(to, sums[k * P + p]);
          } else {
            TW_UNROLL
            for (int p = 0; p < P; p++, to += next) store_f32<C>(to, sums[k * P + p]);
          }
        }
        return;
      }
    }
    alignas(64) float kept[kCount * P * L];
    TW_UNROLL
    for (int i = 0; i < kCount * P; i++) store_as(kept + i * L, sums[i]);
    for (int k = 0; k < kCount; k++)
      if (k == 0 || k < tile.rows) finish_kept(tile, of, r + k, c, kept + k * P * L);
  }
  TW_NOINLINE void finish_kept(const Tile& tile, const LineOutput& of, int r, int64_t c, const float* kept) const {
    LineOutput out = of;
    out.data += r * v.h->row_stride * size_of<C>, out.old += r * v.h->row_stride * size_of<C>;
    Out::store(out, tile.number + r * v.w->rows, tile.first + c, tile.pixels, min_of(tile.count - c, L), kept, L,
               nullptr);
  }

#if TW_PAIRS_OF_BF16
  // 2 L channels; lines of the image two by two, the last of an odd number with zeros.
  template <int kT, int kS, bool kEdge>
  TW_INLINE void multiply_pairs(const Tile& tile, const LineOutput& out, int64_t c) const {
    constexpr auto both = typename MakeSequence<2 * L>::type{};
    constexpr auto one = typename MakeSequence<L>::type{};
    f32v low[P], high[P];
    TW_UNROLL
    for (int p = 0; p < P; p++) low[p] = high[p] = f32v{};
    fetch<kS>(tile, c);
    constexpr int kPixels = (P - 1) * kS + kT;
    const int64_t pixel = v.w->image_stride * 2;
    for (int64_t l = 0; l < tile.lines; l += 2) {
      const bool two = l + 1 < tile.lines;
      const char* first = lines[l].weights[0] + c * 2;
      const char* second = two ? lines[l + 1].weights[0] + c * 2 : zeros;
      u32v w[2 * kT];
      TW_UNROLL
      for (int t = 0; t < kT; t++, first += v.channels * 2, second += two ? v.channels * 2 : 0) {
        const u16v a = load_as<u16v>(first), b = load_as<u16v>(second);
        w[2 * t] = interleave<0>(a, b, both), w[2 * t + 1] = interleave<4>(a, b, both);
      }
      const char* above = lines[l].image + tile.offset + c * 2;
      const char* below = two ? lines[l + 1].image + tile.offset + c * 2 : zeros;
      const int64_t below_pixel = two ? pixel : 0;
      // At stride 1 the second line's pixels fit into registers beside all sums.
      u16v second_line[kPixels] = {};
      if (kS == 1 && two)
        TW_UNROLL
        for (int q = 0; q < kPixels; q++, below += pixel) second_line[q] = load_as<u16v>(inside<kEdge>(tile, q, below));
      TW_UNROLL
      for (int q = 0; q < kPixels; q++, above += pixel, below += below_pixel) {
        const u16v a = load_as<u16v>(inside<kEdge>(tile, q, above));
        const u16v b = kS == 1 ? second_line[q] : load_as<u16v>(inside<kEdge>(tile, q, below));
        const u32v x_low = interleave<0>(a, b, both), x_high = interleave<4>(a, b, both);
        TW_UNROLL
        for (int t = 0; t < kT; t++)
          if (q >= t && (q - t) % kS == 0 && (q - t) / kS < P) {
            low[(q - t) / kS] = DotBf16::step(low[(q - t) / kS], x_low, w[2 * t]);
            high[(q - t) / kS] = DotBf16::step(high[(q - t) / kS], x_high, w[2 * t + 1]);
          }
      }
    }
    if constexpr (plain && is_same<C, bf16>) {
      // No sum of products of pairs is subnormal, and so all of them are rounded as elsewhere.
      if (out.problem->alpha == 1.0) {
        char* to = out.data + (tile.first + c) * 2;
        TW_UNROLL
        for (int p = 0; p < P; p++, to += out.ld * 2) {
          if (p >= tile.pixels) continue;
          const u16v x = in_order(narrow_to_bf16(low[p], high[p]), both);
          if (tile.stream) stream_as(to, x);
          else store_as(to, x);
        }
        return;
      }
    }
    alignas(64) float kept[2][P * L];
    TW_UNROLL
    for (int p = 0; p < P; p++) {
      store_as(kept[0] + p * L, in_order<0>(low[p], high[p], one));
      store_as(kept[1] + p * L, in_order<1>(low[p], high[p], one));
    }
    finish_kept(tile, out, 0, c, kept[0]);
    finish_kept(tile, out, 0, c + L, kept[1]);
  }
#endif
};

TW_NAMESPACE_END
