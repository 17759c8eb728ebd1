// Devices, their properties, and results by name.
#pragma once
typedef struct {
  const char *arch, *features, *name;
  unsigned machine;  // EF_AMDGPU_MACH: the low byte of a code object's e_flags
  int units, compute_units, wave, clock_khz, memory_khz, bus_bits, l2_bytes, xccs;
  unsigned lds;
} Chip;
// Figures of data sheets. On gfx11 and gfx12 the runtime counts pairs of compute units.
static const Chip chips[] = {
    {"gfx90a", ":sramecc+:xnack-", "Simulated MI250X", 0x3f, 110, 110, 64, 1700000, 1600000, 4096, 8 << 20, 1, 65536},
    {"gfx942", ":sramecc+:xnack-", "Simulated MI300X", 0x4c, 304, 304, 64, 2100000, 1300000, 8192, 4 << 20, 8, 65536},
    {"gfx950", ":sramecc+:xnack-", "Simulated MI355X", 0x4f, 256, 256, 64, 2400000, 2000000, 8192, 4 << 20, 8, 163840},
    {"gfx1100", "", "Simulated RX 7900 XTX", 0x41, 48, 96, 32, 2500000, 1249000, 384, 6 << 20, 1, 65536},
    {"gfx1201", "", "Simulated RX 9070 XT", 0x4e, 32, 64, 32, 2970000, 1258000, 256, 8 << 20, 1, 65536}};
static const Chip other = {"gfx906", ":sramecc+:xnack-", "Simulated MI50", 0x2f, 60, 60, 64, 1725000, 1000000, 4096,
                           4 << 20,  1, 65536};
// The devices that the process sees: numbers of the machine's, in its own order.
static const char* seen_list(void) {
  const char* seen = getenv("HIP_VISIBLE_DEVICES");
  return seen && *seen ? seen : getenv("CUDA_VISIBLE_DEVICES");
}
static int in_machine(int device) {
  const char* at = seen_list();
  if (!at || !*at) return device;
  for (; at && device > 0; device--) at = (at = strchr(at, ',')) ? at + 1 : 0;
  return at ? atoi(at) : -1;
}
static int device_count(void) {
  const char *seen = getenv("HIP_VISIBLE_DEVICES"), *roc = getenv("ROCR_VISIBLE_DEVICES");
  if ((seen && (!*seen || *seen == '-')) || (roc && !*roc)) return 0;
  const int all = (int)number("TW_SIM_DEVICES", 1);
  const char* at = seen_list();
  if (!at || !*at) return all;
  int n = 0;  // a list ends where it names what is not there
  while (n < all && in_machine(n) >= 0 && in_machine(n) < all) n++;
  return n;
}
static int in_process(int number) {
  for (int d = 0; d < device_count(); d++)
    if (in_machine(d) == number) return d;
  return -1;
}
// One entry of TW_SIM_ARCH ("gfx942" or "gfx942,gfx1100"), the last one for all further devices.
static const Chip* chip(int device) {
  const char* at = getenv("TW_SIM_ARCH");
  if (!at || !*at) at = "gfx942";
  device = in_machine(device);
  for (const char* comma; device > 0 && (comma = strchr(at, ',')); device--) at = comma + 1;
  const size_t length = strcspn(at, ",");
  for (unsigned i = 0; i < sizeof chips / sizeof *chips; i++)
    if (strlen(chips[i].arch) == length && !strncmp(chips[i].arch, at, length)) return &chips[i];
  return &other;
}
static int is_device(int d) { return d >= 0 && d < device_count(); }
static void uuid_of(int d, unsigned char* u) {
  char text[17];  // the runtime's own are 16 hexadecimal digits
  snprintf(text, sizeof text, "%08x%08x", 0xa1b2c3d4u, 0x01020300u + in_machine(d));
  memcpy(u, text, 16);
}

