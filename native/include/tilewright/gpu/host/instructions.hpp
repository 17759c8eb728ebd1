// The matrix instructions of NVIDIA GPUs in the emulation, written from the definition of the instructions (not from
// what the kernels make of them): see gpu/cuda/instructions.hpp and gpu/cuda/atom_mma.hpp for the operands' layouts.
#pragma once
#include "tilewright/gpu/blocks/convert.hpp"

namespace tw::gpu {

template <int kCount, bool kTransposed>
Words<kCount> load_matrices(uint32_t address) {
  const int lane = lane_index();
  host::slot(lane).words[0] = address;
  host::meet_wave();
  Words<kCount> x;
  for (int i = 0; i < kCount; i++) {
    const auto at = [i](int row, int column) {
      const uint32_t from = host::slot(8 * i + row).words[0];
      if (from % 16 != 0) host::fail("a row of a matrix load is not 16-byte aligned");
      uint16_t value;
      memcpy(&value, host::shared_at(from + (uint32_t)column * 2, 2), 2);
      return (uint32_t)value;
    };
    const int g = lane / 4, q = lane % 4;
    x.w[i] = kTransposed ? at(2 * q, g) | at(2 * q + 1, g) << 16 : at(g, 2 * q) | at(g, 2 * q + 1) << 16;
  }
  host::meet_wave();
  return x;
}

namespace host {

// Element `byte` / size of E of a register.
template <class E, class Sum>
Sum element(uint32_t word, int index) {
  const uint32_t bits = word >> (index * 8 * size_of<E>);
  if constexpr (is_same<E, int8>) return (int8_t)bits;
  else return to_float<E>((typename E::storage)bits);
}

template <class A, class B, class Sum>
void multiply(Sum (&c)[4], const Words<4>& a, const Words<2>& b) {
  const int lane = lane_index();
  for (int i = 0; i < 4; i++) slot(lane).words[i] = a.w[i];
  for (int i = 0; i < 2; i++) slot(lane).words[4 + i] = b.w[i];
  meet_wave();
  constexpr int kPerWord = 4 / size_of<A>;
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    Sum sum = 0;
    for (int k = 0; k < 8 * kPerWord; k++) {
      const int half = k / (4 * kPerWord), q = k / kPerWord % 4;
      sum += element<A, Sum>(slot(row % 8 * 4 + q).words[half * 2 + row / 8], k % kPerWord) *
             element<B, Sum>(slot(column * 4 + q).words[4 + half], k % kPerWord);
    }
    c[i] += sum;
  }
  meet_wave();
}

}  // namespace host

template <class E>
void mma_16x8_half(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  host::multiply<E, E>(c, {a0, a1, 0, 0}, {b, 0});
}
template <class A, class B>
void mma_16x8(float (&c)[4], const Words<4>& a, const Words<2>& b) {
  host::multiply<A, B>(c, a, b);
}
template <class A, class B>
void mma_16x8(int32_t (&c)[4], const Words<4>& a, const Words<2>& b) {
  host::multiply<A, B>(c, a, b);
}

}  // namespace tw::gpu
