// Compile-time selection of types, for every device.
#pragma once

namespace tw {

template <bool kCondition, class T, class F>
struct ChooseType {
  using type = T;
};
template <class T, class F>
struct ChooseType<false, T, F> {
  using type = F;
};
// T if kCondition holds, else F. Both are named, neither is completed.
template <bool kCondition, class T, class F>
using Choose = typename ChooseType<kCondition, T, F>::type;

}  // namespace tw
