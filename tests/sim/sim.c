/* sim.c - runs simulated jobs by their seeds: `make sim SEEDS=1000`, or, in build/ctest/...,
 *
 *     simulate --seeds FIRST COUNT [--jobs N]    COUNT seeds, each of N processes the next one;
 *                                                prints those that failed
 *     simulate --seed N [--trace] [--part FAULTS CALLS CALLS CALM]
 *                                                one of them, on stdout with every event; a part
 *                                                of it (world_part)
 *     simulate --shrink N                        looks for a small part of it that fails, too
 *
 * What it is. The whole C core, as it ships, with all ranks in one thread and a system behind it
 * that is simulated (os.h): clock, sockets, epoll. A seed is a job with its options and faults, and
 * runs the same way every time (world.h has what must be true).
 *
 * What it cannot see: how driving is handed over between threads, as there is one; the thread that
 * sends (threads = 2); polling (spin_us); fork; shared memory; GPUs; Python, and with it the
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
        if (!world_run(seed, &WORLD_WHOLE, NULL)) {
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

/* ---- a small part that fails ---- */

static int fails(uint64_t seed, const world_part *part)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        alarm(SEED_S);
        exit(freopen("/dev/null", "w", stderr) == NULL || !world_run(seed, part, NULL));
    }
    waitpid(pid, &status, 0);
    return status != 0;
}

/* Takes the smaller part if it fails. Returns 1 if it does. */
static int settle_for(uint64_t seed, world_part *part, world_part smaller)
{
    if (memcmp(part, &smaller, sizeof smaller) == 0 || !fails(seed, &smaller))
        return 0;
    *part = smaller;
    return 1;
}

static int shrink_calls(uint64_t seed, world_part *part, int group)
{
    int shrinks = 0, step = 16;
    while (step > 0) {
        world_part smaller = *part;
        int calls = smaller.calls[group] < 16 ? smaller.calls[group] : 16;
        smaller.calls[group] = calls > step ? calls - step : 0;
        if (settle_for(seed, part, smaller))
            shrinks = 1;
        else
            step /= 2;
    }
    return shrinks;
}

static int shrink(uint64_t seed)
{
    world_part part = WORLD_WHOLE;
    int shrinks = fails(seed, &part);
    if (!shrinks) {
        printf("seed %llu does not fail\n", (unsigned long long)seed);
        return 0;
    }
    while (shrinks) {
        world_part smaller = part;
        smaller.is_calm = 1;
        shrinks = settle_for(seed, &part, smaller);
        for (int i = 0; i < 8; i++) {
            smaller = part;
            smaller.faults &= ~(1U << i);
            shrinks |= settle_for(seed, &part, smaller);
        }
        for (int group = 0; group < WORLD_MOST_GROUPS; group++)
            shrinks |= shrink_calls(seed, &part, group);
    }
    printf("--seed %llu --part %u %d %d %d\n", (unsigned long long)seed, part.faults, part.calls[0],
           part.calls[1], part.is_calm);
    return 1;
}

/* ---- the command line ---- */

typedef struct options {
    uint64_t first, count;
    int jobs, traced;
    char what; /* 'a'll seeds, 'o'ne, 's'hrink */
    world_part part;
} options;

/* Reads one option; returns how many words it takes, or 0. */
static int read_option(options *o, char **word, int left)
{
    if (strcmp(word[0], "--trace") == 0) {
        o->traced = 1;
        return 1;
    }
    if (left > 1 && strcmp(word[0], "--jobs") == 0) {
        o->jobs = atoi(word[1]);
        return 2;
    }
    if (left > 1 && (strcmp(word[0], "--seed") == 0 || strcmp(word[0], "--shrink") == 0)) {
        o->first = strtoull(word[1], NULL, 10);
        o->what = word[0][3] == 'e' ? 'o' : 's';
        return 2;
    }
    if (left > 2 && strcmp(word[0], "--seeds") == 0) {
        o->first = strtoull(word[1], NULL, 10);
        o->count = strtoull(word[2], NULL, 10);
        o->what = 'a';
        return 3;
    }
    if (left > 4 && strcmp(word[0], "--part") == 0) {
        o->part =
            (world_part){(unsigned)atoi(word[1]), {atoi(word[2]), atoi(word[3])}, atoi(word[4])};
        return 5;
    }
    return 0;
}

int main(int argc, char **argv)
{
    options o = {.jobs = 1, .part = WORLD_WHOLE};
    for (int i = 1, words = 1; i < argc; i += words) {
        words = read_option(&o, argv + i, argc - i);
        if (words == 0)
            o.what = 0, words = argc;
    }
    o.jobs = o.jobs < 1 ? 1 : o.jobs > MOST_JOBS ? MOST_JOBS : o.jobs;
    switch (o.what) {
    case 'a': return run_all(o.first, o.count, o.jobs);
    case 'o': return !world_run(o.first, &o.part, o.traced ? stdout : NULL);
    case 's': return shrink(o.first);
    default: fputs("simulate: see the head of tests/sim/sim.c\n", stderr); return 2;
    }
}
