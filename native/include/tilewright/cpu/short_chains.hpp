// Sums of fp32 that are made of short chains, each begun at zero and added to those before it: one chain over thousands
// of terms would lose what its operands have of precision. The error of a sum of n terms in chains of c grows with
// sqrt(c + n / c) instead of sqrt(n). Where operands have fewer bits than sums, nothing of that shows in a result, and
// chains stay whole.
#pragma once
#include "tilewright/core/conv_args.h"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kUsualChain = 96;  // terms, about: putting so long a chain aside costs a thirtieth of it
constexpr int64_t kOddChain = 16, kShortOddChain = 12, kFewTerms = 256;

// Whether a problem's channels are no such as networks have: multiples of eight, groups of 1, 2 or 4 channels of which
// there are multiples of eight, or up to four channels on one side only. What others sum in few short chains then is
// lost here unless ours are as short; and with such channels registers are part empty anyway, so that a little more or
// less to store and load counts for little.
TW_INLINE bool odd_channels(int64_t gathered, int64_t others, int64_t groups) {
  const bool eights = gathered % 8 == 0 && others % 8 == 0;
  const auto fits = [](int64_t channels) { return channels % 8 == 0 || 8 % channels == 0; };
  if (gathered <= 0 || others <= 0 || eights) return false;
  if (groups % 8 == 0) return !(fits(gathered) && fits(others));
  return !(groups == 1 && min_of(gathered, others) <= 4 && max_of(gathered, others) % 8 == 0);
}

// Terms of a chain of a sum of `terms` where channels are odd: even parts, none longer than bounds what rounding adds.
TW_INLINE int64_t odd_chain(int64_t terms) {
  const int64_t most = terms > kFewTerms ? kOddChain : kShortOddChain;
  return max_of(ceil_div(terms, max_of(ceil_div(terms, most), 1)), 1);
}

TW_NAMESPACE_END
