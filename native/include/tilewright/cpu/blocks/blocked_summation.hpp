// Sums of fp32 that are made of short chains, each begun at zero and added to those before it: one chain over thousands
// of terms would lose what its operands have of precision. The error of a sum of n terms in chains of c grows with
// sqrt(c + n / c) instead of sqrt(n). Where operands have fewer bits than sums, nothing of that shows in a result, and
// chains stay whole.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

// Terms of a chain, at most, where convolutions are such as networks have: of products; of loops without one, and with
// groups.
constexpr int64_t kUsualChain = 128, kUsualDirectChain = 96, kUsualGroupChain = 72;
constexpr int64_t kFewValues = 20480;  // of an image or a result so small that time does not matter

// Even parts of a sum, none longer than `most`.
TW_INLINE int64_t even_part(int64_t terms, int64_t most) {
  return max_of(ceil_div(terms, max_of(ceil_div(terms, most), 1)), 1);
}

// Terms of a chain whose sum is hardly less exact than in chains of sqrt(terms), the most exact ones: nearly twice as
// long, for to end a chain takes time. At most `most`.
TW_INLINE int64_t short_chain(int64_t terms, int64_t most) {
  int64_t length = 1;
  while (length < most && length * length < 3 * terms) length++;
  return even_part(terms, length);
}

// Lines whose sums are put aside together, in a sum over `lines` of `pieces` chains each: so many that about as
// many chains are added then as such sums in the end.
TW_INLINE int64_t lines_aside(int64_t lines, int64_t pieces, int64_t most) {
  int64_t count = 1;
  while (count < most && count * count * pieces < lines) count++;
  return count;
}

// True if channels are such as networks have: multiples of eight, or up to four on one side only; of groups multiples
// of eight, with such numbers of channels, or 1, 2 or 4 of them.
TW_INLINE bool usual_channels(int64_t gathered, int64_t others, int64_t groups) {
  const auto fits = [](int64_t channels) { return channels % 8 == 0 || 8 % channels == 0; };
  if (gathered <= 0 || others <= 0) return true;
  if (groups > 1) return groups % 8 == 0 && fits(gathered) && fits(others);
  return max_of(gathered, others) % 8 == 0 && (min_of(gathered, others) % 8 == 0 || min_of(gathered, others) <= 4);
}

// The longest chain that serves a convolution, of which `most` is what serves convolutions such as networks have: every
// hundredth of their time counts, and others sum them in long chains too. Half of that where H and W differ by a tap
// (in phases of strided gradients). 0: the convolution is no such one. `others`: channels of the result.
TW_NOINLINE int64_t usual_chain(const tw_conv_problem& p, int64_t others, int64_t most) {
  const tw_conv_axis &h = p.axes[1], &w = p.axes[2];
  int64_t values = p.images * p.groups * p.channels, results = p.images * p.groups * others, taps = 1;
  for (const tw_conv_axis& axis : p.axes) {
    if (axis.taps > 1 && axis.tap_step * axis.tap_step != 1) return 0;
    values *= axis.size, results *= axis.rows, taps *= axis.taps;
  }
  if (min_of(values, results) < kFewValues || (p.groups > 1 && taps == 1)) return 0;
  if (!usual_channels(p.channels, others, p.groups)) return 0;
  return h.taps == w.taps ? most : (h.taps - w.taps) * (h.taps - w.taps) == 1 ? most / 2 : 0;
}

// Terms of a chain of a sum of `terms`, at most `most`.
TW_INLINE int64_t chain_of(const tw_conv_problem& p, int64_t others, int64_t terms, int64_t most) {
  const int64_t usual = usual_chain(p, others, most);
  return usual > 0 ? even_part(terms, usual) : short_chain(terms, most);
}

TW_NAMESPACE_END
