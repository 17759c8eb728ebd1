// Errors of the calling thread.
#pragma once
#include "tilewright.h"

namespace tw {

// Fills in the thread's last error and returns its status. `message` is a format of printf.
__attribute__((format(printf, 4, 5))) tw_status fail(
    tw_status status, const char* rule, const char* fix, const char* message, ...);
// Adds to the last error which operand it concerns, and what was found.
tw_status concerning(tw_status status, int32_t operand, int64_t value);

}  // namespace tw
