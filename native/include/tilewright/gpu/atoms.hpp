// The atom that a device multiplies a type with. An atom states the wave's part of a tile in fragments: how they are
// read from shared memory, multiplied, and where the results belong (see MmaAtom); the kernels know no more than that.
#pragma once
#include "tilewright/gpu/atom_simt.hpp"
#if !defined(__HIP__)
#include "tilewright/gpu/atom_mma.hpp"
#endif

namespace tw::gpu {

template <class TileA, class TileB, int kM, int kN, bool kSimt = is_same<typename TileA::Element, fp32>>
struct AtomFor {
  using type = SimtAtom<TileA, TileB, kM, kN>;
};
#if !defined(__HIP__)
template <class TileA, class TileB, int kM, int kN>
struct AtomFor<TileA, TileB, kM, kN, false> {
  using type = MmaAtom<TileA, TileB, kM, kN>;
};
#endif

}  // namespace tw::gpu