R hipInit(unsigned f) { return f ? INVALID_VALUE : device_count() ? OK : NO_DEVICE; }
R hipDriverGetVersion(int* v) { return *v = version(), OK; }
R hipRuntimeGetVersion(int* v) { return *v = version(), OK; }
R hipGetDeviceCount(int* n) { return *n = device_count(), *n ? OK : NO_DEVICE; }
R hipDeviceGet(int* d, int n) { return is_device(n) ? (*d = n, OK) : INVALID_DEVICE; }
R hipDeviceGetName(char* s, int n, int d) {
  if (!is_device(d)) return INVALID_DEVICE;
  return snprintf(s, n, "%s", chip(d)->name), OK;
}
R hipDeviceGetUuid(unsigned char* u, int d) { return is_device(d) ? (uuid_of(d, u), OK) : INVALID_DEVICE; }
R hipDeviceTotalMem(size_t* n, int d) { return is_device(d) ? (*n = MEMORY, OK) : INVALID_DEVICE; }
R hipDeviceComputeCapability(int* major, int* minor, int d) {
  const int digits = is_device(d) ? (int)strtol(chip(d)->arch + 3, 0, 16) : 0;
  return *major = (digits >> 12) * 10 + (digits >> 8 & 15), *minor = digits >> 4 & 15, digits ? OK : INVALID_DEVICE;
}
R hipDeviceGetPCIBusId(char* s, int n, int d) {
  if (!is_device(d)) return INVALID_DEVICE;
  return snprintf(s, n, "0000:%02x:00.0", 0x63 + in_machine(d)), OK;
}
R hipDeviceGetByPCIBusId(int* d, const char* s) {
  unsigned bus = 0;
  if (sscanf(s, "0000:%x:00.0", &bus) != 1 || !is_device(in_process((int)bus - 0x63))) return INVALID_VALUE;
  return *d = in_process((int)bus - 0x63), OK;
}
R hipDeviceGetAttribute(int* v, int a, int d) {
  if (!is_device(d)) return INVALID_DEVICE;
  const Chip* c = chip(d);
  const struct {
    int attribute, value;
  } known[] = {{5, c->clock_khz},    {6, 0},           {16, 0},        {19, c->l2_bytes}, {23, 9},
               {26, 1024},           {27, 1024},       {28, 1024},     {29, 2147483647},  {30, 65536},
               {31, 65536},          {56, 1024},       {57, 2048},     {59, c->bus_bits}, {60, c->memory_khz},
               {61, 4},              {63, c->units},   {67, 0x63 + in_machine(d)}, {68, 0},           {69, 0},
               {71, 65536},          {74, (int)c->lds}, {75, 0},       {76, (int)c->lds}, {87, c->wave},
               {88, 1},              {89, 1},          {90, 1},        {91, 1},           {10002, (int)c->lds},
               {10015, c->compute_units}, {10017, 100000}, {10018, c->xccs}};
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == a) return *v = known[i].value, OK;
  return *v = 0, a < 0 || (a > 100 && a < 10000) || a > 10100 ? INVALID_VALUE : OK;
}

// hipDeviceProp_tR0600, field by field; what lies between those that are set has its size only.
typedef struct {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_mask;
  size_t memory, lds;
  int registers, wave;
  size_t pitch;
  int threads, block[3], grid[3], clock_khz;
  size_t constants;
  int major, minor;
  size_t texture[2];
  int overlap, units, timeout, integrated, maps_host, compute_mode;
  int textures[40];
  size_t surface_alignment;
  int concurrent, ecc, pci_bus, pci_device, pci_domain, tcc, engines, unified, memory_khz, bus_bits, l2_bytes;
  int persisting, unit_threads, priorities, l1[2];
  size_t unit_lds;
  int unit_registers, managed, board[2], atomics, ratio, pageable, concurrent_managed, preemption, host_pointers;
  int cooperative[2];
  size_t lds_optin;
  int host_tables, direct, unit_blocks, window;
  size_t lds_reserved;
  int host_register, sparse, read_only, semaphores, pools, rdma;
  unsigned rdma_flush;
  int rdma_order;
  unsigned pool_handles;
  int deferred, ipc_events, clusters, function_pointers, reserved[63], hip_reserved[32];
  char arch[256];
  size_t unit_lds_max;
  int instruction_khz;
  unsigned features;
  void* flush[2];
  int unmatched[4], large_bar, revision;
} Properties;
R hipGetDevicePropertiesR0600(Properties* p, int d) {
  if (!is_device(d)) return INVALID_DEVICE;
  if (number("TW_SIM_FAULT_DEVICE", 0) == in_machine(d) + 1) return UNKNOWN;
  const Chip* c = chip(d);
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", c->name);
  snprintf(p->arch, sizeof p->arch, "%s%s", c->arch, c->features);
  uuid_of(d, p->uuid);
  p->memory = MEMORY, p->lds = p->unit_lds = p->unit_lds_max = c->lds, p->wave = c->wave, p->threads = 1024;
  p->registers = 65536, p->clock_khz = c->clock_khz, p->memory_khz = c->memory_khz, p->bus_bits = c->bus_bits;
  p->units = c->units, p->l2_bytes = c->l2_bytes, p->unit_threads = 2048, p->pools = p->ipc_events = 1;
  p->pool_handles = 1, p->host_register = 1, p->unified = p->concurrent = p->maps_host = 1, p->pci_bus = 0x63 + in_machine(d);
  hipDeviceComputeCapability(&p->major, &p->minor, d);
  for (int i = 0; i < 3; i++) p->block[i] = 1024, p->grid[i] = i ? 65536 : 2147483647;
  return OK;
}

