/* sim.c - runs simulated jobs: `make sim SEEDS=1000`, or, in build/ctest/...,
 *
 *     simulate --seeds FIRST COUNT [--jobs N]    COUNT seeds, each of N processes the next one;
 *                                                prints those that failed
 *     simulate --until-fails FIRST COUNT         the same up to the first that fails
 *     simulate --seed N [--trace] [--part FAULTS CALLS CALLS CALM]
 *                                                one of them, on stdout with every event; a part
 *                                                of it (job_part)
 *     simulate --shrink N                        looks for a small part of it that fails, too
 *     simulate --kills EVERY [--jobs N]          journeys (job.c), in which each process is killed
 *                                                with each event in turn, or every EVERY-th
 *     simulate --deaths EVERY [--jobs N]         journeys in which each lane dies with each event,
 *                                                alone or with its sibling soon after
 *     simulate --kill N, --death N [--trace]     one of these
 *
 * What it is. The whole C core, as it ships, with all ranks in one thread and a system behind it
 * that is simulated (os.h): clock, sockets, epoll. A job (job.h) has options, calls and faults, and
 * runs the same way every time (world.h has what must be true).
 *
 * What it cannot see: how driving is handed over between threads, as there is one; the thread that
 * sends (threads = 2); polling (spin_us); fork; who writes first to memory that ranks share, as
 * they take turns; GPUs; Python, and with it the bring-up; ports that the kernel reports lost;
 * memory that is short; a network whose TCP is broken; calls that differ between ranks.
 *
 * A trace has an event a line: virtual nanoseconds, the process or "-", and what happened:
 *
 *     turn                          the process's engine runs
 *     call group 0 #3 ...           it calls collective 3 of its group's list
 *     send lane 5 100 of 9000       bytes that a sendmsg took, or "errno 11"
 *     recv lane 5 100 of 65536      bytes that a read brought
 *     error group 0 peer lost: ...  its communicator has failed
 *     over group 0 #3 ok            a call has ended
 *     leaves, gone                  it says goodbye; its communicator is freed
 *     fault rst lane 5 end 0 process 2
 *     FAILS                         something was not true: stderr has what
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "world.h"

enum { MOST_JOBS = 64, SEED_S = 60 };

/* ---- what the numbers mean ---- */

static int run_seed(uint64_t seed, const job_part *part, FILE *trace)
{
    uint64_t events;
    job *j = malloc(sizeof *j);
    job_draw(j, seed);
    job_leave_out(j, part);
    int is_true = world_run(j, trace, &events);
    free(j);
    return is_true;
}

static int run_whole(uint64_t seed, FILE *trace)
{
    return run_seed(seed, &JOB_WHOLE, trace);
}

/* Writes which faults come with an event in one of the ways; returns how many. */
typedef int ways_of_fault(int way, uint64_t event, fault faults[JOB_MOST_FAULTS]);

static int kill_one(int victim, uint64_t event, fault faults[JOB_MOST_FAULTS])
{
    faults[0] = (fault){.kind = FAULT_KILL, .turn = -1, .process = victim, .event = event};
    return 1;
}

enum { DEATHS = 2 * 2 * JOB_JOURNEY_LANES };

/* A lane is reset, or ends; so does the other of its link, an event later or some. */
static int end_lane(int way, uint64_t event, fault faults[JOB_MOST_FAULTS])
{
    int lane = way % JOB_JOURNEY_LANES, more = way / JOB_JOURNEY_LANES;
    fault_kind kind = more / 2 ? FAULT_FIN : FAULT_RST;
    uint64_t later = event % 2 ? 1 : 1 + event % 30;
    faults[0] = (fault){.kind = kind, .turn = -1, .lane = lane, .event = event};
    faults[1] = (fault){.kind = kind, .turn = -1, .lane = lane ^ 1, .event = event + later};
    return more % 2 ? 2 : 1;
}

/* Journeys with faults, each with a number: way by way of an event, event by event. */
typedef struct trip {
    const char *what;
    int recovers, ways;
    ways_of_fault *faults;
} trip;

static const trip kills = {"kill", 0, JOB_JOURNEY_PROCESSES, kill_one};
static const trip deaths = {"death", 1, DEATHS, end_lane};

