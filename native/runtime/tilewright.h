/* libtilewright: launches plans that a Tilewright server made, in the process of the caller.
 *
 * A launch plan says which entry of which code object runs, with which geometry and arguments; a bundle is a file of
 * launch plans with their code objects. Neither a server nor a compiler nor Python is needed to run one. The formats
 * are in docs/protocol.md; docs/c-api.md is the guide to this interface.
 *
 * Thread-safe: any function may be called from any thread, but an object must not be closed while another thread uses
 * it. Launches of a CPU plan return when they have ended; launches of a GPU plan are put on the stream that is given,
 * may be captured into a graph, and need the context of the stream to be current, as the driver's own launches do. */
#ifndef TILEWRIGHT_H
#define TILEWRIGHT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes when a struct or function of this header changes in a way that callers notice. */
#define TW_ABI_VERSION 1

#define TW_API __attribute__((visibility("default")))

typedef int32_t tw_status;
enum {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1, /* a null pointer, a wrong count, an index out of range */
  TW_DAMAGED = 2,          /* not a launch plan or bundle, cut short, or its digest is wrong */
  TW_VERSION = 3,          /* a format of another version */
  TW_OBJECT_MISSING = 4,   /* a code object of the plan was not given */
  TW_OBJECT_DIGEST = 5,    /* bytes that are not the code object which their hash names */
  TW_OBJECT_LOAD = 6,      /* the loader or driver rejected a code object, or it lacks the entry */
  TW_WRONG_DEVICE = 7,     /* the plan or the stream is of another device, or for another architecture */
  TW_NO_DRIVER = 8,        /* the driver's library cannot be loaded, or lacks a function */
  TW_NO_CONTEXT = 9,       /* no context is current in this thread, or another than that of the binding */
  TW_DRIVER = 10,          /* the driver reports an error; tw_error.value is its code */
  TW_NO_MEMORY = 11,       /* of the host or of the device */
  TW_NULL_OPERAND = 12,    /* an operand has no memory */
  TW_MISALIGNED = 13,      /* an operand lies at an address that the plan was not made for */
  TW_OVERLAP = 14,         /* the span of an output meets that of another operand */
  TW_WORKSPACE = 15,       /* the workspace that was given is too small or not aligned */
  TW_UNSUPPORTED = 16,     /* this cannot be done in this way; the text says which way can */
  TW_TEAM = 17,            /* the plan needs more threads than the CPU pool has */
  TW_NOT_FOUND = 18        /* a bundle has no plan of that name for this device */
};

/* The last error of the calling thread. */
typedef struct tw_error {
  tw_status status;
  int32_t operand; /* its index, or -1 */
  int64_t value;   /* what was wrong: bytes, a count, a code of the driver */
  char rule[32];
  char message[256];
  char fix[192];
} tw_error;

enum { TW_CPU = 1, TW_CUDA = 2, TW_HIP = 3 };
enum { TW_INPUT = 0, TW_OUTPUT = 1 };

typedef struct tw_plan tw_plan;
typedef struct tw_binding tw_binding;
typedef struct tw_bundle tw_bundle;
/* A stream of the driver: CUstream (cudaStream_t) or hipStream_t. NULL is the default stream. Ignored on a CPU. */
typedef void* tw_stream;

typedef struct tw_plan_info {
  uint32_t struct_bytes; /* set by the caller to sizeof(tw_plan_info) */
  int32_t device_kind;   /* TW_CPU, TW_CUDA or TW_HIP */
  uint32_t operands;
  uint32_t stages;
  uint32_t objects;
  uint32_t team;            /* threads of the largest stage, on a CPU */
  uint64_t workspace_bytes; /* see tw_bind_options.workspace */
  uint64_t flops;           /* arithmetic operations of one launch */
  const char* operation;    /* lives as long as the plan */
  const char* arch;
  const char* name; /* what the plan computes, for people and for tw_bundle_find */
} tw_plan_info;

typedef struct tw_operand_info {
  uint32_t struct_bytes; /* set by the caller */
  int32_t role;          /* TW_INPUT or TW_OUTPUT */
  uint32_t rank;
  uint32_t alignment;     /* bytes that its address must be a multiple of */
  uint64_t span_bytes;    /* from its address to the end of its last element; 0: it needs no memory */
  const char* name;       /* lives as long as the plan, like the following */
  const char* dtype;      /* "fp32", "bf16", "int8", ... */
  const int64_t* shape;   /* elements */
  const int64_t* strides; /* elements */
} tw_operand_info;

typedef struct tw_object_info {
  uint32_t struct_bytes; /* set by the caller */
  uint32_t known;        /* 1 if this process has it already */
  uint64_t bytes;
  const uint8_t* sha256; /* 32 bytes, as long as the plan */
} tw_object_info;

