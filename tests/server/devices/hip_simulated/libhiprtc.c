// A libhiprtc.so for tests on machines without ROCm: programs are compiled by clang, with its own messages as the log.
//
// TW_SIM_CLANG is the command to run; without it, the newest of clang++-22 to clang++-19 and clang++ is. The names that
// hiprtc knows without any header (threadIdx, __syncthreads, ...) are known here too.
#define _GNU_SOURCE
#include <ftw.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SUCCESS, OUT_OF_MEMORY, CREATION, INVALID_INPUT, INVALID_PROGRAM, INVALID_OPTION, COMPILATION, NOT_BUILT = 9,
       NO_SUCH_NAME, INTERNAL };
typedef int R;
typedef struct {
  char *source, *log, *code;
  char **headers, **names;
  int header_count, tried;
  size_t log_bytes, code_bytes;
} Program;

static const char builtins[] =
    "#pragma once\n"
    "#define __global__ __attribute__((global))\n"
    "#define __device__ __attribute__((device))\n"
    "#define __host__ __attribute__((host))\n"
    "#define __shared__ __attribute__((shared))\n"
    "#define __constant__ __attribute__((constant))\n"
    "#define __forceinline__ inline __attribute__((always_inline))\n"
    "#define __launch_bounds__(n, ...) __attribute__((amdgpu_flat_work_group_size(1, n)))\n"
    "#define TW_PLACES_(T, F) struct T { \\\n"
    "  __declspec(property(get = x_)) unsigned x; __declspec(property(get = y_)) unsigned y; \\\n"
    "  __declspec(property(get = z_)) unsigned z; \\\n"
    "  __device__ static unsigned x_() { return F##_x(); } __device__ static unsigned y_() { return F##_y(); } \\\n"
    "  __device__ static unsigned z_() { return F##_z(); } };\n"
    "TW_PLACES_(TwItem_, __builtin_amdgcn_workitem_id)\n"
    "TW_PLACES_(TwGroup_, __builtin_amdgcn_workgroup_id)\n"
    "TW_PLACES_(TwSize_, __builtin_amdgcn_workgroup_size)\n"
    "extern const __device__ __attribute__((weak)) TwItem_ threadIdx;\n"
    "extern const __device__ __attribute__((weak)) TwGroup_ blockIdx;\n"
    "extern const __device__ __attribute__((weak)) TwSize_ blockDim;\n"
    "__device__ inline void __syncthreads() {\n"
    "  __builtin_amdgcn_fence(__ATOMIC_RELEASE, \"workgroup\");\n"
    "  __builtin_amdgcn_s_barrier();\n"
    "  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, \"workgroup\");\n"
    "}\n";

const char* hiprtcGetErrorString(R r) {
  static const char* names[] = {"HIPRTC_SUCCESS", "HIPRTC_ERROR_OUT_OF_MEMORY", "HIPRTC_ERROR_PROGRAM_CREATION_FAILURE",
                                "HIPRTC_ERROR_INVALID_INPUT", "HIPRTC_ERROR_INVALID_PROGRAM",
                                "HIPRTC_ERROR_INVALID_OPTION", "HIPRTC_ERROR_COMPILATION"};
  return r >= 0 && r <= COMPILATION ? names[r] : "HIPRTC_ERROR_INTERNAL_ERROR";
}
R hiprtcVersion(int* major, int* minor) { return *major = 7, *minor = 15, SUCCESS; }

R hiprtcCreateProgram(Program** out, const char* source, const char* name, int headers, const char** texts,
                      const char** names) {
  (void)name;
  if (!out || !source || headers < 0) return INVALID_INPUT;
  Program* p = *out = calloc(1, sizeof *p);
  p->source = strdup(source), p->header_count = headers;
  p->headers = calloc(headers + 1, sizeof *p->headers), p->names = calloc(headers + 1, sizeof *p->names);
  for (int i = 0; i < headers; i++) p->headers[i] = strdup(texts[i]), p->names[i] = strdup(names[i]);
  return SUCCESS;
}
R hiprtcDestroyProgram(Program** at) {
  if (!at || !*at) return INVALID_PROGRAM;
  Program* p = *at;
  for (int i = 0; i < p->header_count; i++) free(p->headers[i]), free(p->names[i]);
  free(p->headers), free(p->names), free(p->source), free(p->log), free(p->code), free(p);
  return *at = 0, SUCCESS;
}