static uint64_t journey_events[16]; /* without a fault */

/* Runs a journey; returns its events, or 0 if something was not true. */
static uint64_t run_journey(const trip *t, int journey, int way, uint64_t event, FILE *trace)
{
    uint64_t events;
    fault faults[JOB_MOST_FAULTS];
    job *j = malloc(sizeof *j);
    job_journey(j, journey, t->recovers, faults, event > 0 ? t->faults(way, event, faults) : 0);
    int is_true = world_run(j, trace, &events);
    free(j);
    return is_true ? events : 0;
}

/* Returns how many numbers there are. */
static uint64_t count_faults(const trip *t)
{
    uint64_t count = 0;
    for (int i = 0; job_journey_name(i) != NULL; i++) {
        journey_events[i] = run_journey(t, i, 0, 0, NULL);
        if (journey_events[i] == 0)
            exit(1); /* it fails without a fault */
        count += journey_events[i] * (uint64_t)t->ways;
    }
    return count;
}

static int run_fault(const trip *t, uint64_t number, FILE *trace)
{
    int journey = 0;
    for (; number >= journey_events[journey] * (uint64_t)t->ways; journey++)
        number -= journey_events[journey] * (uint64_t)t->ways;
    int way = (int)(number % (uint64_t)t->ways);
    uint64_t event = number / (uint64_t)t->ways + 1;
    if (run_journey(t, journey, way, event, trace) != 0)
        return 1;
    printf("%s, %s %d with event %llu of %llu:\n", job_journey_name(journey), t->what, way,
           (unsigned long long)event, (unsigned long long)journey_events[journey]);
    return 0;
}

static int run_kill(uint64_t number, FILE *trace)
{
    return run_fault(&kills, number, trace);
}

static int run_death(uint64_t number, FILE *trace)
{
    return run_fault(&deaths, number, trace);
}

/* ---- many of them ---- */

/* What the processes share. */
typedef struct shared {
    _Atomic uint64_t next, failed;
    uint64_t last, step;
    int (*run)(uint64_t number, FILE *trace);
    int is_first_enough;
    uint64_t current[MOST_JOBS]; /* the number at which each is */
} shared;

static int goes_on(const shared *s)
{
    return s->next < s->last && !(s->failed && s->is_first_enough);
}

static void run_numbers(shared *s, int job)
{
    while (goes_on(s)) {
        uint64_t number = atomic_fetch_add(&s->next, s->step);
        s->current[job] = number;
        alarm(SEED_S); /* real time, for a core that never comes back */
        if (number < s->last && !s->run(number, NULL)) {
            s->failed++;
            printf("FAILED %llu\n", (unsigned long long)number);
            fflush(stdout);
        }
    }
    exit(0);
}

static pid_t start(shared *s, int job)
{
    pid_t pid = fork();
    if (pid == 0)
        run_numbers(s, job);
    return pid;
}

/* Runs all numbers; a process that dies with one is replaced for the others. */
static int run_all(const shared *what, int jobs, const char *unit)
{
    shared *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[MOST_JOBS], pid;
    int status;
    uint64_t first = what->next, last;
    memcpy(s, what, sizeof *s);
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
        if (goes_on(s))
            pids[job] = start(s, job);
    }
    last = s->next < s->last ? s->next : s->last;
    printf("%llu of %llu %s failed\n", (unsigned long long)s->failed,
           (unsigned long long)((last - first + s->step - 1) / s->step), unit);
    return s->failed != 0;
}

/* ---- a small part that fails ---- */

static int fails(uint64_t seed, const job_part *part)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        alarm(SEED_S);
        exit(freopen("/dev/null", "w", stderr) == NULL || !run_seed(seed, part, NULL));
    }
    waitpid(pid, &status, 0);
    return status != 0;
}

/* Takes the smaller part if it fails. Returns 1 if it does. */
static int settle_for(uint64_t seed, job_part *part, job_part smaller)
{
    if (memcmp(part, &smaller, sizeof smaller) == 0 || !fails(seed, &smaller))
        return 0;
    *part = smaller;
    return 1;
}