/* Counts of a plan's launches, in memory of the caller, at a multiple of 64. */
typedef struct tw_launch_record {
  uint64_t id;         /* the caller's: the library leaves it alone */
  uint64_t launches;   /* that were accepted */
  uint64_t samples;    /* of them were timed: the 16th, and every 1024th after it */
  uint64_t sampled_ns; /* sum of their times: on a CPU from begin to end, on a GPU by events around the launch */
  uint64_t reserved[4];
} tw_launch_record;

TW_API uint32_t tw_abi_version(void);
/* The version of the format of launch plans and bundles that this library reads. */
TW_API uint32_t tw_format_version(void);
TW_API const char* tw_status_name(tw_status status);
TW_API const tw_error* tw_last_error(void);

/* Code objects by the SHA-256 of their bytes: given once for each process, kept until it ends. */
TW_API int32_t tw_object_known(const uint8_t sha256[32]);
TW_API tw_status tw_object_put(const uint8_t sha256[32], const void* data, size_t bytes);
/* The same for the content of a file, which is read; the descriptor stays the caller's. */
TW_API tw_status tw_object_put_fd(const uint8_t sha256[32], int fd, size_t bytes);

/* Opens a launch plan; the bytes are copied. */
TW_API tw_status tw_plan_open(const void* data, size_t bytes, tw_plan** plan);
TW_API void tw_plan_close(tw_plan* plan); /* bindings of it stay valid */
TW_API tw_status tw_plan_describe(const tw_plan* plan, tw_plan_info* info);
TW_API tw_status tw_plan_operand(const tw_plan* plan, uint32_t index, tw_operand_info* info);
TW_API tw_status tw_plan_object(const tw_plan* plan, uint32_t index, tw_object_info* info);
/* Loads the code objects (for the current context of a GPU), which the first bind or run does otherwise. */
TW_API tw_status tw_plan_load(tw_plan* plan);
/* Launches are counted into *record, by relaxed additions that other threads and processes may read at any time. It must
 * outlive the plan and its bindings; NULL stops it. Launches that are captured into a graph are counted once, its replays
 * are not. */
TW_API tw_status tw_plan_record_into(tw_plan* plan, tw_launch_record* record);

/* Launches once with operands at these addresses, in the order of the plan. */
TW_API tw_status tw_run(tw_plan* plan, const uint64_t* addresses, uint32_t count, tw_stream stream);

typedef struct tw_bind_options {
  uint32_t struct_bytes; /* set by the caller */
  uint32_t reserved;     /* 0 */
  /* Memory of the device for the workspace, a multiple of 256, which launches of this binding use and nothing else
   * does at the same time. NULL: the library's own, one for each stream, and one of its own for each graph that is
   * captured. Counters, which some kernels need, are always the library's. */
  void* workspace;
  uint64_t workspace_bytes;
} tw_bind_options;

/* Settles everything but the stream. `options` may be NULL. */
TW_API tw_status tw_bind(
    tw_plan* plan, const uint64_t* addresses, uint32_t count, const tw_bind_options* options, tw_binding** binding);
TW_API tw_status tw_launch(const tw_binding* binding, tw_stream stream);
/* Several bindings in order; *launched, if not NULL, is how many were. */
TW_API tw_status tw_launch_many(
    const tw_binding* const* bindings, uint32_t count, tw_stream stream, uint32_t* launched);
/* Launches that are under way on a GPU keep running. */
TW_API void tw_binding_close(tw_binding* binding);

/* The pool of threads that plans for a CPU run on: started at the first launch, with one thread for each processor
 * that this process may use, unless it is configured before. TW_UNSUPPORTED afterwards. */
TW_API tw_status tw_cpu_configure(const int32_t* cpus, uint32_t count);
TW_API uint32_t tw_cpu_threads(void);

/* Bundles. Plans and code objects are read when they are first used. */
TW_API tw_status tw_bundle_open(const char* path, tw_bundle** bundle);
TW_API void tw_bundle_close(tw_bundle* bundle); /* plans that were opened from it stay valid */
TW_API uint32_t tw_bundle_count(const tw_bundle* bundle);
/* Name and architecture of a plan; both live as long as the bundle. */
TW_API tw_status tw_bundle_entry(const tw_bundle* bundle, uint32_t index, const char** name, const char** arch);
TW_API tw_status tw_bundle_plan(tw_bundle* bundle, uint32_t index, tw_plan** plan);
/* The plan of that name that runs on this machine: for the current context's GPU, or for this CPU. Of several, the one
 * whose architecture comes last by name, which is the highest level of a CPU. */
TW_API tw_status tw_bundle_find(tw_bundle* bundle, const char* name, tw_plan** plan);
/* Reads everything and checks all digests. */
TW_API tw_status tw_bundle_verify(tw_bundle* bundle);

#ifdef __cplusplus
}
#endif
#endif
