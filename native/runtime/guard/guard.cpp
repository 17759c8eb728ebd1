// Mapped files of others, in which no page is made (guard.h).
#include "guard/guard.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "common/error.hpp"
#include "common/lock.hpp"

#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif

namespace tw {
namespace {

constexpr int32_t kSlots = 1 << 15;
constexpr uintptr_t kPart = 2u << 20;  // bytes that are replaced together: so much memory may one mapping cost
constexpr uint32_t kParts = 8192;      // of all mappings at a time: each is a mapping of the process's own

struct Slot {
  uintptr_t start, end;  // none: start is 0
  uint32_t holes;
  int32_t stand_in;  // memory file that stands in for what is missing; 0: none yet
};

Slot slots[kSlots];  // written under `changing`, read by the handler at any time
int32_t used = 0;    // slots that may be taken, from the first one on
int32_t unused = -1;  // where to look for one first
uint32_t parts = 0;
int32_t faults = -1;  // userfaultfd; -2: not to be had
tw_guard_counts counts = {0, 0, 0};
struct sigaction before;
Lock changing;

template <typename T>
T get(const T& value) {
  return __atomic_load_n(&value, __ATOMIC_ACQUIRE);
}

template <typename T>
void set(T& value, T to) {
  __atomic_store_n(&value, to, __ATOMIC_RELEASE);
}

// A memory file for what is missing of a mapping: two threads may need the first at the same time.
int32_t stand_in(Slot& slot) {
  int32_t known = get(slot.stand_in);
  if (known > 0) return known;
  const int made = int(syscall(SYS_memfd_create, "tilewright-missing", 1u /* MFD_CLOEXEC */));
  if (made <= 0) return -1;
  if (ftruncate(made, off_t(kPart)) != 0) {
    close(made);
    return -1;
  }
  if (__atomic_compare_exchange_n(&slot.stand_in, &known, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) return made;
  close(made);
  return known;
}

// Puts something in the place of what is missing at `at`. In the handler of a signal: system calls only.
bool replace(Slot& slot, uintptr_t at) {
  const uintptr_t start = get(slot.start), end = get(slot.end);
  const uintptr_t from = start + (at - start) / kPart * kPart;
  const uintptr_t bytes = end - from < kPart ? end - from : kPart;
  const int file = stand_in(slot), access = PROT_READ | PROT_WRITE;
  const bool room = __atomic_add_fetch(&parts, 1, __ATOMIC_RELAXED) <= kParts;
  void* part = reinterpret_cast<void*>(from);
  const bool done = room && file > 0 && mmap(part, bytes, access, MAP_SHARED | MAP_FIXED, file, 0) != MAP_FAILED;
  if (!__atomic_fetch_add(&slot.holes, 1, __ATOMIC_ACQ_REL)) __atomic_fetch_add(&counts.spoilt, 1, __ATOMIC_ACQ_REL);
  __atomic_fetch_add(&counts.holes, 1, __ATOMIC_RELAXED);
  if (done) return true;
  // Rather pages that this process pays for than a process that ends.
  __atomic_fetch_add(&counts.given_up, 1, __ATOMIC_RELAXED);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(reinterpret_cast<void*>(start), end - start, access, flags, -1, 0) != MAP_FAILED;
}

void on_missing(int number, siginfo_t* info, void* context) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(info->si_addr);
  const int32_t most = get(used);
  for (int32_t index = 0; index < most; ++index) {
    const uintptr_t start = get(slots[index].start);
    if (!start || at < start || at >= get(slots[index].end)) continue;
    const int saved = errno;
    const bool replaced = replace(slots[index], at);
    errno = saved;
    if (replaced) return;
    break;
  }
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN) {
    signal(number, SIG_DFL);  // the touch is made again, and ends the process
  } else {
    before.sa_handler(number);
  }
}

tw_status unsupported() {
  return fail(TW_UNSUPPORTED, "guard", "allow userfaultfd(2), or do without", "the system does not guard this memory");
}

// Under `changing`.
bool begin() {
  if (faults != -1) return faults >= 0;
  int fd = int(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY));
  if (fd < 0 && errno == EINVAL) fd = int(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));  // before Linux 5.11
  uffdio_api api = {};
  api.api = UFFD_API;
  api.features = UFFD_FEATURE_SIGBUS | UFFD_FEATURE_MISSING_SHMEM;
  struct sigaction action = {};
  action.sa_sigaction = on_missing;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  if (fd < 0 || ioctl(fd, UFFDIO_API, &api) != 0 || sigaction(SIGBUS, &action, &before) != 0) {
    if (fd >= 0) close(fd);
    faults = -2;
    return false;
  }
  faults = fd;
  return true;
}

}  // namespace
}  // namespace tw

using namespace tw;

extern "C" tw_status tw_guard_add(void* address, uint64_t bytes, int32_t* slot) {
  if (!address || !bytes || !slot) {
    return fail(TW_INVALID_ARGUMENT, "guard", "give the address and size of a mapping", "there is no mapping");
  }
  Guard guard(changing);
  if (!begin()) return unsupported();
  int32_t index = unused >= 0 ? unused : used;
  while (index < kSlots && slots[index].start) ++index;
  if (index == kSlots) return fail(TW_NO_MEMORY, "guard", "end mappings that are not needed", "too many are guarded");
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t start = reinterpret_cast<uintptr_t>(address), end = (start + bytes + page - 1) / page * page;
  uffdio_register wanted = {};
  wanted.range.start = start;
  wanted.range.len = end - start;
  wanted.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (ioctl(faults, UFFDIO_REGISTER, &wanted) != 0) return unsupported();
  Slot& taken = slots[index];
  taken.holes = 0;
  taken.stand_in = 0;
  set(taken.end, end);
  set(taken.start, start);
  if (index >= used) set(used, index + 1);
  unused = index + 1 < used ? index + 1 : -1;
  *slot = index;
  return TW_OK;
}

extern "C" uint32_t tw_guard_holes(int32_t slot) { return slot < 0 || slot >= kSlots ? 0 : get(slots[slot].holes); }

extern "C" void tw_guard_remove(int32_t slot) {
  if (slot < 0 || slot >= kSlots) return;
  Guard guard(changing);
  Slot& ended = slots[slot];
  set(ended.start, uintptr_t(0));
  if (ended.holes) __atomic_fetch_sub(&counts.spoilt, 1, __ATOMIC_ACQ_REL);
  __atomic_fetch_sub(&parts, ended.holes, __ATOMIC_RELAXED);
  if (ended.stand_in > 0) close(ended.stand_in);
  ended.holes = 0;
  ended.stand_in = 0;
  if (unused < 0 || slot < unused) unused = slot;
}

extern "C" const tw_guard_counts* tw_guard_watch(void) { return &counts; }
