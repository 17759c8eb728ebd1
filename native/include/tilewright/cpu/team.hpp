// Cooperation of the members of one launch: they wait for each other, and claim pieces of work. See team.h for the
// calling convention.
#pragma once
#include "tilewright/core/vector.hpp"
#include "tilewright/cpu/team.h"

extern "C" int sched_yield(void) noexcept;

TW_NAMESPACE_BEGIN

TW_INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// One member's view. A crew of one (Crew{}) works alone, with no shared state at all: the same drivers serve both.
struct Crew {
  int rank = 0;
  int size = 1;
  tw_team_state* state = nullptr;
  int64_t ticket = -1;  // drawn from the counter but not used yet
  int64_t first = 0;    // the ticket of the current stage's piece 0
  int64_t taken = 0;    // pieces of the current stage that this member has had
  bool fixed = false;   // pieces are dealt out in turn instead of claimed

  // Spins first, then gives the core away: another process may own the core of the member that we wait for.
  TW_NOINLINE void barrier() {
    if (size == 1) return;
    const int64_t generation = __atomic_load_n(&state->generation.value, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&state->arrived.value, 1, __ATOMIC_ACQ_REL) == size) {
      __atomic_store_n(&state->arrived.value, 0, __ATOMIC_RELAXED);
      __atomic_store_n(&state->generation.value, generation + 1, __ATOMIC_RELEASE);
      return;
    }
    for (int spins = 0; __atomic_load_n(&state->generation.value, __ATOMIC_ACQUIRE) == generation; spins++) {
      if (spins < 4096) pause();
      else sched_yield();
    }
  }

  // Claims the next piece of the current stage, or -1 when all are taken. Every member walks the same sequence of
  // stages and pieces of all stages are numbered through on one counter that is never reset: a ticket beyond this stage
  // is kept and used in a later one. So no stage needs a barrier on account of its counter.
  TW_INLINE int64_t claim(int64_t pieces) {
    if (size == 1 || fixed) {
      const int64_t piece = rank + size * taken;
      return piece < pieces ? (taken++, piece) : -1;
    }
    if (ticket < 0) ticket = __atomic_fetch_add(&state->counters[0].value, 1, __ATOMIC_RELAXED);
    if (ticket >= first + pieces) return -1;
    const int64_t piece = ticket - first;
    ticket = -1;
    return piece;
  }

  // Ends the stage of that many pieces, after claim() has returned -1. It waits for nobody.
  TW_INLINE void end_stage(int64_t pieces) {
    first += pieces;
    taken = 0;
  }
};

// The crew of a launch; members beyond `limit` (what the workspace was made for) get size 0 and must return at once.
TW_INLINE Crew crew_of(const tw_team* team, int limit) {
  Crew crew;
  crew.rank = team->rank;
  crew.size = team->size < limit ? team->size : limit;
  crew.state = team->state;
  return crew;
}

TW_NAMESPACE_END