static int shrink_calls(uint64_t seed, job_part *part, int group)
{
    int shrinks = 0, step = 16;
    while (step > 0) {
        job_part smaller = *part;
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
    job_part part = JOB_WHOLE;
    int shrinks = fails(seed, &part);
    if (!shrinks) {
        printf("seed %llu does not fail\n", (unsigned long long)seed);
        return 0;
    }
    while (shrinks) {
        job_part smaller = part;
        smaller.is_calm = 1;
        shrinks = settle_for(seed, &part, smaller);
        for (int i = 0; i < 8; i++) {
            smaller = part;
            smaller.faults &= ~(1U << i);
            shrinks |= settle_for(seed, &part, smaller);
        }
        for (int group = 0; group < JOB_MOST_GROUPS; group++)
            shrinks |= shrink_calls(seed, &part, group);
    }
    printf("--seed %llu --part %u %d %d %d\n", (unsigned long long)seed, part.faults, part.calls[0],
           part.calls[1], part.is_calm);
    return 1;
}

/* ---- the command line ---- */

typedef struct options {
    char what; /* 'a'll seeds, 'u'ntil one fails, 'o'ne, 's'hrink, all 'k'ills, 'K'ill, 'd', 'D' */
    uint64_t first, count;
    int jobs, traced;
    job_part part;
} options;

/* An option: what it asks for, if anything, and the numbers behind it. */
typedef struct option {
    const char *name;
    char what;
    int words;
} option;

static const option all_options[] = {
    {"--seeds", 'a', 2}, {"--until-fails", 'u', 2}, {"--seed", 'o', 1}, {"--shrink", 's', 1},
    {"--kills", 'k', 1}, {"--kill", 'K', 1},        {"--jobs", 'j', 1}, {"--trace", 't', 0},
    {"--part", 'p', 4},  {"--deaths", 'd', 1},      {"--death", 'D', 1}};

static void take_option(options *o, char what, char **word)
{
    switch (what) {
    case 't': o->traced = 1; break;
    case 'j': o->jobs = atoi(word[1]); break;
    case 'p':
        o->part =
            (job_part){(unsigned)atoi(word[1]), {atoi(word[2]), atoi(word[3])}, atoi(word[4])};
        break;
    case 'a':
    case 'u': o->count = strtoull(word[2], NULL, 10); /* fall through */
    default: o->what = what, o->first = strtoull(word[1], NULL, 10);
    }
}

/* Reads one option; returns how many words it takes, or 0. */
static int read_option(options *o, char **word, int left)
{
    for (size_t i = 0; i < sizeof all_options / sizeof *all_options; i++) {
        const option *is = &all_options[i];
        if (strcmp(word[0], is->name) != 0 || left <= is->words)
            continue;
        take_option(o, is->what, word);
        return is->words + 1;
    }
    return 0;
}

/* Runs every number, or every so-many-th. */
static int run_trips(const trip *t, int (*run)(uint64_t, FILE *), const options *o,
                     const char *unit)
{
    uint64_t step = o->first < 1 ? 1 : o->first;
    shared s = {.last = count_faults(t), .step = step, .run = run};
    return run_all(&s, o->jobs, unit);
}

int main(int argc, char **argv)
{
    options o = {.jobs = 1, .part = JOB_WHOLE};
    for (int i = 1, words = 1; i < argc; i += words) {
        words = read_option(&o, argv + i, argc - i);
        if (words == 0)
            o.what = 0, words = argc;
    }
    o.jobs = o.jobs < 1 ? 1 : o.jobs > MOST_JOBS ? MOST_JOBS : o.jobs;
    FILE *trace = o.traced ? stdout : NULL;
    shared s = {.next = o.first, .last = o.first + o.count, .step = 1, .run = run_whole};
    switch (o.what) {
    case 'u': s.is_first_enough = 1; /* fall through */
    case 'a': return run_all(&s, o.jobs, "seeds");
    case 'o': return !run_seed(o.first, &o.part, trace);
    case 's': return shrink(o.first);
    case 'k': return run_trips(&kills, run_kill, &o, "kills");
    case 'd': return run_trips(&deaths, run_death, &o, "deaths");
    case 'K': return count_faults(&kills) <= o.first || !run_kill(o.first, trace);
    case 'D': return count_faults(&deaths) <= o.first || !run_death(o.first, trace);
    default: fputs("simulate: see the head of tests/sim/sim.c\n", stderr); return 2;
    }
}
