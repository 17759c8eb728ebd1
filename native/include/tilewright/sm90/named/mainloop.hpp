// The consumer of the GEMM's ring (sm90/mainloop.hpp) with its sums in named registers.
#pragma once
#include "tilewright/sm90/mainloop.hpp"
#include "tilewright/sm90/named/sums.hpp"

namespace tw::sm90::named {

template <class Plan>
struct Consumer : sm90::Consumer<Plan> {
  using Base = sm90::Consumer<Plan>;
  using Base::Base, Base::barriers, Base::release, Base::ring, Base::x, Base::x_offset, Base::y, Base::y_offset;
  using Sums = SumsOf<Plan>;
  static constexpr int kRepeats = Plan::repeats;

  // Issues the products of the next stage into sets kInto, ...; `keep` is 0 if they are to be overwritten.
  template <int kInto>
  TW_SM90 void issue(int keep) {
    barriers.wait_full(ring);
    const Descriptor xs = {x.low + ring.stage * (Plan::x_bytes / 16), x.high};
    const Descriptor ys = {y.low + ring.stage * (Plan::y_bytes / 16), y.high};
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < Plan::k_steps; step++)
      for_each_index<0, kRepeats>([&](auto r) {
        multiply_into<typename Plan::Text, kInto + r.value>(Index<Plan::columns>{},
                                                            xs.plus(x_offset(step) + r.value * Base::kXRepeat),
                                                            ys.plus(y_offset(step)), step | keep);
      });
    wgmma_commit();
  }

  // The sums of the products of `steps` stages; one group is issued while the one before runs. `issued` is called when
  // all are issued, before they are complete.
  template <int kInto = 0, class Issued>
  TW_SM90 void multiply(int steps, const Issued& issued) {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      issue<kInto>(step);
      wgmma_wait<1>();
      if (step) release(previous);
      previous = ring.stage;
      ring.next();
    }
    issued();
    wgmma_wait<0>();
    if (steps) release(previous);
    else Sums::template clear<kInto * Sums::chunks, kRepeats * Sums::chunks>();
  }

  // The same with the sums of every `promote` products added to others in fp32: the tensor cores keep fewer bits.
  template <class Issued>
  TW_SM90 void multiply_promoting(int steps, const Issued& issued) {
    constexpr int kStages = Plan::promote / Plan::k_steps;
    Sums::template clear<0, kRepeats * Sums::chunks>();
#pragma unroll 1
    while (steps > kStages) {
      multiply<kRepeats>(kStages, [] {});
      add_parts();
      steps -= kStages;
    }
    multiply<kRepeats>(steps, issued);
    add_parts();
  }

 private:
  static TW_SM90 void add_parts() {
    constexpr int kCount = kRepeats * Sums::chunks;
    for_each_index<0, kCount>([](auto q) { Sums::template add<q.value, kCount + q.value>(); });
  }
};

}  // namespace tw::sm90::named