static char* slurp(const char* folder, const char* name, size_t* n) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  FILE* f = fopen(path, "rb");
  char* data = 0;
  *n = 0;
  if (f && !fseek(f, 0, SEEK_END)) {
    const size_t size = (size_t)ftell(f);
    rewind(f);
    data = calloc(1, size + 1);
    *n = fread(data, 1, size, f);
  }
  if (f) fclose(f);
  return data;
}
static int spill(const char* folder, const char* name, const char* text) {
  char path[512];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  for (char* slash = path + strlen(folder) + 1; (slash = strchr(slash, '/')); slash++) {
    *slash = 0;
    mkdir(path, 0700);
    *slash = '/';
  }
  FILE* f = fopen(path, "w");
  if (!f) return 0;
  const int fine = fputs(text, f) >= 0;
  return fclose(f) == 0 && fine;
}
static int gone(const char* path, const struct stat* s, int kind, struct FTW* at) {
  return (void)s, (void)kind, (void)at, remove(path);
}
// A word of a command line, quoted for the shell.
static void word(FILE* line, const char* text) {
  fputs(" '", line);
  for (; *text; text++) *text == '\'' ? fputs("'\\''", line) : fputc(*text, line);
  fputc('\'', line);
}
static char* command_of(const char* folder, int n, const char** options) {
  static const char find[] = "$(for c in clang++-22 clang++-21 clang++-20 clang++-19 clang++; do "
                             "command -v $c && break; done)";
  const char *chosen = getenv("TW_SIM_CLANG"), *devices = getenv("TW_SIM_ARCH");
  char* made = 0;
  size_t bytes;
  int arch = 0;
  FILE* line = open_memstream(&made, &bytes);
  fprintf(line, "cd '%s' && %s -x hip --offload-device-only -nogpuinc -nogpulib --no-gpu-bundle-output -O3 -std=c++17 "
          "-fdeclspec -include builtins.h -I.", folder, chosen && *chosen ? chosen : find);
  for (int i = 0; i < n; i++) {
    const char* given = strncmp(options[i], "--gpu-architecture=", 19) ? 0 : options[i] + 19;
    if (!given && !strncmp(options[i], "--offload-arch=", 15)) given = options[i] + 15;
    if (given) arch = 1, fprintf(line, " --offload-arch='%s'", given);
    else word(line, options[i]);
  }
  if (!devices || !*devices) devices = "gfx942";
  if (!arch) fprintf(line, " --offload-arch=%.*s", (int)strcspn(devices, ","), devices);
  fputs(" program.hip -o program.co 2>log", line);
  fclose(line);
  return made;
}
R hiprtcCompileProgram(Program* p, int n, const char** options) {
  if (!p) return INVALID_PROGRAM;
  char folder[] = "/tmp/tw-hiprtc-XXXXXX";
  if (!mkdtemp(folder)) return INTERNAL;
  int fine = spill(folder, "builtins.h", builtins) && spill(folder, "program.hip", p->source);
  for (int i = 0; i < p->header_count; i++) fine &= spill(folder, p->names[i], p->headers[i]);
  char* command = command_of(folder, n, options);
  const int status = fine ? system(command) : -1;
  free(command), free(p->log), free(p->code);
  p->tried = 1, p->log = slurp(folder, "log", &p->log_bytes);
  p->code = status ? 0 : slurp(folder, "program.co", &p->code_bytes);
  if (!p->code) p->code_bytes = 0;
  nftw(folder, gone, 8, FTW_DEPTH | FTW_PHYS);
  return !fine ? INTERNAL : p->code ? SUCCESS : COMPILATION;
}
R hiprtcGetProgramLogSize(Program* p, size_t* n) { return p ? (*n = p->log_bytes + 1, SUCCESS) : INVALID_PROGRAM; }
R hiprtcGetProgramLog(Program* p, char* log) {
  if (!p) return INVALID_PROGRAM;
  return memcpy(log, p->log ? p->log : "", p->log_bytes + 1), SUCCESS;
}
R hiprtcGetCodeSize(Program* p, size_t* n) { return p && p->code ? (*n = p->code_bytes, SUCCESS) : INVALID_PROGRAM; }
R hiprtcGetCode(Program* p, char* code) {
  return p && p->code ? (memcpy(code, p->code, p->code_bytes), SUCCESS) : INVALID_PROGRAM;
}
R hiprtcAddNameExpression(Program* p, const char* name) { return p && name && !p->tried ? SUCCESS : INVALID_PROGRAM; }
// Only names that the compiler leaves as they are: extern "C".
R hiprtcGetLoweredName(Program* p, const char* name, const char** lowered) {
  return p && p->tried ? (*lowered = name, SUCCESS) : NOT_BUILT;
}
