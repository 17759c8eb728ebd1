// A libcuda.so.1 for tests on machines without a GPU: devices (TW_SIM_DEVICES of them) whose memory is the host's.
//
// Streams are queues that run as far as they can whenever anybody asks, events and memory pass between processes, and
// kernels are C functions chosen by the name of the entry in the (real) binary. What the driver checks of its arguments
// and of its caller's state (current context, capture, size of mappings) is checked here too.

#include "machine.h"
#include "kernels.h"
#include "streams.h"
#include "memory.h"
#include "code.h"
