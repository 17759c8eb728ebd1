// Online softmax of one block of scores, in the registers of the atom that computed them: features, mask, maxima,
// exponentials, sums, dropout. Scores are kept in log2: t = scale * log2(e) * s + ..., p = 2^(t - m), m the row's
// maximum so far. A lane keeps the sum over its own columns; the lanes of a row add theirs at the end.
#pragma once
#include "tilewright/gpu/fmha/params.hpp"

namespace tw::gpu {

// 2^x - 1 over 2^x + 1 of x = 2 y log2(e), to 2^-22 of 1; of small y, as a large cap makes them, a series, to as much
// of y.
TW_DEVICE float fmha_tanh(float y) {
  const float z = y * y, small = y + y * z * (-1.0f / 3 + z * (2.0f / 15 - z * (17.0f / 315)));
  const float large = 1.0f - 2.0f * reciprocal(exp2(y * (2.0f * kLog2E)) + 1.0f);
  return z < 0.04f ? small : large;
}

// kColumns: of a block of scores that one wave has.
template <class Config, class Atom, int kColumns = Config::n0>
struct FmhaSoftmax {
  static constexpr int slots = Atom::slots, n0 = kColumns;
  static constexpr bool varying = Config::qscale == FmhaScale::blockscale || Config::qscale == FmhaScale::kv_blockscale;
  static constexpr bool by_row = Config::pack_gqa || varying;  // rows have factors of their own
  static constexpr bool modifies = Config::softcap || Config::bias != FmhaBias::no;

  const tw_fmha_args& args;
  const FmhaItem& item;
  FmhaSeed seed;
  int b, head, group, lane;  // packed: the first of `group` heads
  int row0;                  // the wave's first row in the item's (packed) rows
  float factor[by_row ? slots : 1];
  float m[slots], l[slots];
#if defined(__HIP__)
  // Elements of vectors are selected, never branched over (docs/kernels-amd.md), and registers are for results.
  static constexpr bool branches = false;
#else
  static constexpr bool branches = true;
#endif
  static constexpr bool keeps_rows = branches && Config::bias == FmhaBias::elementwise;
  const char* biases[keeps_rows ? slots : 1];

  TW_DEVICE int place(int slot) const { return row0 + Atom::row_at(lane, slot); }
  TW_DEVICE int query(int slot) const { return Config::pack_gqa ? place(slot) / group : place(slot); }
  TW_DEVICE int head_of(int slot) const { return Config::pack_gqa ? head + place(slot) % group : head; }
  TW_DEVICE int key_head() const { return head / group; }

  TW_DEVICE FmhaSoftmax(const tw_fmha_args& args, const FmhaItem& item, int b, int head, int group, int lane, int row0)
      : args(args), item(item), b(b), head(head), group(group), lane(lane), row0(row0) {
    if constexpr (Config::dropout) seed = fmha_seed(args);
    else seed = {};
    TW_UNROLL
    for (int s = 0; s < slots; s++)
      if constexpr (keeps_rows) biases[s] = bias_row(s);
    float all = (float)args.scale * (Config::softcap ? 1.0f / (float)args.softcap : kLog2E);
    if constexpr (Config::qscale != FmhaScale::no && !varying) all *= fmha_scale_at(args.k_scale, b, key_head(), 0);
    TW_UNROLL
    for (int s = 0; s < slots; s++) {
      const bool exists = query(s) < (int)item.q_rows;
      if constexpr (by_row) {
        factor[s] = all;
        if constexpr (Config::qscale != FmhaScale::no)
          if (exists) factor[s] *= fmha_scale_at(args.q_scale, b, head_of(s), query(s));
      }
      m[s] = minus_infinity(), l[s] = 0.0f;
      if constexpr (Config::learned_sinks && Config::family != FmhaFamily::split)
        if (exists) m[s] = load_constant<float>(args.sinks + head_of(s)) * kLog2E;
    }
    if constexpr (!by_row) {
      if constexpr (Config::qscale != FmhaScale::no) all *= fmha_scale_at(args.q_scale, b, head, 0);
      factor[0] = all;
    }
  }

  // Column 0 of the bias; null: there is no such row.
  TW_DEVICE const char* bias_row(int slot) const {
    if (query(slot) >= (int)item.q_rows) return nullptr;
    return (const char*)args.bias.ptr + (b * args.bias.batch + head_of(slot) * args.bias.head +
                                         query(slot) * args.bias.row) * size_of<typename Config::Bias>;
  }

  // Every column of the block is visible to every row of the wave.
  TW_DEVICE bool whole(int c0, int rows) const {
    if (c0 + n0 > (int)item.k_rows) return false;
    if constexpr (Config::mask == FmhaMask::no) return true;
    const int64_t g = Config::pack_gqa ? group : 1, top = row0 / g + item.off, low = (row0 + rows - 1) / g + item.off;
    return (args.right < 0 || c0 + n0 <= top + args.right + 1) && (args.left < 0 || c0 >= low - args.left);
  }

