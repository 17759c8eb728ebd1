// What is to go wrong, from the environment.
//
//   TW_SIM_DRIVER=N         the version that the driver gives (71500000)
//   TW_SIM_FAULT_MEMORY=N   the N-th allocation of the process (from 1), and all after it, find no memory
//   TW_SIM_FAULT_IMAGE=1    no code object can be loaded
//   TW_SIM_FAULT_LAUNCH=N   the N-th launch of the process faults, when its turn comes
//   TW_SIM_FAULT_GRAPH=N    the N-th graph of the process (from 1), and all after it, cannot be made to be launched
//   TW_SIM_FAULT_LOST=N     the device is gone when the turn of the N-th launch comes
//   TW_SIM_FAULT_DEVICE=N   the N-th device (from 1) says nothing of itself
//   TW_SIM_FAULT_ABORT=1    a launch that faults ends the process, as the runtime does for most faults
//
// Runtimes of certain versions misbehave by themselves, as AMD's do; TW_SIM_QUIRKS names others ("" for none):
//
//   record33      waiting for an opened event fails from its 33rd record on (ROCm 7.0 to 7.2)
//   wait_blocks   waiting for a pending event of another process blocks the caller (6.3, 6.4)
//   query_done    an event that processes share reports success whatever its stream does (6.3, 6.4)
//   open_creates  opening an event that is not there makes one that is always complete (all)
//   current       memory of another process lies on the current device, whatever its handle says (all)
//   pool_first    pools of other processes open on the first device only (all)
//   equal_pids    handles of memory name a process of the same number as this one's (none)
//   drains        destroying an event waits for the whole device (6.3 to 7.2)
//   values_signal waiting for a number takes signal memory only (5.x, and with GPU_STREAMOPS_CP_WAIT=1)
//   values_pass   waiting for a number does not wait (none)
//   values_block  waiting for a number blocks the caller (none)
//
// TW_SIM_SHM names the /dev/shm that the process sees: events of others are not found there.
#pragma once
enum {
  INVALID_CONFIGURATION = 9,
  INVALID_DEVICE_POINTER = 17,
  INVALID_DEVICE = 101,
  NO_BINARY = 209,
  PEERS_ALREADY = 704,
  ALREADY_LOCKED = 712,
  NOT_LOCKED = 713,
  LAUNCH_FAILURE = 719,
  CAPTURE_IMPLICIT = 906
};
static long number(const char* name, long otherwise) {
  const char* text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}
static int version(void) { return (int)number("TW_SIM_DRIVER", 71500000); }
static int quirk(const char* name) {
  const char* asked = getenv("TW_SIM_QUIRKS");
  if (!asked) {
    const int v = version();
    asked = v < 60300000 || v >= 70300000 ? ""
            : v < 70000000                ? "wait_blocks,query_done,open_creates,current,pool_first,drains"
                                          : "record33,open_creates,current,pool_first,drains";
  }
  const size_t n = strlen(name);
  for (const char* at = asked; (at = strstr(at, name)); at += n)
    if ((at == asked || at[-1] == ',') && (!at[n] || at[n] == ',')) return 1;
  return 0;
}
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
