// What is to go wrong, from the environment.
//
//   TW_SIM_DRIVER=N         the version that the driver gives (71500000)
//   TW_SIM_FAULT_MEMORY=N   the N-th allocation of the process (from 1), and all after it, find no memory
//   TW_SIM_FAULT_IMAGE=1    no code object can be loaded
//   TW_SIM_FAULT_LAUNCH=N   the N-th launch of the process faults, when its turn comes
//   TW_SIM_FAULT_GRAPH=N    the N-th graph of the process (from 1), and all after it, cannot be made to be launched
//   TW_SIM_FAULT_LOST=N     the device is gone when the turn of the N-th launch comes
//   TW_SIM_FAULT_ABORT=1    a launch that faults ends the process, as the runtime does for most faults
#pragma once
enum {
  INVALID_CONFIGURATION = 9,
  INVALID_DEVICE_POINTER = 17,
  INVALID_DEVICE = 101,
  NO_BINARY = 209,
  PEERS_ALREADY = 704,
  LAUNCH_FAILURE = 719,
  CAPTURE_IMPLICIT = 906,
  UNKNOWN = 999
};
static long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}
static int version(void) { return (int)number("TW_SIM_DRIVER", 71500000); }
static int starved(void) {
  static long allocations;
  const long first = number("TW_SIM_FAULT_MEMORY", 0);
  return first && ++allocations >= first;
}
static int graph_fault(void) {
  static long made;
  const long first = number("TW_SIM_FAULT_GRAPH", 0);
  return first && ++made >= first;
}
// The result that the next launch is to end with whatever it does, or OK.
static R launch_fault(void) {
  static long launches;
  ++launches;
  return launches == number("TW_SIM_FAULT_LAUNCH", 0) ? LAUNCH_FAILURE
         : launches == number("TW_SIM_FAULT_LOST", 0) ? UNKNOWN
                                                      : OK;
}
static R faulted(R r, const char* text) {
  fprintf(stderr, "sim: %s\n", text);
  if (number("TW_SIM_FAULT_ABORT", 0)) abort();
  return r;
}
