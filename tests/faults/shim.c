/* Makes the Nth call of a kind fail, in a process that this library is preloaded into.
 *
 * A file that TW_FAULTS names, which the harness maps too, says which calls of which process fail and how. Only calls of
 * Python and of what it loads by ctypes count: gRPC's core ends the process by itself where the system refuses it
 * anything, which is its business.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MAP = 1, TRUNCATE = 2, OPEN = 4, WRITE = 8, READ = 16, FORK = 32, SOCKET = 64, THREAD = 128, CLOCK = 256, ALLOC = 512,
       DRIVER = 1024 };
enum { FAIL = 0, KILL = 1, SHORT = 2, PAUSE = 3, EXIT = 4, JUMP = 5, LOSE = 6 };
enum { SERVER = 0, WORKER = 1, OTHER = 2 };

struct control {
    _Atomic int64_t armed;     /* 0: nothing happens */
    _Atomic int64_t kinds;     /* mask of the above */
    _Atomic int64_t role;      /* of which process */
    _Atomic int64_t what;      /* FAIL and so on */
    _Atomic int64_t code;      /* errno, or exit status, or seconds of a jump */
    _Atomic int64_t left;      /* calls until it happens */
    _Atomic int64_t seen;      /* calls that counted */
    _Atomic int64_t fired;     /* how often it happened */
    _Atomic int64_t server;    /* its process id */
    _Atomic int64_t jumped;    /* seconds by which the clock is wrong */
};

static struct control *control;
static int role = OTHER;

static void *next_of(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
    real = (__typeof__(name) *)next_of(#name)

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("TW_FAULTS");
    if (!path)
        return;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    char line[8192];
    int words = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = words < 0 ? 0 : read(words, line, sizeof line - 1);
    if (words >= 0)
        close(words);
    if (size > 0 && memmem(line, (size_t)size, "tilewright_server.devices.worker", 32))
        role = WORKER;
    if (mapped != MAP_FAILED)
        control = mapped;
}

static int is_of(const char *library, const void *caller) {
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, library);
}

static int of_grpc(const void *caller) {
    return is_of("cygrpc", caller);
}

/* True if this call is the one that is to fail; then errno says why. */
static int fails(int kind, const void *caller) {
    struct control *c = control;
    if (!c || !c->armed || !(c->kinds & kind))
        return 0;
    int who = c->server == getpid() ? SERVER : role;
    if (who != c->role || of_grpc(caller))
        return 0;
    c->seen++;
    if (atomic_fetch_sub(&c->left, 1) != 1)
        return 0;
    c->fired++;
    switch (c->what) {
    case KILL:
        kill(getpid(), SIGKILL);
        break;
    case EXIT:
        _exit((int)c->code);
    case PAUSE: {
        struct timespec pause = {0, 50 * 1000 * 1000};
        nanosleep(&pause, NULL);
        return 0;
    }
    case JUMP:
        c->jumped = c->code;
        return 0;
    default:
        errno = (int)c->code;
    }
    return 1;
}

static int is_file(int fd) {
    struct stat status;
    return fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
}

#define HERE __builtin_return_address(0)
#define IS_SHORT (control && control->what == SHORT)

/* Of files: what the interpreter itself maps, it cannot do without. */
#define MAPPING(name, offset_type) \
    void *name(void *at, size_t size, int prot, int flags, int fd, offset_type offset) { \
        REAL(name); \
        return fd >= 0 && fails(MAP, HERE) ? MAP_FAILED : real(at, size, prot, flags, fd, offset); \
    }
MAPPING(mmap, off_t)
MAPPING(mmap64, off64_t)

int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    return fails(TRUNCATE, HERE) ? -1 : real(fd, size);
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    return fails(TRUNCATE, HERE) ? -1 : real(fd, size);
}

#define OPENING(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return fails(OPEN, HERE) ? -1 : real(path, flags, mode); \
    }
OPENING(open)
OPENING(open64)

#define OPENING_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        return fails(OPEN, HERE) ? -1 : real(folder, path, flags, mode); \
    }
OPENING_AT(openat)
OPENING_AT(openat64)

