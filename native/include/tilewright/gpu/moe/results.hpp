// Results of experts that are made of sums, on any GPU: the activation of a gate, and fp8 with a factor for each row and
// block of columns. A wave stages strips of its sums in shared memory, as the GEMM's epilogue does, and a lane makes eight
// neighbouring results at a time. The columns of a block are those of a tile: strips are walked twice, once for the
// largest magnitudes of their rows, which the waves beside each other then exchange.
#pragma once
#include "tilewright/core/moe_rows.hpp"
#include "tilewright/gpu/gemm/gemm.hpp"

namespace tw::gpu {

// To nearest even; beyond the range, to its end.
TW_DEVICE uint32_t fp8_of(float x) {
  const uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000u) return sign | 0x7f;
  // Below 2^-6 values are multiples of 2^-9, which the last bits of a sum with 2^14 count.
  if (magnitude < 0x3c800000u) return sign | (bits_of(float_of(magnitude) + 16384.0f) & 0xff);
  const uint32_t rounded = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const uint32_t moved = rounded - ((127 - 7) << 3);
  return sign | (moved < 0x7e ? moved : 0x7e);
}

template <class Base, class Results>
struct MoeStore {
  using Atom = typename Base::Atom;
  using Result = typename Results::Result;
  static constexpr int per_result = Results::gated ? 2 : 1;
  static constexpr int kEach = kMoeTurn, kPerRow = Base::strip_columns / (kEach * per_result);
  static constexpr int kTotal = Atom::strip_rows * kPerRow, kPasses = ceil_div(kTotal, kWave);
  static_assert(Base::shuffles, "sums pass through shared memory");
  static_assert(Base::strip_columns % (kEach * per_result) == 0, "strips are of whole turns");
  // Waves beside each other, which have the columns of a block, and below each other.
  static constexpr int kWaves = kMoeBlock * per_result / Base::wave_columns, kWavesDown = Base::waves / max_of(kWaves, 1);
  static_assert(!Results::quantised || (Base::waves % kWaves == 0 && kWaves * Base::wave_columns == kMoeBlock * per_result),
                "a tile has the columns of a block");
  static_assert(!Results::quantised || kWave % kPerRow == 0, "lanes side by side have a row");

  const tw_gemm_problem& problem;
  char* const c;         // the first row's results
  float* const scales;   // and factors
  int64_t row_stride, block_stride;  // of factors
  const int columns;     // of the result

  // i0, j0: the tile in the product, of which rows up to problem.m exist.
  TW_DEVICE void store(const Atom& atom, int i0, int j0, const Where& at) const {
    const uint32_t strip_at = at.shared + at.thread / kWave * Base::strip_bytes;
    i0 += at.m0, j0 += at.n0;
    if constexpr (Results::quantised) {
      TW_NO_UNROLL
      for (int strip = 0; strip < Atom::strips; strip++) find_most(atom, strip, strip_at, j0, at.lane);
      if constexpr (kWaves > 1) barrier();
      else wave_barrier();
    }
    TW_NO_UNROLL
    for (int strip = 0; strip < Atom::strips; strip++)
      each_part(atom, strip, strip_at, at.lane, [&](int part) {
        TW_UNROLL
        for (int pass = 0; pass < kPasses; pass++) {
          float y[kEach];
          const int id = at.lane + pass * kWave, i = i0 + strip * Atom::strip_rows + id / kPerRow;
          const int count = values(y, strip_at, j0, part, id), j = column(j0, part, id);
          if (id >= kTotal || i >= (int)problem.m || count <= 0) continue;
          if constexpr (Results::quantised) {
            const float most = most_of(id / kPerRow, strip, at);
            if (j % kMoeBlock == 0) store_global(scale_at(i, j), most / kMoeLargest);
            put8(y, kMoeLargest / most, i, j, count);
          } else {
            put(y, i, j, count);
          }
        }
      });
  }