  // Columns that row i sees (fmha_visible): those of [0, sinks) and [first, last).
  struct Seen {
    int first, last, sinks;
    // Without short circuits: LLVM 22.1 makes wrong code of those for AMD GPUs (docs/kernels-amd.md).
    TW_DEVICE bool sees(int j) const { return (j < last) & ((j >= first) | (j < sinks)); }
  };
  TW_DEVICE Seen seen_by(int i) const {
    const int64_t rows = item.k_rows, diagonal = i + item.off;
    Seen seen = {0, (int)rows, 0};
    if constexpr (Config::mask != FmhaMask::no) {
      if (args.right >= 0) seen.last = (int)fmha_min(rows, fmha_max(diagonal + args.right + 1, 0));
    }
    if constexpr (Config::mask == FmhaMask::window) {
      if (args.left >= 0) {
        seen.first = (int)fmha_min(rows, fmha_max(diagonal - args.left, 0));
        if constexpr (Config::token_sinks) seen.sinks = (int)fmha_min(rows, args.sink_size);
      }
    }
    return seen;
  }

  TW_DEVICE float modify(float x, int slot, int i, int j) const {
    const int h = head_of(slot);
    if constexpr (Config::softcap) x = fmha_tanh(x) * ((float)args.softcap * kLog2E);
    if constexpr (Config::bias == FmhaBias::elementwise) {
      using E = typename Config::Bias;
      const char* const row = keeps_rows ? biases[keeps_rows ? slot : 0] : bias_row(slot);
      if (j < (int)item.k_rows && row)
        x += to_float<E>(load_constant<typename E::storage>(row + j * args.bias.col * size_of<E>)) * kLog2E;
    }
    if constexpr (Config::bias == FmhaBias::alibi) {
      const float slope = load_constant<float>(args.slopes + b * args.slope_batch + h);
      const int distance = i + (int)item.off - j;
      x -= slope * kLog2E * (float)(distance < 0 ? -distance : distance);
    }
    return x;
  }

  // Where a score is only multiplied by a factor, that is left to the exponential's argument.
  static constexpr bool folds = !varying && !modifies;

  // Makes P of S. rescale: what the sums of earlier blocks are to be multiplied by. pages, k_scales, v_scales: of the
  // block's columns, in shared memory.
  TW_DEVICE void run(Atom& s, int c0, bool edge, uint32_t pages, uint32_t scales, float (&rescale)[slots]) {
    float f[slots];
    bool odd = false;
    TW_UNROLL
    for (int i = 0; i < slots; i++) {
      f[i] = factor[by_row ? i : 0];
      odd |= folds && !(f[i] > 0.0f);
    }
    Seen seen[slots];
    TW_UNROLL
    for (int i = 0; i < slots; i++) seen[i] = seen_by(query(i));
    const auto masked = [&](float (&x)[Atom::run], int slot, int column) {
      TW_UNROLL
      for (int e = 0; e < Atom::run; e++)
        if (!seen[slot].sees(c0 + column + e)) x[e] = minus_infinity();
    };
    if (branches && folds && odd) {  // a largest score need not have the largest product
      fmha_each_run(s, [&](float (&x)[Atom::run], int slot, int strip, int index) {
        TW_UNROLL
        for (int e = 0; e < Atom::run; e++) x[e] *= f[slot];
        s.set(x, strip, index);
      });
      TW_UNROLL
      for (int i = 0; i < slots; i++) f[i] = 1.0f;
    }
    if constexpr (branches && folds) {
      if (edge)
        fmha_each_run(s, [&](float (&x)[Atom::run], int slot, int strip, int index) {
          masked(x, slot, Atom::run_column(lane, index));
          s.set(x, strip, index);
        });
    }
    float most[slots];
    TW_UNROLL
    for (int i = 0; i < slots; i++) most[i] = minus_infinity();
    fmha_each_run(s, [&](float (&x)[Atom::run], int slot, int strip, int index) {
      const int column = Atom::run_column(lane, index), i = query(slot);
      constexpr bool kLater = branches && folds;
      TW_UNROLL
      for (int e = 0; e < Atom::run; e++) {
        const int j = c0 + column + e;
        if constexpr (!kLater) x[e] *= f[slot];
        if constexpr (varying) x[e] *= float_of(load_shared<1>(scales + (column + e) * 4).w[0]);
        if constexpr (modifies) x[e] = modify(x[e], slot, i, j);
        if (!kLater && edge && !seen[slot].sees(j)) x[e] = minus_infinity();
        if constexpr (Config::paged)
          if ((int)load_shared<1>(pages + (column + e) * 4).w[0] < 0) x[e] = minus_infinity();
        most[slot] = fmha_larger(most[slot], x[e]);
      }
      if constexpr (!kLater || Config::paged) s.set(x, strip, index);
    });
    if constexpr (!(branches && folds)) {
      TW_UNROLL
      for (int i = 0; i < slots; i++) f[i] = 1.0f;
    }
    float safe[slots];
    TW_UNROLL
    for (int i = 0; i < slots; i++) {
      most[i] = fmha_larger(m[i], fmha_row_max<Atom>(most[i]) * f[i]);
      safe[i] = most[i] == minus_infinity() ? 0.0f : most[i];
      rescale[i] = exp2(m[i] - safe[i]);
      m[i] = most[i];
      l[i] *= rescale[i];
    }
    fmha_each_run(s, [&](float (&x)[Atom::run], int slot, int strip, int index) {
      TW_UNROLL
      for (int e = 0; e < Atom::run; e++) {
        x[e] = exp2(branches && folds ? fma(x[e], f[slot], -safe[slot]) : x[e] - safe[slot]);
        l[slot] += x[e];
        if constexpr (varying)
          x[e] *= float_of(load_shared<1>(scales + (n0 + Atom::run_column(lane, index) + e) * 4).w[0]);
      }
      s.set(x, strip, index);
    });
    if constexpr (Config::dropout) drop(s, c0);
  }

