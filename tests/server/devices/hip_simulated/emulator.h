// The process that runs kernels: started at the first launch, ended by the end of this one's side of the socket.
//
// A request is a head and a body, an answer a head and a text; all numbers are little-endian.
// emulator/tilewright_emulator/serve.py says the same in Python.
#pragma once
#include <spawn.h>
#include <sys/socket.h>
enum { TAKE_MODULE = 1, DROP_MODULE = 2, RUN = 3 };
typedef struct {
  uint32_t kind, zero;
  uint64_t bytes;
} RequestHead;
typedef struct {
  uint64_t module;
  uint32_t grid[3], block[3], shared, name_bytes, argument_bytes, ranges;
} RunHead;
typedef struct {
  uint64_t base, size;
  char name[40];
} RunRange;
typedef struct {
  int32_t result;
  uint32_t bytes;
} AnswerHead;

typedef struct Job {
  char* request;
  size_t bytes;
  int done;
  R result;
  struct Job* next;
} Job;
static Job *first_job, *last_job;
static pthread_cond_t work = PTHREAD_COND_INITIALIZER;
static int emulator_socket = -1, emulator_started;
extern char** environ;

static int all(int fd, char* at, size_t n, int out) {
  while (n) {
    const ssize_t done = out ? send(fd, at, n, MSG_NOSIGNAL) : recv(fd, at, n, 0);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return 0;
    at += done, n -= (size_t)done;
  }
  return 1;
}
// What the emulator answers to a request; it says why on standard error.
static R ask(const char* request, size_t bytes) {
  AnswerHead head;
  if (emulator_socket < 0 || !all(emulator_socket, (char*)request, bytes, 1) ||
      !all(emulator_socket, (char*)&head, sizeof head, 0))
    return faulted(LAUNCH_FAILURE, "the emulator is not there any more");
  char* text = calloc(1, head.bytes + 1);
  const int whole = all(emulator_socket, text, head.bytes, 0);
  const R result = !whole ? LAUNCH_FAILURE : head.result ? faulted(head.result, text) : OK;
  free(text);
  return result;
}
static void* serve_jobs(void* unused) {
  pthread_mutex_lock(&lock);
  for (;;) {
    while (!first_job) pthread_cond_wait(&work, &lock);
    Job* job = first_job;
    pthread_mutex_unlock(&lock);
    const R result = ask(job->request, job->bytes);
    pthread_mutex_lock(&lock);
    first_job = job->next;
    if (!first_job) last_job = 0;
    free(job->request);
    job->request = 0, job->result = result, job->done = 1;
    pump();
  }
  return unused;
}
// Whether there is an emulator; starts it. The lock is held.
static int emulator(void) {
  const char* command = getenv("TW_SIM_EMULATOR");
  if (emulator_started || !command || !*command) return emulator_started;
  int ends[2];
  pid_t child;
  char line[4096];
  posix_spawn_file_actions_t actions;
  pthread_t thread;
  snprintf(line, sizeof line, "exec %s 3", command);
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return 0;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
  const int failed = posix_spawn(&child, "/bin/sh", &actions, 0, (char*[]){"sh", "-c", line, 0}, environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  emulator_socket = ends[0];
  if (failed || pthread_create(&thread, 0, serve_jobs, 0)) return 0;
  pthread_detach(thread);
  return emulator_started = 1;
}
// Put a request behind those before it; takes it over.
static Job* submit(char* request, size_t bytes) {
  Job* job = calloc(1, sizeof *job);
  job->request = request, job->bytes = bytes;
  if (last_job) last_job->next = job;
  else first_job = job;
  last_job = job;
  pthread_cond_signal(&work);
  return job;
}
static char* request(uint32_t kind, const void* head, size_t head_bytes, size_t more, size_t* bytes) {
  const RequestHead first = {kind, 0, head_bytes + more};
  *bytes = sizeof first + head_bytes + more;
  char* made = malloc(*bytes);
  memcpy(made, &first, sizeof first);
  memcpy(made + sizeof first, head, head_bytes);
  return made;
}
static void submit_module(uint64_t module, const char* image, size_t size) {
  size_t bytes;
  char* made = request(TAKE_MODULE, &module, sizeof module, size, &bytes);
  memcpy(made + bytes - size, image, size);
  submit(made, bytes);
}
static void submit_end(uint64_t module) {
  size_t bytes;
  char* made = request(DROP_MODULE, &module, sizeof module, 0, &bytes);
  submit(made, bytes);
}
static Job* submit_run(uint64_t module, const char* name, const Shape* shape, const void* arguments, size_t n) {
  RunHead head = {.module = module, .shared = shape->shared, .name_bytes = strlen(name), .argument_bytes = n};
  memcpy(head.grid, shape->grid, 12), memcpy(head.block, shape->block, 12);
  for (Range* r = ranges; r; r = r->next) head.ranges++;
  size_t bytes;
  const size_t more = head.name_bytes + n + head.ranges * sizeof(RunRange);
  char *made = request(RUN, &head, sizeof head, more, &bytes), *at = made + bytes - more;
  at = (char*)memcpy(at, name, head.name_bytes) + head.name_bytes;
  at = (char*)memcpy(at, arguments, n) + n;
  for (Range* r = ranges; r; r = r->next, at += sizeof(RunRange)) {
    RunRange range = {.base = r->base, .size = r->size};
    memcpy(range.name, r->name, sizeof range.name);
    memcpy(at, &range, sizeof range);
  }
  return submit(made, bytes);
}