 private:
  // Rows of a strip end with words that hold no sums: word s takes the largest magnitude of strip s in these columns.
  static constexpr int kFree = Base::strip_ld - Base::strip_columns;
  static_assert(!Results::quantised || Atom::strips <= kFree, "a word for each strip");
  TW_DEVICE static uint32_t place(uint32_t strip_at, int row, int strip) {
    return strip_at + (row * Base::strip_ld + Base::strip_columns + strip) * 4;
  }
  TW_DEVICE void find_most(const Atom& atom, int strip, uint32_t strip_at, int j0, int lane) const {
    float most[kPasses];
    TW_UNROLL
    for (int pass = 0; pass < kPasses; pass++) most[pass] = kMoeLeastRange;
    each_part(atom, strip, strip_at, lane, [&](int part) {
      TW_UNROLL
      for (int pass = 0; pass < kPasses; pass++) {
        float y[kEach];
        const int count = values(y, strip_at, j0, part, lane + pass * kWave);
        TW_UNROLL
        for (int e = 0; e < kEach; e++)
          if (e < count) most[pass] = max_of(most[pass], magnitude_of(y[e]));
      }
    });
    TW_UNROLL
    for (int pass = 0; pass < kPasses; pass++) {
      TW_UNROLL
      for (int step = 1; step < kPerRow; step *= 2) most[pass] = max_of(most[pass], shuffle_xor(most[pass], step));
      const int id = lane + pass * kWave;
      if (id < kTotal && id % kPerRow == 0) store_shared<1>(place(strip_at, id / kPerRow, strip), {bits_of(most[pass])});
    }
  }
  // Over all columns of the tile: of waves that have the same rows.
  TW_DEVICE static float most_of(int row, int strip, const Where& at) {
    const int wave = at.thread / kWave;
    float most = kMoeLeastRange;
    TW_UNROLL
    for (int beside = 0; beside < kWaves; beside++) {
      const int other = kWaves == 1 ? wave : wave % kWavesDown + beside * kWavesDown;
      most = max_of(most, float_of(load_shared<1>(place(at.shared + other * Base::strip_bytes, row, strip)).w[0]));
    }
    return most;
  }

  template <class Use>
  TW_DEVICE static void each_part(const Atom& atom, int strip, uint32_t strip_at, int lane, const Use& use) {
    TW_UNROLL
    for (int part = 0; part < Base::strip_parts; part++) {
      Base::template with_constant<Atom::strips>(strip, [&](int s) { Base::stage(atom, s, part, strip_at, lane); });
      wave_barrier();
      use(part);
      wave_barrier();
    }
  }
  // The first of the eight results of a lane.
  TW_DEVICE static int column(int j0, int part, int id) {
    return (j0 + part * Base::strip_columns) / per_result + id % kPerRow * kEach;
  }
  TW_DEVICE char* scale_at(int i, int j) const {
    return (char*)(scales + i * row_stride + j / kMoeBlock * block_stride);
  }
  // Results; how many of them exist, if any.
  TW_DEVICE int values(float (&y)[kEach], uint32_t strip_at, int j0, int part, int id) const {
    const int row = id / kPerRow % Atom::strip_rows;
    const uint32_t from = strip_at + (row * Base::strip_ld + id % kPerRow * (kEach * per_result)) * 4;
    const float alpha = (float)problem.alpha;
    float x[kEach * per_result];
    TW_UNROLL
    for (int v = 0; v < kEach * per_result; v += 4) {
      const Words<4> w = load_shared<4>(from + v * 4);
      TW_UNROLL
      for (int l = 0; l < 4; l++) x[v + l] = float_of(w.w[l]) * alpha;
    }
    TW_UNROLL
    for (int e = 0; e < kEach; e++) {
      if constexpr (Results::gated) y[e] = apply_unary<Unary::Silu>(x[e], 0.0f, 0.0f) * x[kEach + e];
      else y[e] = x[e];
    }
    return min_of(columns - column(j0, part, id), kEach);
  }

  TW_DEVICE void put(const float (&y)[kEach], int i, int j, int count) const {
    constexpr int kVector = min_of(kEach, 16 / size_of<Result>);
    char* const to = c + (i * problem.ldc + j) * size_of<Result>;
    if (count >= kEach && is_aligned(to, kVector * size_of<Result>)) {
      TW_UNROLL
      for (int v = 0; v < kEach; v += kVector) {
        float some[kVector];
        TW_UNROLL
        for (int e = 0; e < kVector; e++) some[e] = y[v + e];
        store_global(to + v * size_of<Result>, pack<Result>(some));
      }
    } else {
      TW_UNROLL
      for (int e = 0; e < kEach; e++)
        if (e < count) store_global(to + e * size_of<Result>, from_float<Result>(y[e]));
    }
  }
  TW_DEVICE void put8(const float (&y)[kEach], float factor, int i, int j, int count) const {
    char* const to = c + i * problem.ldc + j;
    Words<2> w = {};
    TW_UNROLL
    for (int e = 0; e < kEach; e++) w.w[e / 4] |= fp8_of(y[e] * factor) << (e % 4 * 8);
    if (count >= kEach && is_aligned(to, 8)) {
      store_global(to, w);
    } else {
      TW_UNROLL
      for (int e = 0; e < kEach; e++)
        if (e < count) store_global(to + e, (uint8_t)(w.w[e / 4] >> (e % 4 * 8)));
    }
  }
};

}  // namespace tw::gpu
