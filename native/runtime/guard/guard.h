/* Guard of mapped files of other processes: where a page is missing, none is made.
 *
 * The system makes a missing page of a shared file when it is touched, and charges it to whoever touches it. The owner
 * of a file can take pages away at any time, also between a look and a touch. Under the guard a touch of a missing page
 * makes none: the touching thread sees, in its own process only, memory that is nobody's (zeros first), and goes on; the
 * mapping is spoilt, which whoever used it finds out afterwards. The same holds beyond the end of a file that became
 * shorter. What is there is reached at no cost. System calls that would touch a missing page fail with EFAULT.
 *
 * userfaultfd(2) tells the system to send SIGBUS instead of making pages; this library handles that signal for the
 * ranges that it was given, and passes on all others.
 *
 * For the server alone: no part of the stable interface. */
#ifndef TILEWRIGHT_GUARD_H
#define TILEWRIGHT_GUARD_H

#include "tilewright.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tw_guard_counts {
  uint64_t spoilt; /* mappings under the guard, now, in which a page was missing */
  uint64_t holes;  /* times that a part of a mapping was replaced, since the start */
  uint64_t given_up; /* times that memory of this process had to stand in for a whole mapping, since the start */
} tw_guard_counts;

/* Guard a mapping of shared memory, from a page's beginning, until tw_guard_remove. TW_UNSUPPORTED where the system
 * does not allow it, TW_NO_MEMORY if there are too many. */
TW_API tw_status tw_guard_add(void* address, uint64_t bytes, int32_t* slot);
/* Parts of it that were replaced. */
TW_API uint32_t tw_guard_holes(int32_t slot);
/* To be called before the mapping ends, when nobody touches it any more. */
TW_API void tw_guard_remove(int32_t slot);
/* Counts that change by themselves. */
TW_API const tw_guard_counts* tw_guard_watch(void);

#ifdef __cplusplus
}
#endif
#endif