  // Multiplies results of earlier blocks: on most blocks no maximum has grown, and there is nothing to do.
  template <class Results>
  TW_DEVICE static void apply(Results& o, const float (&rescale)[slots]) {
    bool grown = !branches;
    TW_UNROLL
    for (int i = 0; i < slots; i++) grown |= rescale[i] != 1.0f;
    if (branches && count_lanes(grown) == 0) return;
    fmha_each_run(o, [&](float (&x)[Results::run], int slot, int strip, int index) {
      TW_UNROLL
      for (int e = 0; e < Results::run; e++) x[e] *= rescale[slot];
      o.set(x, strip, index);
    });
  }

  // One call of the generator for each row, pair of columns modulo 8 and 64 columns.
  TW_DEVICE void drop(Atom& s, int c0) const {
    constexpr int kPhases = Atom::repeats ? 1 : 2, kPairs = Atom::run > 2 ? Atom::run / 2 : 1;
    constexpr int kBlocks = n0 > 64 ? n0 / 64 : 1, kRuns = Atom::runs_per_row / kBlocks;
    static_assert(n0 % 64 == 0 || 64 % n0 == 0, "blocks of columns divide 64, or the reverse");
    constexpr int kSub = Atom::strip_runs / Atom::runs_per_row;
    TW_UNROLL
    for (int slot = 0; slot < slots; slot++)
      TW_UNROLL
      for (int block = 0; block < kBlocks; block++)
        TW_UNROLL
        for (int phase = 0; phase < kPhases; phase++)
          TW_UNROLL
          for (int pair = 0; pair < kPairs; pair++) {
            const int first = slot % kSub * Atom::runs_per_row + block * kRuns;
            const int j0 = c0 + Atom::run_column(lane, first + phase) + pair * 2;
            const PhiloxWords words = fmha_random(seed, (int64_t)b * args.heads_q + head_of(slot), query(slot),
                                                  (j0 >> 6) * 4 + ((j0 & 7) >> 1));
            TW_UNROLL
            for (int r = phase; r < kRuns; r += kPhases) {
              float x[Atom::run];
              s.get(x, slot / kSub, first + r);
              const int j = c0 + Atom::run_column(lane, first + r) + pair * 2;
              TW_UNROLL
              for (int e = 0; e < min_of(Atom::run, 2); e++)
                if (fmha_byte(words, j + e) < (uint32_t)args.drop_below) x[pair * 2 + e] = 0.0f;
              s.set(x, slot / kSub, first + r);
            }
          }
  }
  TW_DEVICE static uint32_t fmha_byte(const PhiloxWords& words, int j) {
    const int place = (j >> 3) & 7;
    const uint32_t low = place & 2 ? words.w[1] : words.w[0], high = place & 2 ? words.w[3] : words.w[2];
    return (place & 4 ? high : low) >> ((place & 1) * 16 + (j & 1) * 8) & 255u;
  }

  // The factor of results besides 1 / l.
  TW_DEVICE static float result_factor(const tw_fmha_args& args, int b, int key_head) {
    float all = 1.0f;
    if constexpr (Config::dropout) all *= (float)args.keep_scale;
    if constexpr (Config::qscale != FmhaScale::no && !varying) all *= fmha_scale_at(args.v_scale, b, key_head, 0);
    return all;
  }

  // After the last block: the whole sums, with the sinks; o is multiplied by factor[slot].
  TW_DEVICE void finish(float (&scale)[slots], float (&lse)[slots]) {
    const float all = result_factor(args, b, key_head());
    TW_UNROLL
    for (int s = 0; s < slots; s++) {
      l[s] = fmha_row_sum<Atom>(l[s]);
      if constexpr (Config::learned_sinks && Config::family != FmhaFamily::split)
        if (query(s) < (int)item.q_rows) {
          const float sink = load_constant<float>(args.sinks + head_of(s)) * kLog2E;
          if (sink != minus_infinity()) l[s] += exp2(sink - m[s]);
        }
      scale[s] = l[s] == 0.0f ? 0.0f : all / l[s];
      lse[s] = l[s] == 0.0f ? minus_infinity() : (m[s] + log2(l[s])) * kLn2;
    }
  }
};

}  // namespace tw::gpu
