/* Counts what one shared object copies, sends and receives; preloaded by compare.py.
 *
 * Calls that come from elsewhere are passed on uncounted, and so are the eight bytes by which
 * threads wake each other. What a compiler puts inline, and kernels that load and store by
 * themselves, are not seen. Under Valgrind, which brings a memcpy of its own, only counting_mark is
 * used. */
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#endif

enum { COPIES, COPIED, SENT, RECEIVED, COUNTERS };

static uintptr_t watched[2];
static uint64_t counters[COUNTERS];

#define FROM_WATCHED                                                                               \
    ((uintptr_t)__builtin_return_address(0) >= watched[0] &&                                       \
     (uintptr_t)__builtin_return_address(0) < watched[1])

static void add(int counter, uint64_t amount)
{
    __atomic_fetch_add(&counters[counter], amount, __ATOMIC_RELAXED);
}

/* Counts calls from this range of addresses. */
void counting_watch(uintptr_t from, uintptr_t to)
{
    watched[0] = from;
    watched[1] = to;
}

/* Reads copies, bytes copied, sent and received. */
void counting_read(uint64_t out[COUNTERS])
{
    for (int i = 0; i < COUNTERS; i++)
        out[i] = __atomic_load_n(&counters[i], __ATOMIC_RELAXED);
}

/* Ends a section: Callgrind dumps what it has counted, under this name, and begins at zero.
 * Returns 0 where this was built without Valgrind's headers. */
int counting_mark(const char *name)
{
#ifdef CALLGRIND_DUMP_STATS_AT
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_START_INSTRUMENTATION;
    return 1;
#else
    return name == NULL;
#endif
}

/* ---- copies ---- */

typedef void *copying(void *, const void *, size_t);

static copying *real_move;

__attribute__((constructor)) static void find_real(void)
{
    real_move = (copying *)dlsym(RTLD_NEXT, "memmove");
}

static void *move(void *to, const void *from, size_t n)
{
    if (real_move != NULL)
        return real_move(to, from, n);
    volatile char *out = to; /* the loader's own, before there is a memmove: never overlapping */
    for (size_t i = 0; i < n; i++)
        out[i] = ((const char *)from)[i];
    return to;
}

#define COPY(name, parameters)                                                                     \
    void *name parameters                                                                          \
    {                                                                                              \
        if (FROM_WATCHED) {                                                                        \
            add(COPIES, 1);                                                                        \
            add(COPIED, n);                                                                        \
        }                                                                                          \
        return move(to, from, n);                                                                  \
    }

COPY(memcpy, (void *restrict to, const void *restrict from, size_t n))
COPY(memmove, (void *to, const void *from, size_t n))
COPY(__memcpy_chk, (void *to, const void *from, size_t n, size_t room __attribute__((unused))))
COPY(__memmove_chk, (void *to, const void *from, size_t n, size_t room __attribute__((unused))))

/* ---- sockets ---- */

#define TRANSFER(counter, name, parameters, arguments)                                             \
    ssize_t name parameters                                                                        \
    {                                                                                              \
        static ssize_t(*real) parameters;                                                          \
        if (real == NULL)                                                                          \
            real = (ssize_t(*) parameters)dlsym(RTLD_NEXT, #name);                                 \
        ssize_t n = real arguments;                                                                \
        if (n > 8 && FROM_WATCHED)                                                                 \
            add(counter, (uint64_t)n);                                                             \
        return n;                                                                                  \
    }

TRANSFER(SENT, send, (int fd, const void *data, size_t size, int flags), (fd, data, size, flags))
TRANSFER(SENT, sendmsg, (int fd, const struct msghdr *message, int flags), (fd, message, flags))
TRANSFER(SENT, write, (int fd, const void *data, size_t size), (fd, data, size))
TRANSFER(SENT, writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
TRANSFER(RECEIVED, recv, (int fd, void *data, size_t size, int flags), (fd, data, size, flags))
TRANSFER(RECEIVED, recvmsg, (int fd, struct msghdr *message, int flags), (fd, message, flags))
TRANSFER(RECEIVED, read, (int fd, void *data, size_t size), (fd, data, size))
TRANSFER(RECEIVED, readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))
