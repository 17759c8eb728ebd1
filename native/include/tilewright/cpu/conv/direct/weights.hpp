// The weights of a convolution without a product, as its loops read them (cpu/conv/direct/conv.hpp): block by block, in
// each a word or a pair of values for every lane.
#pragma once
#include "tilewright/cpu/conv/direct/view.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct DirectWeights {
  using W = typename Config::B;
  using Kept = KeptFor<typename Config::A, W>;
  using Dot = typename Kept::Dot;
  using View = DirectView<Config>;
  static constexpr int L = kLanes, depth = Kept::depth, bytes = Kept::bytes;

  using Panels = Rows<W, Config::b_col>;
  template <int kVectors>
  static TW_NOINLINE void pack_panel(Panels from, int64_t count, int64_t values, uint32_t* to) {
    pack_panels<W, Dot, kVectors * L, Config::b_col, false>(from, count, values, to, 0, nullptr);
  }

  // The weights of one block as panels of cpu/blocks/pack.hpp, if its lanes and values lie at one distance each.
  static TW_INLINE void pack_block(const View& v, int64_t block, bool flat) {
    const auto pack = v.vectors == 1 ? &pack_panel<1> : v.vectors == 2 ? &pack_panel<2> : &pack_panel<4>;
    const tw_conv_problem& p = v.p;
    const int64_t ld = Config::b_col ? p.weight_n : p.weight_c, count = v.count_of(block);
    const int64_t first = v.group_of(block) * p.weight_g + v.channel_of(block) * p.weight_n;
    for (int64_t line = 0; line < v.lines(); line++)
      for (int64_t t = 0; t < (flat ? 1 : v.w->taps); t++) {
        const int64_t tap = v.w->tap_step < 0 ? v.w->taps - 1 - t : t;
        const int64_t offset = first + tap_offset(v, line, tap);
        uint32_t* const to = v.weights + block * v.block_words() + (line * v.line_words() + t * v.words) * v.lanes;
        pack(Panels{(const char*)p.gemm.b + offset * size_of<W>, ld}, count,
             flat ? v.w->taps * p.channels : p.channels, to);
      }
  }
  static TW_NOINLINE int64_t tap_offset(const View& v, int64_t line, int64_t tap) {
    return line / v.h->taps * v.d->tap_stride + line % v.h->taps * v.h->tap_stride + tap * v.w->tap_stride;
  }

  static TW_INLINE bool pack_fast(const View& v, int64_t block) {
    const tw_conv_problem& p = v.p;
    const bool whole = p.channels % depth == 0;  // values of a tap fill their groups
    const bool flat = v.runs == 1 && Config::b_col && v.w->tap_step > 0 && v.w->tap_stride == p.channels;
    if ((Config::b_col ? p.weight_c : p.weight_n) != 1 || (v.runs == 1 && !whole && !flat) ||
        (v.together > 1 && p.weight_g != v.n * p.weight_n))
      return false;
    pack_block(v, block, flat);
    return true;
  }

  // Weights as groups, those of one block together.
  static TW_NOINLINE void pack(const View& v, Crew& crew) {
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
            const int64_t offset = tap_offset(v, line, tap);
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
};

TW_NAMESPACE_END
