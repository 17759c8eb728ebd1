#include "common/error.hpp"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

namespace {
__thread tw_error last_error;
constexpr const char* kNames[] = {
    "ok", "invalid argument", "damaged", "version", "object missing", "object digest", "object load", "wrong device",
    "no driver", "no context", "driver", "no memory", "null operand", "misaligned", "overlap", "workspace",
    "unsupported", "team", "not found"};
}  // namespace

namespace tw {

tw_status fail(tw_status status, const char* rule, const char* fix, const char* message, ...) {
  tw_error& error = last_error;
  error.status = status, error.operand = -1, error.value = 0;
  snprintf(error.rule, sizeof error.rule, "%s", rule);
  snprintf(error.fix, sizeof error.fix, "%s", fix);
  va_list arguments;
  va_start(arguments, message);
  vsnprintf(error.message, sizeof error.message, message, arguments);
  va_end(arguments);
  return status;
}

tw_status concerning(tw_status status, int32_t operand, int64_t value) {
  last_error.status = status, last_error.operand = operand, last_error.value = value;
  return status;
}

}  // namespace tw

const tw_error* tw_last_error(void) { return &last_error; }

const char* tw_status_name(tw_status status) {
  return status >= 0 && status < (tw_status)(sizeof kNames / sizeof *kNames) ? kNames[status] : "unknown";
}
