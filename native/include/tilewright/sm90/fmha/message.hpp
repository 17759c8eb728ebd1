// Messages of a producer to consumers of attention through a slot of shared memory: the first quads of words of a
// struct, of which `count` is the first word.
#pragma once
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

template <class Message>
TW_SM90 void store_message(uint32_t to, const Message& message) {
  static_assert(sizeof(Message) >= Message::quads * 16, "what is told is part of it");
  const int* const words = &message.count;
#pragma unroll
  for (int i = 0; i < Message::quads; i++)
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 16), "r"(words[4 * i]), "r"(words[4 * i + 1]),
                 "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                 : "memory");
}
// The first kQuads times four words.
template <class Message, int kQuads = Message::quads>
TW_SM90 Message load_message(uint32_t from) {
  Message message;
  int* const words = &message.count;
#pragma unroll
  for (int i = 0; i < kQuads; i++)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[4 * i]), "=r"(words[4 * i + 1]), "=r"(words[4 * i + 2]), "=r"(words[4 * i + 3])
                 : "r"(from + i * 16)
                 : "memory");
  return message;
}

}  // namespace tw::sm90
