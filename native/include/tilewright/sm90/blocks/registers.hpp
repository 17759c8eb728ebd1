// How a workgroup's registers are shared out among its warpgroups (setmaxnreg).
#pragma once
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

// A kernel with one producer warpgroup and kConsumers others starts with equal shares of the 64 Ki registers; the
// producer gives up what it does not need. Nothing is gained with one consumer, which has 255 as it is (the most there
// is), nor if kNeeded registers (accumulators) leave plenty of the equal share: the exchange costs time at the start.
template <int kConsumers, int kNeeded = 255>
struct RegisterShares {
  static_assert(1 <= kConsumers && kConsumers <= 4, "at most 5 warpgroups");
  static constexpr int threads = kWarpgroup * (1 + kConsumers);
  static constexpr int at_start = kConsumers == 1 ? 255 : kConsumers == 2 ? 168 : kConsumers == 3 ? 128 : 96;
  static constexpr int producer = kConsumers == 2 ? 40 : 32;
  static constexpr int most = kConsumers == 1 ? 255 : kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  static constexpr bool moves = kConsumers > 1 && kNeeded > at_start - 72;
  static constexpr int consumer = moves ? most : at_start;
};

// All warps of the calling warpgroup, once, at the start of their role. The kernel must carry
// __launch_bounds__(threads, 1).
template <int kRegisters>
TW_SM90 void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
TW_SM90 void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tw::sm90
