// A libamdhip64.so for tests on machines without a GPU: devices (TW_SIM_DEVICES of them, of the architectures in
// TW_SIM_ARCH) whose memory is the host's, in POSIX shared memory.
//
// Streams are queues that run as far as they can whenever anybody asks, events and memory pass between processes, and
// kernels are the real code objects, run by an emulator in a process of its own (TW_SIM_EMULATOR). What the runtime
// checks of its arguments is checked here too. Faults are asked for by the environment: see faults.h.

#define FIRST_DEVICE 1  // a thread that chose no device uses the first
#include "../cuda_simulated/machine.h"
#include "faults.h"
#include "devices.h"
#include "emulator.h"
#include "streams.h"
#include "events.h"
#include "values.h"
#include "memory.h"
#include "pools.h"
#include "virtual.h"
#include "code.h"
#include "launches.h"
