/* sim.c - runs simulated jobs by their seeds: `make sim SEEDS=1000`, or, in build/ctest/...,
 *
 *     simulate --seeds FIRST COUNT [--jobs N]    COUNT seeds, each of N processes the next one;
 *                                                prints those that failed
 *     simulate --seed N [--trace]                one of them, on stdout with every event
 *
 * What it is. The whole C core, as it ships, with all ranks in one thread and a system behind it
 * that is simulated (os.h): clock, sockets, epoll. A seed is a job with its options and faults, and
 * runs the same way every time (world.h has what must be true).
 *
 * What it cannot see: how driving is handed over between threads, as each rank has one; the thread
 * that sends (threads = 2); polling (spin_us); fork; shared memory; GPUs; Python, and with it the
 * bring-up; descriptors that the program closes; ports that the kernel reports lost; a network
 * whose TCP is broken.
 *
 * A trace has an event a line: virtual nanoseconds, the rank or "-", and what happened:
 *
 *     turn                          the rank's engine runs
 *     call group 0 #3 ...           the rank calls collective 3 of its group's list
 *     send lane 5 100 of 9000       bytes that a sendmsg took, or "errno 11"
 *     recv lane 5 100 of 65536      bytes that a read brought
 *     error group 0 peer lost: ...  its communicator has failed
 *     over group 0 #3 ok            a call has ended
 *     leaves, gone                  the rank says goodbye; its communicator is freed
 *     fault rst lane 5 end 0 rank 2
 *     FAILS                         something was not true: stderr has what
 */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "world.h"

enum { MOST_JOBS = 64, SEED_S = 60 };

/* What the processes share. */
typedef struct shared {
    _Atomic uint64_t next, failed;
    uint64_t last;
    uint64_t current[MOST_JOBS]; /* the seed at which each is */
} shared;

static void run_seeds(shared *s, int job)
{
    for (uint64_t seed; (seed = s->next++) < s->last;) {
        s->current[job] = seed;
        alarm(SEED_S); /* real time, for a core that never comes back */
        if (!world_run(seed, NULL)) {
            s->failed++;
            printf("FAILED %llu\n", (unsigned long long)seed);
            fflush(stdout);
        }
    }
    exit(0);
}

static pid_t start(shared *s, int job)
{
    pid_t pid = fork();
    if (pid == 0)
        run_seeds(s, job);
    return pid;
}

/* Runs all seeds; a process that dies with one is replaced for the others. */
static int run_all(uint64_t first, uint64_t count, int jobs)
{
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[MOST_JOBS], pid;
    int status;
    s->next = first;
    s->last = first + count;
    for (int job = 0; job < jobs; job++)
        pids[job] = start(s, job);
    while ((pid = wait(&status)) > 0) {
        int job = 0;
        while (pids[job] != pid)
            job++;
        if (status == 0)
            continue;
        s->failed++;
        printf("FAILED %llu (ended with status %d)\n", (unsigned long long)s->current[job],
               WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
        fflush(stdout);
        if (s->next < s->last)
            pids[job] = start(s, job);
    }
    printf("%llu of %llu seeds failed\n", (unsigned long long)s->failed, (unsigned long long)count);
    return s->failed != 0;
}

int main(int argc, char **argv)
{
    uint64_t first = 0, count = 0;
    int jobs = 1, traced = 0, one = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--seeds") == 0 && i + 2 < argc) {
            first = strtoull(argv[i + 1], NULL, 10);
            count = strtoull(argv[i + 2], NULL, 10);
            i += 2;
        } else if (strcmp(argv[i], "--seed") == 0 && i + 1 < argc) {
            first = strtoull(argv[++i], NULL, 10);
            one = 1;
        } else if (strcmp(argv[i], "--jobs") == 0 && i + 1 < argc) {
            jobs = atoi(argv[++i]);
        } else if (strcmp(argv[i], "--trace") == 0) {
            traced = 1;
        } else {
            fprintf(stderr,
                    "usage: simulate --seeds FIRST COUNT [--jobs N] | --seed N [--trace]\n");
            return 2;
        }
    }
    jobs = jobs < 1 ? 1 : jobs > MOST_JOBS ? MOST_JOBS : jobs;
    if (!one)
        return run_all(first, count, jobs);
    return !world_run(first, traced ? stdout : NULL);
}
