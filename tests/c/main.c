/* main.c - all tests in one program, as linking costs more than compiling most of them: it runs the
 * file whose name it is called by. TESTS names them; each has its main under a name of its own. */
#include <stdio.h>
#include <string.h>

#include "check.h"

/* Memory that runs short where a test wants it to: `ld --wrap` leads every calloc here. */
_Atomic size_t check_scarce;

void *__real_calloc(size_t count, size_t size);
/* The linker leads that of shared libraries here, too. */
void *__wrap_calloc(size_t count, size_t size) __attribute__((visibility("default")));
void *__wrap_calloc(size_t count, size_t size)
{
    return check_scarce != 0 && count * size == check_scarce ? NULL : __real_calloc(count, size);
}

#ifdef __SANITIZE_THREAD__

#include <sanitizer/tsan_interface.h>
#include <sys/socket.h>

/* What a thread does before it sends happens before what is done with the answer. The sanitizer
 * notes that only once sendmsg has returned, when the answer may be there already, so the Makefile
 * has `ld --wrap` lead these calls here. */
static char sent;

ssize_t __real_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
    __tsan_release(&sent);
    return __real_sendmsg(fd, message, flags);
}

ssize_t __real_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
    ssize_t got = __real_recvmsg(fd, message, flags);
    __tsan_acquire(&sent);
    return got;
}

ssize_t __real_recv(int fd, void *data, size_t size, int flags);
ssize_t __wrap_recv(int fd, void *data, size_t size, int flags);
ssize_t __wrap_recv(int fd, void *data, size_t size, int flags)
{
    ssize_t got = __real_recv(fd, data, size, flags);
    __tsan_acquire(&sent);
    return got;
}

#endif

#define DECLARE(name) int test_##name(int argc, char **argv);
#define ENTRY(name) {"test_" #name, test_##name},

TESTS(DECLARE)

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        int (*run)(int argc, char **argv);
    } files[] = {TESTS(ENTRY)};
    const char *slash = strrchr(argv[0], '/'), *name = slash != NULL ? slash + 1 : argv[0];
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if (strcmp(name, files[i].name) == 0)
            return files[i].run(argc, argv);
    fprintf(stderr, "there is no %s in this program\n", name);
    return 2;
}
