// Code objects of this process, by the hash of their bytes. Kept until the process ends.
#pragma once
#include "tilewright.h"

namespace tw {

struct Object {
  Object* next;
  uint8_t sha256[32];
  size_t bytes;
  void* library;           // on a CPU: what dlopen gave, once it was loaded
  unsigned char* content;  // one zero byte follows
};

// NULL if it was not given.
Object* find_object(const uint8_t sha256[32]);
// The same for bytes whose hash was checked already.
tw_status keep_object(const uint8_t sha256[32], const void* data, size_t bytes);

}  // namespace tw
