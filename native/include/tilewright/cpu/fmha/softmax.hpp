// Online softmax of one block of scores: features, mask, maxima, exponentials, sums. A block comes as S = Q K^T, row
// after row, and leaves as P in its place, as fp32 or as pairs of bf16.
//
// Scores are kept in log2: t = scale * log2(e) * s + ..., p = 2^(t - m), m the row's maximum so far.
#pragma once
#include "tilewright/core/math.hpp"
#include "tilewright/cpu/fmha/block.hpp"
#include "tilewright/cpu/blocks/philox.hpp"

TW_NAMESPACE_BEGIN

TW_INLINE f32v lane_numbers() {
  f32v x = {};
  TW_UNROLL
  for (int i = 0; i < kLanes; i++) x[i] = (float)i;
  return x;
}

// Lane i: all lanes of x[i] reduced by `step`.
template <class Step>
TW_INLINE f32v reduce_each(const f32v* x, Step step) {
  u32v rows[kLanes];
  f32v columns[kLanes];
  TW_UNROLL
  for (int i = 0; i < kLanes; i++) rows[i] = (u32v)x[i];
  transpose(rows);
  TW_UNROLL
  for (int i = 0; i < kLanes; i++) columns[i] = (f32v)rows[i];
  TW_UNROLL
  for (int width = kLanes / 2; width > 0; width /= 2)
    TW_UNROLL
    for (int i = 0; i < width; i++) columns[i] = step(columns[i], columns[i + width]);
  return columns[0];
}
TW_INLINE f32v max_of_each(const f32v* x) {
  return reduce_each(x, [](f32v a, f32v b) { return max(a, b); });
}
TW_INLINE f32v sum_of_each(const f32v* x) {
  return reduce_each(x, [](f32v a, f32v b) { return a + b; });
}

// Two vectors of probabilities as 2 L values of bf16.
TW_INLINE void store_bf16_pair(void* to, f32v low, f32v high) {
#if defined(__AVX512BF16__) && defined(__clang__)
  store_as(to, __builtin_ia32_cvtne2ps2bf16_512(high, low));
#elif defined(__AVX512BF16__) && __GNUC__ >= 13
  store_as(to, __builtin_ia32_cvtne2ps2bf16_v32bf(high, low));
#elif defined(__AVX512BF16__)
  store_as(to, __builtin_ia32_cvtne2ps2bf16_v32hi(high, low));
#else
  store_f32<bf16>(to, low);
  store_f32<bf16>((char*)to + kVectorBytes / 2, high);
#endif
}

// Columns [first, first + count) of an item. The scales are of these columns, null if they do not vary along them;
// absent[j]: the cache has no page for this column (null: it has all).
struct FmhaColumns {
  int64_t first, count;
  const float *k_scale, *v_scale;
  const uint8_t* absent;
};

template <class Config>
struct FmhaSoftmax {
  using B = FmhaBlocking<Config>;
  static constexpr bool varying = Config::qscale == FmhaScale::blockscale || Config::qscale == FmhaScale::kv_blockscale;
  static constexpr bool modifies = Config::softcap || Config::bias != FmhaBias::no || varying;

  const tw_fmha_args& args;
  const FmhaItem& item;
  FmhaSeed seed;
  int64_t b, head, group;  // of item b: packed row p is query p / group of head head + p % group
  float *m, *l, *scale, *rescale;
  uint8_t* random;

  // Makes P of `rows` rows of S, from packed row p; row r of it has its state at m[r], l[r], scale[r].
  TW_NOINLINE void run(float* s, int64_t p, int64_t r, int64_t rows, const FmhaColumns& c) const {
    const int64_t n = round_up(c.count, kLanes * B::depth);
    const bool edges = n > c.count || c.absent || !whole(p, rows, c);
    for (int64_t i = 0; i < rows; i += kLanes) {
      const int64_t now = min_of(rows - i, kLanes);
      alignas(64) f32v of_rows[kLanes];
      for (int64_t k = 0; k < now; k++) {
        float* const row = s + (i + k) * B::s_words;
        if constexpr (modifies) modify(row, p + i + k, scale[r + i + k], c);
        if (edges) hide(row, p + i + k, n, c);
        f32v top = load_as<f32v>(row), other = top;
        int64_t j = kLanes;
        for (; j + kLanes < n; j += 2 * kLanes) {
          top = max(load_as<f32v>(row + j), top);
          other = max(load_as<f32v>(row + j + kLanes), other);
        }
        if (j < n) top = max(load_as<f32v>(row + j), top);
        of_rows[k] = max(top, other);
      }
      for (int64_t k = now; k < kLanes; k++) of_rows[k] = splat(-__builtin_inff());
      const f32v factor = modifies ? splat(1.0f) : load_as<f32v>(scale + r + i);
      const f32v before = load_as<f32v>(m + r + i), after = max(max_of_each(of_rows) * factor, before);
      const f32v safe = select(after == -__builtin_inff(), f32v{}, after), alpha = exp2(before - safe);
      store_as(m + r + i, after);
      store_as(rescale + i, alpha);
      float safes[kLanes], factors[kLanes];
      store_as(safes, safe), store_as(factors, factor);
      for (int64_t k = 0; k < now; k++)
        of_rows[k] = exponentials(s + (i + k) * B::s_words, n, factors[k], safes[k], p + i + k, c);
      for (int64_t k = now; k < kLanes; k++) of_rows[k] = f32v{};
      store_as(l + r + i, load_as<f32v>(l + r + i) * alpha + sum_of_each(of_rows));
    }
  }