int fcntl64(int fd, int command, ...) {
    REAL(fcntl64);
    va_list more;
    va_start(more, command);
    void *argument = va_arg(more, void *);
    va_end(more);
    return command == F_DUPFD_CLOEXEC && fails(OPEN, HERE) ? -1 : real(fd, command, argument);
}

int memfd_create(const char *name, unsigned flags) {
    REAL(memfd_create);
    return fails(OPEN, HERE) ? -1 : real(name, flags);
}

int pipe2(int ends[2], int flags) {
    REAL(pipe2);
    return fails(OPEN, HERE) ? -1 : real(ends, flags);
}

int socketpair(int domain, int type, int protocol, int ends[2]) {
    REAL(socketpair);
    return fails(OPEN, HERE) ? -1 : real(domain, type, protocol, ends);
}

int accept4(int fd, struct sockaddr *from, socklen_t *size, int flags) {
    REAL(accept4);
    return fails(OPEN, HERE) ? -1 : real(fd, from, size, flags);
}

/* Of libtilewright alone: the interpreter ends without memory of its own. */
#define ALLOCATING(name, parameters, arguments) \
    extern void *__libc_##name parameters; \
    void *name parameters { \
        struct control *c = control; \
        if (c && c->armed && (c->kinds & ALLOC) && is_of("libtilewright", HERE) && fails(ALLOC, HERE)) \
            return NULL; \
        return __libc_##name arguments; \
    }
ALLOCATING(malloc, (size_t size), (size))
ALLOCATING(calloc, (size_t count, size_t size), (count, size))

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
    if (size > 1 && is_file(fd) && fails(WRITE, HERE)) {
        if (!IS_SHORT)
            return -1;
        size /= 2;
    }
    return real(fd, data, size);
}

/* Vectors of one part, as Python's are here. */
#define TRANSFER(kind, name, parameters, arguments, halved) \
    ssize_t name parameters { \
        REAL(name); \
        if (count == 1 && parts->iov_len > 1 && is_file(fd) && fails(kind, HERE)) { \
            if (!IS_SHORT) \
                return -1; \
            struct iovec half = {parts->iov_base, parts->iov_len / 2}; \
            return real halved; \
        } \
        return real arguments; \
    }
TRANSFER(WRITE, pwritev64v2, (int fd, const struct iovec *parts, int count, off64_t offset, int flags),
         (fd, parts, count, offset, flags), (fd, &half, 1, offset, flags))
TRANSFER(READ, preadv64v2, (int fd, const struct iovec *parts, int count, off64_t offset, int flags),
         (fd, parts, count, offset, flags), (fd, &half, 1, offset, flags))

ssize_t read(int fd, void *data, size_t size) {
    REAL(read);
    if (size > 1 && is_file(fd) && fails(READ, HERE)) {
        if (!IS_SHORT)
            return -1;
        size = size > 2 ? size / 2 : 1;
    }
    return real(fd, data, size);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    REAL(recvmsg);
    return fails(SOCKET, HERE) ? -1 : real(fd, message, flags);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    REAL(sendmsg);
    return fails(SOCKET, HERE) ? -1 : real(fd, message, flags);
}

ssize_t recv(int fd, void *data, size_t size, int flags) {
    REAL(recv);
    return fails(SOCKET, HERE) ? -1 : real(fd, data, size, flags);
}

ssize_t send(int fd, const void *data, size_t size, int flags) {
    REAL(send);
    return fails(SOCKET, HERE) ? -1 : real(fd, data, size, flags);
}

pid_t fork(void) {
    REAL(fork);
    return fails(FORK, HERE) ? -1 : real();
}

/* Not vfork: nobody may return from a function that calls it. */

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument) {
    REAL(pthread_create);
    return fails(THREAD, HERE) ? EAGAIN : real(thread, how, run, argument);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(clock_gettime);
    int status = real(clock, now);
    if (clock == CLOCK_REALTIME && control && control->server == getpid()) {
        fails(CLOCK, HERE);
        now->tv_sec += control->jumped;
    }
    return status;
}

/* Calls of a simulated GPU's driver, which asks here: a result; one below 0 means that all later calls have it too. */
int tw_driver_step(void) {
    struct control *c = control;
    if (!fails(DRIVER, HERE))
        return 0;
    return c->what == LOSE ? -(int)c->code : (int)c->code;
}
