// How a workgroup's registers are shared out among its warpgroups (setmaxnreg).
#pragma once
#include "tilewright/sm90/base.hpp"

namespace tw::sm90 {

// A kernel with one producer warpgroup and `consumers` others starts with equal shares of the 64 Ki registers; the
// producer gives up what it does not need. With one consumer nothing is gained: 255 each is the most there is.
template <int kConsumers>
struct RegisterShares {
  static_assert(1 <= kConsumers && kConsumers <= 4, "at most 5 warpgroups");
  static constexpr int threads = kWarpgroup * (1 + kConsumers);
  static constexpr bool moves = kConsumers > 1;
  static constexpr int at_start = kConsumers == 1 ? 255 : kConsumers == 2 ? 168 : kConsumers == 3 ? 128 : 96;
  static constexpr int producer = kConsumers == 2 ? 40 : 32;
  static constexpr int consumer = kConsumers == 1 ? 255 : kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
};

// All warps of the calling warpgroup, once, at the start of their role. The kernel must carry
// __launch_bounds__(threads, 1).
template <int kRegisters>
TW_SM90 void give_registers_up() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
TW_SM90 void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace tw::sm90