  TW_INLINE f32v exponentials(float* row, int64_t n, float factor, float safe, int64_t p, const FmhaColumns& c) const {
    f32v sum = {};
    const uint8_t* bytes = nullptr;
    if constexpr (Config::dropout)
      bytes = fmha_random_row(seed, b * args.heads_q + head + p % group, p / group, c.first, n, random);
    for (int64_t j = 0; j < n; j += B::depth * kLanes) {
      f32v x[B::depth];
      TW_UNROLL
      for (int d = 0; d < B::depth; d++) {
        x[d] = exp2(load_as<f32v>(row + j + d * kLanes) * factor - safe);
        sum += x[d];
        if constexpr (Config::dropout)
          x[d] = select((i32v)(widen_u8(bytes + j + d * kLanes) < (uint32_t)args.drop_below), f32v{}, x[d]);
        if constexpr (varying) x[d] *= load_as<f32v>(c.v_scale + j + d * kLanes);
      }
      if constexpr (B::depth == 2) store_bf16_pair((uint32_t*)row + j / 2, x[0], x[1]);
      else store_as(row + j, x[0]);
    }
    return sum;
  }

  // Every column is visible to every one of these rows.
  TW_INLINE bool whole(int64_t p, int64_t rows, const FmhaColumns& c) const {
    if constexpr (Config::mask == FmhaMask::no) return true;
    const int64_t top = p / group + item.off, low = (p + rows - 1) / group + item.off;
    return (args.right < 0 || c.first + c.count <= top + args.right + 1) && (args.left < 0 || c.first >= low - args.left);
  }

  static TW_INLINE void fill(float* row, int64_t from, int64_t to) {
    for (int64_t j = from; j < to; j++) row[j] = -__builtin_inff();
  }

  // Columns that the row does not see become -inf.
  TW_NOINLINE void hide(float* row, int64_t p, int64_t n, const FmhaColumns& c) const {
    const int64_t i = p / group + item.off;
    int64_t end = c.count;
    if (Config::mask != FmhaMask::no && args.right >= 0) end = min_of(end, max_of(i + args.right + 1 - c.first, 0));
    fill(row, end, n);
    if (Config::mask != FmhaMask::no && args.left >= 0)
      fill(row, max_of(args.sink_size - c.first, 0), min_of(i - args.left - c.first, end));
    if (Config::paged && c.absent)
      for (int64_t j = 0; j < end; j++)
        if (c.absent[j]) row[j] = -__builtin_inff();
  }

  // Scale, soft cap, bias and ALiBi.
  TW_NOINLINE void modify(float* row, int64_t p, float factor, const FmhaColumns& c) const {
    const int64_t i = p / group, h = head + p % group;
    const float cap = (float)args.softcap, unit = Config::softcap ? 1.0f / cap : 1.0f;
    const char* bias = nullptr;
    float slope = 0;
    if constexpr (Config::bias == FmhaBias::elementwise)
      bias = (const char*)args.bias.ptr +
             (b * args.bias.batch + h * args.bias.head + i * args.bias.row + c.first * args.bias.col) *
                 size_of<typename Config::Bias>;
    if constexpr (Config::bias == FmhaBias::alibi) slope = -kLog2E * args.slopes[b * args.slope_batch + h];
    const f32v numbers = lane_numbers();
    for (int64_t j = 0; j < c.count; j += kLanes) {
      f32v x = load_as<f32v>(row + j) * (factor * unit);
      if constexpr (varying) x *= load_as<f32v>(c.k_scale + j);
      if constexpr (Config::softcap) x = tanh(x) * (cap * kLog2E);
      if constexpr (Config::bias == FmhaBias::elementwise) x += bias_at(bias, j, c.count - j) * kLog2E;
      if constexpr (Config::bias == FmhaBias::alibi)
        x += slope * abs((float)(i + item.off - c.first - j) - numbers);
      store_as(row + j, x);
    }
  }

  TW_INLINE f32v bias_at(const char* row, int64_t j, int64_t count) const {
    using E = typename Config::Bias;
    if (args.bias.col == 1) return load_f32_partial<E>(row + j * size_of<E>, min_of(count, kLanes));
    if (args.bias.col == 0) return splat(to_float<E>(row));
    f32v x = {};
    for (int64_t k = 0; k < min_of(count, kLanes); k++) x[k] = to_float<E>(row + (j + k) * args.bias.col * size_of<E>);
    return x;
  }
};

TW_NAMESPACE_END
