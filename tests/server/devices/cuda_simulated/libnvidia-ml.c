/* The part of NVIDIA's management library that the server asks, with figures of a machine of two GPUs.
   The second one is like a MIG device: it tells neither its use nor its energy. */
#include <string.h>
#include <unistd.h>

enum { DONE = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
static int first, second;

int nvmlInit_v2(void)
{
#ifdef HANG  /* as with a GPU that is lost */
    sleep(3600);
#endif
    return DONE;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { (void) bus; (void) device; return NOT_FOUND; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device)
{
    int is_first = strncmp(uuid, "GPU-a0a1", 8) == 0, is_second = strncmp(uuid, "GPU-b0b1", 8) == 0;
    *device = is_first ? &first : &second;
    return is_first || is_second ? DONE : NOT_FOUND;
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *found)
{
    if (device == &second) return NOT_SUPPORTED;
    *found = (Utilization){62, 17};
    return DONE;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *mw) { *mw = device == &first ? 412500 : 98000; return DONE; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *mw) { (void) device; *mw = 700000; return DONE; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *mj)
{
    if (device == &second) return NOT_SUPPORTED;
    *mj = 123456789;
    return DONE;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *found)
{
    (void) device;
    *found = (Memory){150000000000, 100000000000, 50000000000};
    return DONE;
}
