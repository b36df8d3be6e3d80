/* test_region.c - where the slots of shared memory lie, what ranks see of each other's counters,
 * and that no wake-up is lost between one that dozes off and one that brings what it waits for. */
#include "../../csrc/shm/region.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "fds.h"
#include "maps.h"

#define NAME "ringcomm-region-test"

static int make_file(void)
{
    return memfd_create(NAME, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

/* A mapping each for so many ranks. */
static void map_all(region *r, int ranks)
{
    int fd = make_file();
    for (int rank = 0; rank < ranks; rank++)
        CHECK_EQ(region_map(&r[rank], fd, rank, ranks), RC_OK);
    close(fd);
}

static void unmap_all(region *r, int ranks)
{
    for (int rank = 0; rank < ranks; rank++)
        region_unmap(&r[rank]);
}

/* ---- where things lie ---- */

typedef struct extent {
    const uint8_t *from;
    size_t bytes;
} extent;

static int by_address(const void *a, const void *b)
{
    const uint8_t *x = ((const extent *)a)->from, *y = ((const extent *)b)->from;
    return (x > y) - (x < y);
}

static void check_layout(int ranks)
{
    enum { MOST = REGION_MAX_RANKS * (2 * REGION_DEPTH + 1) };
    static extent at[MOST];
    region r;
    int count = 0, fd = make_file();
    CHECK_EQ(region_map(&r, fd, ranks - 1, ranks), RC_OK);
    close(fd);
    for (int rank = 0; rank < ranks; rank++) {
        at[count++] = (extent){(const uint8_t *)&r.rank[rank], sizeof(region_rank)};
        for (uint64_t turn = 7; turn < 7 + REGION_DEPTH; turn++) {
            at[count++] = (extent){region_contribution(&r, rank, turn), REGION_SLOT_BYTES};
            at[count++] = (extent){region_result(&r, rank, turn), region_part_bytes(&r)};
            CHECK(region_contribution(&r, rank, turn) ==
                  region_contribution(&r, rank, turn + REGION_DEPTH));
            CHECK(region_result(&r, rank, turn) == region_result(&r, rank, turn + REGION_DEPTH));
        }
    }
    qsort(at, (size_t)count, sizeof *at, by_address);
    CHECK(at[0].from >= (const uint8_t *)r.base);
    CHECK(at[count - 1].from + at[count - 1].bytes <= (const uint8_t *)r.base + r.bytes);
    for (int i = 0; i < count; i++) {
        CHECK_EQ((uintptr_t)at[i].from % 128, 0); /* a cache line, and what kernels like */
        if (i > 0)
            CHECK(at[i - 1].from + at[i - 1].bytes <= at[i].from);
    }
    CHECK(region_part_bytes(&r) >= 1024);
    CHECK(region_part_bytes(&r) * (size_t)ranks <= REGION_SLOT_BYTES);
    region_unmap(&r);
}

static void slots_lie_apart(void)
{
    for (int ranks = 2; ranks <= REGION_MAX_RANKS; ranks++)
        check_layout(ranks);
}

static void all_see_what_one_writes(void)
{
    region r[3];
    map_all(r, 3);
    for (int rank = 0; rank < 3; rank++) {
        memset(region_contribution(&r[rank], rank, 5), 0x10 + rank, REGION_SLOT_BYTES);
        memset(region_result(&r[rank], rank, 5), 0x20 + rank, region_part_bytes(&r[rank]));
    }
    for (int rank = 0; rank < 3; rank++)
        for (int of = 0; of < 3; of++) {
            const uint8_t *contribution = region_contribution(&r[rank], of, 5);
            const uint8_t *result = region_result(&r[rank], of, 5);
            CHECK_EQ(contribution[0], 0x10 + of);
            CHECK_EQ(contribution[REGION_SLOT_BYTES - 1], 0x10 + of);
            CHECK_EQ(result[0], 0x20 + of);
            CHECK_EQ(result[region_part_bytes(&r[rank]) - 1], 0x20 + of);
        }
    unmap_all(r, 3);
}

/* ---- life ---- */

static void nothing_is_left(void)
{
    region r[4];
    int fds = open_fds();
    CHECK_EQ(mappings_of(NAME), 0);
    map_all(r, 4);
    CHECK_EQ(mappings_of(NAME), 4);
    unmap_all(r, 4);
    unmap_all(r, 4); /* the second time does nothing */
    CHECK_EQ(mappings_of(NAME), 0);
    CHECK_EQ(open_fds(), fds);
}

static void files_that_will_not_do(void)
{
    region r = {0};
    int ends[2];
    CHECK_EQ(region_map(&r, -1, 0, 2), RC_SYSTEM);
    CHECK_EQ(errno, EBADF);
    CHECK_EQ(pipe(ends), 0);
    CHECK_EQ(region_map(&r, ends[0], 0, 2), RC_SYSTEM);
    close(ends[0]);
    close(ends[1]);
    int sealed = make_file();
    CHECK_EQ(fcntl(sealed, F_ADD_SEALS, F_SEAL_GROW), 0);
    CHECK_EQ(region_map(&r, sealed, 0, 2), RC_SYSTEM);
    close(sealed);
    CHECK(r.base == NULL);
    region_unmap(&r);
}

/* Or whoever has it could take pages away that others read. */
static void nobody_can_shrink_the_file(void)
{
    region r;
    int fd = make_file();
    CHECK_EQ(region_map(&r, fd, 0, 2), RC_OK);
    CHECK(ftruncate(fd, 0) != 0);
    CHECK_EQ(errno, EPERM);
    close(fd);
    region_unmap(&r);
}

static void a_child_does_not_have_it(void)
{
    region r[2];
    int status;
    map_all(r, 2);
    pid_t child = fork();
    if (child == 0)
        _exit(mappings_of(NAME));
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    unmap_all(r, 2);
}

/* ---- counters ---- */

static void await(region *r, uint64_t contributed, uint64_t joined, uint64_t collected)
{
    const uint64_t awaited[REGION_STAGES] = {contributed, joined, REGION_NOTHING, collected};
    region_await(r, awaited);
}

static void counters_are_of_all(void)
{
    region r[3];
    map_all(r, 3);
    for (int stage = 0; stage < REGION_STAGES; stage++) {
        region_stage s = (region_stage)stage;
        CHECK_EQ(region_done_by_all(&r[0], s), 0);
        region_advance(&r[0], s);
        region_advance(&r[0], s);
        region_advance(&r[1], s);
        CHECK_EQ(region_done_by_all(&r[2], s), 0);
        region_advance(&r[2], s);
        for (int rank = 0; rank < 3; rank++) {
            CHECK_EQ(region_done_by_all(&r[rank], s), 1);
            CHECK_EQ(region_done_by(&r[rank], 0, s), 2);
            CHECK_EQ(region_done_by(&r[rank], 2, s), 1);
        }
    }
    unmap_all(r, 3);
}

static void any_stage_satisfies(void)
{
    region r[2];
    map_all(r, 2);
    await(&r[0], REGION_NOTHING, REGION_NOTHING, REGION_NOTHING);
    CHECK(!region_satisfied(&r[1], 0));
    await(&r[0], 1, REGION_NOTHING, 2);
    CHECK(!region_satisfied(&r[0], 0));
    region_advance(&r[0], REGION_CONTRIBUTED);
    CHECK(!region_satisfied(&r[1], 0));
    region_advance(&r[1], REGION_CONTRIBUTED);
    CHECK(region_satisfied(&r[0], 0));
    CHECK(region_satisfied(&r[1], 0));
    await(&r[0], 2, REGION_NOTHING, 1);
    CHECK(!region_satisfied(&r[1], 0));
    region_advance(&r[0], REGION_COLLECTED);
    region_advance(&r[1], REGION_COLLECTED);
    CHECK(region_satisfied(&r[1], 0));
    unmap_all(r, 2);
}

static void rings_once_and_only_who_dozes(void)
{
    region r[3];
    map_all(r, 3);
    await(&r[0], 1, REGION_NOTHING, REGION_NOTHING);
    for (int rank = 0; rank < 3; rank++)
        region_advance(&r[rank], REGION_CONTRIBUTED);
    CHECK(region_satisfied(&r[1], 0));
    CHECK(!region_must_ring(&r[1], 0)); /* it polls */
    region_doze(&r[0], 1);
    CHECK(region_must_ring(&r[1], 0));
    CHECK(!region_must_ring(&r[2], 0));
    await(&r[0], 2, REGION_NOTHING, REGION_NOTHING);
    region_doze(&r[0], 1);
    CHECK(!region_must_ring(&r[1], 0)); /* not there yet */
    region_doze(&r[0], 0);
    unmap_all(r, 3);
}

/* ---- two and more at once ---- */

enum { MOST_SLEEPERS = 3, SECONDS = 20 };

typedef struct sleeper {
    region *region;
    sem_t *bells; /* [ranks] */
    uint64_t turns;
    int lost;
    pthread_t thread;
} sleeper;

static int sleep_for_bell(sem_t *bell)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += SECONDS;
    int result;
    while ((result = sem_timedwait(bell, &until)) != 0 && errno == EINTR)
        continue;
    return result;
}

static void ring_all(const sleeper *s)
{
    for (int rank = 0; rank < s->region->ranks; rank++)
        if (rank != s->region->self && region_must_ring(s->region, rank))
            sem_post(&s->bells[rank]);
}

/* Goes through the turns in step with the others, and sleeps whenever they are behind. */
static void *keep_in_step(void *arg)
{
    sleeper *s = arg;
    region *r = s->region;
    for (uint64_t turn = 0; turn < s->turns && !s->lost; turn++) {
        uint64_t *slot = (uint64_t *)region_contribution(r, r->self, turn);
        *slot = turn;
        region_advance(r, REGION_CONTRIBUTED);
        ring_all(s);
        await(r, turn + 1, REGION_NOTHING, REGION_NOTHING);
        while (!region_satisfied(r, r->self) && !s->lost) {
            region_doze(r, 1);
            if (!region_satisfied(r, r->self))
                s->lost = sleep_for_bell(&s->bells[r->self]) != 0;
            region_doze(r, 0);
        }
        for (int rank = 0; rank < r->ranks && !s->lost; rank++)
            CHECK_EQ(*(uint64_t *)region_contribution(r, rank, turn), turn);
    }
    return NULL;
}

/* One mapping for all: the thread sanitizer does not know that several are the same memory. */
static void run_in_step(int ranks, uint64_t turns)
{
    region r[MOST_SLEEPERS];
    sem_t bells[MOST_SLEEPERS];
    sleeper s[MOST_SLEEPERS];
    int fd = make_file();
    CHECK_EQ(region_map(&r[0], fd, 0, ranks), RC_OK);
    close(fd);
    for (int rank = 0; rank < ranks; rank++) {
        r[rank] = r[0];
        r[rank].self = rank;
        sem_init(&bells[rank], 0, 0);
        s[rank] = (sleeper){.region = &r[rank], .bells = bells, .turns = turns};
    }
    for (int rank = 0; rank < ranks; rank++)
        pthread_create(&s[rank].thread, NULL, keep_in_step, &s[rank]);
    for (int rank = 0; rank < ranks; rank++) {
        pthread_join(s[rank].thread, NULL);
        CHECK(!s[rank].lost);
        sem_destroy(&bells[rank]);
    }
    region_unmap(&r[0]);
}

static void no_wake_up_is_lost(void)
{
    run_in_step(2, 30000);
    run_in_step(3, 10000);
}

int main(void)
{
    static const check_test tests[] = {
        {"slots_lie_apart", slots_lie_apart},
        {"all_see_what_one_writes", all_see_what_one_writes},
        {"nothing_is_left", nothing_is_left},
        {"files_that_will_not_do", files_that_will_not_do},
        {"nobody_can_shrink_the_file", nobody_can_shrink_the_file},
        {"a_child_does_not_have_it", a_child_does_not_have_it},
        {"counters_are_of_all", counters_are_of_all},
        {"any_stage_satisfies", any_stage_satisfies},
        {"rings_once_and_only_who_dozes", rings_once_and_only_who_dozes},
        {"no_wake_up_is_lost", no_wake_up_is_lost},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