static const struct {
  R number;
  const char *name, *text;
} results[] = {{OK, "hipSuccess", "no error"},
               {INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
               {OOM, "hipErrorOutOfMemory", "out of memory"},
               {INVALID_CONFIGURATION, "hipErrorInvalidConfiguration", "invalid configuration argument"},
               {INVALID_DEVICE_POINTER, "hipErrorInvalidDevicePointer", "invalid device pointer"},
               {NO_DEVICE, "hipErrorNoDevice", "no ROCm-capable device is detected"},
               {INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
               {INVALID_IMAGE, "hipErrorInvalidImage", "device kernel image is invalid"},
               {INVALID_CONTEXT, "hipErrorInvalidContext", "invalid device context"},
               {NO_BINARY, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
               {INVALID_HANDLE, "hipErrorInvalidHandle", "invalid resource handle"},
               {NOT_FOUND, "hipErrorNotFound", "named symbol not found"},
               {NOT_READY, "hipErrorNotReady", "device not ready"},
               {ILLEGAL_ADDRESS, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
               {LAUNCH_FAILURE, "hipErrorLaunchFailure", "unspecified launch failure"},
               {NOT_SUPPORTED, "hipErrorNotSupported", "operation not supported"},
               {CAPTURE_UNSUPPORTED, "hipErrorStreamCaptureUnsupported",
                "operation not permitted when stream is capturing"},
               {CAPTURE_IMPLICIT, "hipErrorStreamCaptureImplicit",
                "operation would make the legacy stream depend on a capturing blocking stream"}};
static int result_place(R r) {
  for (unsigned i = 0; i < sizeof results / sizeof *results; i++)
    if (results[i].number == r) return (int)i;
  return -1;
}
const char* hipGetErrorName(R r) { return result_place(r) < 0 ? "hipErrorUnknown" : results[result_place(r)].name; }
const char* hipGetErrorString(R r) { return result_place(r) < 0 ? "unknown error" : results[result_place(r)].text; }
R hipDrvGetErrorName(R r, const char** s) { return *s = hipGetErrorName(r), OK; }
R hipDrvGetErrorString(R r, const char** s) { return *s = hipGetErrorString(r), OK; }
R hipGetLastError(void) { return sticky; }
R hipPeekAtLastError(void) { return sticky; }

// A device's primary context is a number of its own.
#define CONTEXT 0x1000ull
R hipSetDevice(int d) { return is_device(d) ? (current = d + 1, sticky) : INVALID_DEVICE; }
R hipGetDevice(int* d) { return *d = current - 1, device_count() ? sticky : NO_DEVICE; }
R hipDevicePrimaryCtxRetain(void** c, int d) { return is_device(d) ? (*c = (void*)(CONTEXT + d), OK) : INVALID_DEVICE; }
R hipDevicePrimaryCtxRelease(int d) { return is_device(d) ? OK : INVALID_DEVICE; }
R hipDevicePrimaryCtxGetState(int d, unsigned* flags, int* active) {
  return *flags = 0, *active = 1, is_device(d) ? OK : INVALID_DEVICE;
}
R hipCtxSetCurrent(void* c) {
  return (Ptr)c >= CONTEXT && is_device((int)((Ptr)c - CONTEXT)) ? hipSetDevice((int)((Ptr)c - CONTEXT))
                                                                 : INVALID_CONTEXT;
}
R hipCtxGetCurrent(void** c) { return *c = (void*)(CONTEXT + current - 1), OK; }
R hipDeviceCanAccessPeer(int* v, int a, int b) {
  return *v = a != b, is_device(a) && is_device(b) ? OK : INVALID_DEVICE;
}
R hipDeviceEnablePeerAccess(int d, unsigned f) {
  return f || d == current - 1 ? INVALID_VALUE : is_device(d) ? OK : INVALID_DEVICE;
}
