// Parts shared by the entry points of attention: how a line of a result is stored, and what was wrong with lengths and
// tables.
#pragma once
#include "tilewright/core/fmha_item.hpp"
#include "tilewright/core/types.hpp"
#include "tilewright/cpu/team.hpp"

#if !defined(TW_EXPORT)
#define TW_EXPORT extern "C" __attribute__((visibility("default")))
#endif

TW_NAMESPACE_BEGIN

// count values of `from` (null: zeros; readable up to a whole vector) times factor, col elements apart.
template <class E>
TW_INLINE void fmha_store_line(const float* from, float factor, int64_t count, char* to, int64_t col) {
  for (int64_t c = 0; c < count; c += kLanes) {
    const f32v x = from ? load_as<f32v>(from + c) * factor : f32v{};
    const int64_t now = min_of(count - c, kLanes);
    if (col == 1) {
      store_f32_partial<E>(to + c * size_of<E>, x, now);
    } else {
      char line[kVectorBytes];
      store_f32<E>(line, x);
      for (int64_t k = 0; k < now; k++)
        __builtin_memcpy(to + (c + k) * col * size_of<E>, line + k * size_of<E>, size_of<E>);
    }
  }
}

// Faults found in lengths and tables: the bits of all members, and one culprit, in counters of the launch.
struct FmhaStatus {
  static constexpr int kBits = TW_TEAM_COUNTERS - 1;
  int32_t bits = 0;
  int64_t item = 0, culprit = 0;

  TW_INLINE void add(int32_t bad, int64_t b, int64_t what) {
    if (!bits && bad) item = b, culprit = what;
    bits |= bad;
  }
  // Every member calls this once, at the end.
  TW_NOINLINE void publish(Crew& crew, int32_t* status) const {
    if (!status) return;
    if (crew.size == 1) {
      status[0] = bits, status[1] = (int32_t)item, status[2] = (int32_t)culprit, status[3] = 0;
      return;
    }
    // Item and culprit of whoever has the first item: one word to compare.
    int64_t* const all = &crew.state->counters[kBits].value;
    int64_t* const first = &crew.state->counters[kBits - 1].value;
    if (bits) {
      __atomic_fetch_or(all, (int64_t)bits, __ATOMIC_RELAXED);
      const int64_t mine = ((int64_t)1 << 62) - ((item << 32) | (culprit & 0xffffffff));
      int64_t seen = __atomic_load_n(first, __ATOMIC_RELAXED);
      while (mine > seen && !__atomic_compare_exchange_n(first, &seen, mine, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
    }
    crew.barrier();
    if (crew.rank > 0) return;
    const int64_t found = __atomic_load_n(all, __ATOMIC_RELAXED), where = __atomic_load_n(first, __ATOMIC_RELAXED);
    const int64_t what = found ? ((int64_t)1 << 62) - where : 0;
    status[0] = (int32_t)found, status[1] = (int32_t)(what >> 32), status[2] = (int32_t)what, status[3] = 0;
  }
};

TW_NAMESPACE_END
