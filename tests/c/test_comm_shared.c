/* test_comm_shared.c - communicators whose ranks share memory: every way to submit and to wait,
 * with collectives over links in between, ranks that come late, and what waiting costs. How they
 * end: test_comm_shared_ends.c.
 */
#include <pthread.h>
#include <time.h>

#include "../../csrc/base/clock.h"
#include "../../csrc/comm/comm.h"
#include "vector.h"
#include "world.h"

static uint64_t seed = 3141592653589793238u;

/* ---- right results ---- */

static rc_call drawn_call(rc_collective collective, uint64_t most)
{
    rc_call call = {.collective = collective,
                    .dtype = (rc_dtype)draw_below(&seed, RC_DTYPE_COUNT),
                    .op = (rc_op)draw_below(&seed, RC_OP_COUNT)};
    if (call.dtype == RC_F32 || call.dtype == RC_F64)
        call.codec = (rc_codec)draw_below(&seed, RC_CODEC_FP16 + 1);
    call.count = 1 + draw_below(&seed, draw_below(&seed, 3) ? 300 : most);
    call.waits = (int)draw_below(&seed, 2);
    return call;
}

static void run_counts(rc_collective collective, world_options options)
{
    static const uint64_t counts[] = {1, 2, 257, 5000, CHECK_LESS(40001, 9001)};
    options.memory = 1;
    world *w = world_open(options);
    for (size_t i = 0; i < CHECK_COUNT(counts); i++) {
        rc_call call = drawn_call(collective, 1);
        call.count = counts[i];
        trial t = trial_draw(call, w->size, &seed);
        t.algorithm = options.algorithm;
        world_run(w, &t, &seed);
    }
    rc_comm_stats stats;
    uint64_t shared_by_all = 0;
    for (int rank = 0; rank < w->size; rank++) {
        rc_comm_stats_get(w->comms[rank], &stats);
        CHECK(stats.shared_bytes > 0 || collective == RC_BROADCAST); /* roots' alone */
        CHECK_EQ(stats.payload_bytes, stats.shared_bytes);           /* nothing over links */
        CHECK_EQ(stats.works, CHECK_COUNT(counts));
        shared_by_all += stats.shared_bytes;
    }
    CHECK(shared_by_all > 0);
    world_close(w);
}

static void all_worlds(void)
{
    static const int sizes[] = {2, 3, 5, 16};
    for (size_t i = 0; i < CHECK_COUNT(sizes); i++)
        for (int a = RC_DIRECT; a <= RC_ONE_SHOT; a++)
            for (int engines = 0; engines < (sizes[i] > 5 ? 1 : 2); engines++)
                for (int broadcasts = 0; broadcasts < 2; broadcasts++)
                    run_counts(broadcasts ? RC_BROADCAST : RC_ALLREDUCE,
                               (world_options){.size = sizes[i],
                                               .algorithm = (rc_algorithm)a,
                                               .engines = engines,
                                               .spin_us = engines && sizes[i] == 2 ? 50 : 0});
}

/* Collectives over links, and an algorithm that only they have, among those through memory. */
static void between_collectives_over_links(void)
{
    for (int a = RC_RING; a < RC_ALGORITHM_COUNT; a++) {
        world *w = world_open((world_options){
            .size = 3, .memory = 1, .engines = a & 1, .algorithm = (rc_algorithm)a});
        for (int i = 0; i < CHECK_LESS(60, 20); i++) {
            rc_collective kind = (rc_collective)draw_below(&seed, RC_RECV);
            trial t = trial_draw(drawn_call(i % 2 ? RC_ALLREDUCE : kind, 9000), w->size, &seed);
            t.algorithm = (rc_algorithm)a;
            world_run(w, &t, &seed);
        }
        world_close(w);
    }
}

/* The order of a sum is another one there, so integers; the numpy reference has the rest. */
static rc_call drawn_call_among_hosts(uint64_t most)
{
    rc_call call = drawn_call((rc_collective)draw_below(&seed, RC_SEND), most);
    if (call.collective == RC_ALLREDUCE || draw_below(&seed, 2)) {
        call.collective = RC_ALLREDUCE;
        call.dtype = RC_I64;
        call.codec = RC_CODEC_NONE;
    }
    return call;
}

static void among_hosts(void)
{
    static const struct {
        int size, hosts;
    } worlds[] = {{4, 2}, {6, 2}, {6, 3}, {8, 4}};
    for (size_t i = 0; i < CHECK_COUNT(worlds); i++)
        for (int engines = 0; engines < 2; engines++) {
            world *w = world_open((world_options){
                .size = worlds[i].size, .hosts = worlds[i].hosts, .memory = 1, .engines = engines});
            for (int n = 0; n < CHECK_LESS(40, 16); n++) {
                trial t = trial_draw(drawn_call_among_hosts(n % 8 ? 3000 : 60000), w->size, &seed);
                world_run(w, &t, &seed);
            }
            world_close(w);
        }
}

/* ---- many at once, each rank a thread ---- */

enum { FLOOD = 60 };

typedef struct party {
    world *world;
    trial *trials;
    int rank;
    uint64_t seed;
    uint32_t pause_us; /* at most, before each submission */
    pthread_t thread;
} party;

static void *submit_and_wait(void *arg)
{
    party *p = arg;
    rc_work *works[FLOOD] = {NULL};
    int waited = 0;
    for (int i = 0; i < FLOOD; i++) {
        rc_call call = trial_call(&p->trials[i], p->rank);
        if (p->pause_us > 0)
            usleep((useconds_t)draw_below(&p->seed, p->pause_us));
        if (trial_takes_part(&p->trials[i], p->rank))
            works[i] = submit(p->world->comms[p->rank], &call);
        for (; draw_below(&p->seed, 4) == 0 && waited < i; waited++)
            if (works[waited] != NULL)
                expect_done(works[waited]);
    }
    for (; waited < FLOOD; waited++)
        if (works[waited] != NULL)
            expect_done(works[waited]);
    return NULL;
}

static void flood(world_options options, int slow_rank)
{
    static trial trials[FLOOD];
    party parties[WORLD_MAX];
    options.memory = 1;
    options.algorithm = options.algorithm ? options.algorithm : RC_DIRECT;
    world *w = world_open(options);
    for (int i = 0; i < FLOOD; i++) {
        rc_collective kind =
            draw_below(&seed, 4) ? RC_ALLREDUCE : (rc_collective)draw_below(&seed, RC_RECV);
        rc_call call = options.hosts ? drawn_call_among_hosts(3000) : drawn_call(kind, 3000);
        trials[i] = trial_draw(call, w->size, &seed);
        trials[i].algorithm = options.algorithm;
        trial_open(&trials[i], &seed);
    }
    for (int rank = 0; rank < w->size; rank++) {
        parties[rank] = (party){.world = w,
                                .trials = trials,
                                .rank = rank,
                                .seed = seed + (uint64_t)rank,
                                .pause_us = rank == slow_rank ? 3000 : 0};
        pthread_create(&parties[rank].thread, NULL, submit_and_wait, &parties[rank]);
    }
    for (int rank = 0; rank < w->size; rank++)
        pthread_join(parties[rank].thread, NULL);
    for (int i = 0; i < FLOOD; i++) {
        for (int rank = 0; rank < w->size; rank++)
            trial_check(&trials[i], rank);
        trial_close(&trials[i]);
    }
    world_close(w);
}

static void floods(void)
{
    flood((world_options){.size = 3}, -1);
    flood((world_options){.size = 3, .engines = 1}, -1);
    flood((world_options){.size = 2, .engines = 1, .spin_us = 100}, -1);
    flood((world_options){.size = 4, .engines = 1, .algorithm = RC_ONE_SHOT}, 2);
    flood((world_options){.size = 2, .engines = 1}, 0);
    flood((world_options){.size = 4, .engines = 1, .hosts = 2}, -1);
    flood((world_options){.size = 6, .hosts = 3}, 2);
}

/* ---- large tensors ---- */

static void several_megabytes(void)
{
    static const int sizes[] = {2, 3, 5};
    for (size_t i = 0; i < CHECK_COUNT(sizes); i++)
        for (int engines = 0; engines < 2; engines++) {
            int n = sizes[i];
            vector v[WORLD_MAX];
            rc_work *works[WORLD_MAX];
            world *w = world_open((world_options){
                .size = n, .memory = 1, .algorithm = RC_DIRECT, .engines = engines});
            for (int rank = 0; rank < n; rank++) {
                v[rank] = make_vector(1500007, rank);
                rc_call call = sum_of(&v[rank]);
                works[rank] = submit(w->comms[rank], &call);
            }
            for (int rank = 0; rank < n; rank++)
                expect_done(works[rank]);
            for (int rank = 0; rank < n; rank++)
                check_sum(v[rank], n);
            world_close(w);
        }
}

/* ---- more communicators than a driver polls in its sleep ---- */

static double cpu_seconds(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

/* Of a core, while a work or, without one, nothing is waited for: the least of some looks. A busy
 * machine may charge a sleeper for more than there was, now and then; who polls uses what it can
 * get, always. */
static double least_share(rc_work *late, int ms, double enough)
{
    double least = 1.0;
    for (int look = 0; look < 5 && least >= enough; look++) {
        double before = cpu_seconds();
        if (late != NULL)
            CHECK_EQ(rc_work_wait(late, ms), RC_AGAIN);
        else
            usleep((useconds_t)ms * 1000);
        double share = (cpu_seconds() - before) / (ms * 1e-3);
        least = share < least ? share : least;
    }
    return least;
}

static void many_communicators(void)
{
    enum { WORLDS = 12, RANKS = 3, LATE_MS = 500 };
    rc_engine *engine; /* of 36 members */
    rc_comm *comms[WORLDS][RANKS];
    vector v[WORLDS][RANKS];
    rc_work *works[WORLDS][RANKS];
    world fake = {.options = {.size = RANKS, .memory = 1, .algorithm = RC_DIRECT}, .size = RANKS};
    CHECK_EQ(rc_engine_create(&engine, NULL), RC_OK);
    for (int i = 0; i < WORLDS; i++) {
        for (int rank = 0; rank < RANKS; rank++) {
            rc_comm_config config = world_config(&fake.options, rank);
            CHECK_EQ(rc_comm_create(&comms[i][rank], engine, &config), RC_OK);
            fake.comms[rank] = comms[i][rank];
        }
        for (int a = 0; a < RANKS; a++)
            for (int b = a + 1; b < RANKS; b++)
                world_join(&fake, a, b);
        world_share(&fake);
        for (int rank = 0; rank < RANKS; rank++)
            CHECK_EQ(rc_comm_start(comms[i][rank]), RC_OK);
    }
    for (int rank = 0; rank < RANKS; rank++) { /* 24 wait for the last rank */
        for (int i = 0; i < WORLDS; i++) {
            v[i][rank] = make_vector(30000, rank);
            rc_call call = sum_of(&v[i][rank]);
            works[i][rank] = submit(comms[i][rank], &call);
        }
        if (rank == RANKS - 2)
            CHECK(least_share(works[WORLDS - 1][0], LATE_MS, 0.2) < 0.2);
    }
    for (int i = 0; i < WORLDS; i++) {
        for (int rank = 0; rank < RANKS; rank++)
            expect_done(works[i][rank]);
        for (int rank = 0; rank < RANKS; rank++)
            check_sum(v[i][rank], RANKS);
    }
    for (int i = 0; i < WORLDS; i++)
        for (int rank = 0; rank < RANKS; rank++) {
            CHECK_EQ(rc_comm_close(comms[i][rank], WORLD_LONG_MS), RC_OK);
            rc_comm_free(comms[i][rank]);
        }
    rc_engine_free(engine);
}

/* ---- who drives ---- */

static void *wait_for_work(void *arg)
{
    CHECK_EQ(rc_work_wait(arg, WORLD_LONG_MS), RC_OK);
    return NULL;
}

/* One thread waits for a work over links that ends last, so it drives, asleep; what another submits
 * meanwhile, and nobody waits for, gets done. */
static void submitted_while_another_drives(void)
{
    world *w =
        world_open((world_options){.size = 2, .memory = 1, .algorithm = RC_DIRECT, .engines = 1});
    float last[2] = {0.0F, 0.0F};
    rc_call call = small_call(RC_RECV, &last[0], 1);
    call.root = 1;
    rc_work *receive = submit(w->comms[0], &call);
    pthread_t thread;
    pthread_create(&thread, NULL, wait_for_work, receive);
    usleep(60000); /* the progress thread has stepped aside */
    for (int round = 0; round < 20; round++) {
        vector v[2] = {make_vector(20000, 0), make_vector(20000, 1)};
        rc_work *works[2];
        for (int i = 0; i < 2; i++) {
            int rank = (round + i) % 2;
            call = sum_of(&v[rank]);
            works[rank] = submit(w->comms[rank], &call);
            if (i == 0 && round % 3 == 0)
                usleep(2000);
        }
        uint64_t deadline = clock_ns() + WORLD_LONG_MS * CLOCK_MS;
        for (int rank = 0; rank < 2; rank++) {
            while (rc_work_wait(works[rank], 0) == RC_AGAIN && clock_ns() < deadline)
                usleep(100);
            CHECK_EQ(rc_work_wait(works[rank], 0), RC_OK);
            rc_work_free(works[rank]);
        }
        check_sum(v[0], 2);
        check_sum(v[1], 2);
    }
    call = small_call(RC_SEND, &last[1], 1);
    call.root = 0;
    expect_done(submit(w->comms[1], &call));
    pthread_join(thread, NULL);
    rc_work_free(receive);
    world_close(w);
}

static int bell_rings(const rc_engine *e)
{
    struct epoll_event events[8];
    int rings = 0, count = epoll_wait(e->set.epoll_fd, events, (int)CHECK_COUNT(events), 0);
    for (int i = 0; i < count; i++)
        rings |= events[i].data.u64 == POLLSET_BELL;
    return rings;
}

static int never(const void *arg)
{
    (void)arg;
    return 0;
}

/* Has this thread count as the driver, asleep, or as none. */
static void pose_as_sleeper(rc_engine *e, int sleeps)
{
    engine_lock(e);
    while (sleeps && e->driver != ENGINE_REST)
        engine_drive(e, never, NULL, clock_ns() + CLOCK_MS, 0);
    e->driver = sleeps ? ENGINE_WAITER : ENGINE_REST;
    e->sleeping = sleeps;
    engine_unlock(e);
}

/* Has rank 1 appear to have done all laps of this call, the first. */
static void run_ahead(const rc_comm *c, const rc_call *call, uint64_t laps)
{
    region_rank *other = &c->shared.region.rank[1];
    for (int i = 0; i < REGION_DEPTH; i++)
        other->call[i].fingerprint = fingerprint_of(call);
    for (int stage = 0; stage < REGION_STAGES; stage++)
        atomic_store(&other->done[stage], laps);
}

/* Whoever submits leaves the rest of a long work to the driver, though it waits for nothing in
 * memory: the driver, asleep, is rung for. */
static void more_laps_than_who_submits_takes(void)
{
    enum { LAPS = 40 };
    world *w =
        world_open((world_options){.size = 2, .memory = 1, .algorithm = RC_DIRECT, .engines = 1});
    vector v = make_vector(LAPS * REGION_SLOT_BYTES / sizeof(float), 0);
    rc_call call = small_call(RC_BROADCAST, v.data, v.count);
    call.root = 1;
    run_ahead(w->comms[0], &call, LAPS);
    pose_as_sleeper(w->engines[0], 1);
    bell_rings(w->engines[0]); /* for what was before */
    rc_work *work = submit(w->comms[0], &call);
    CHECK(bell_rings(w->engines[0]));
    pose_as_sleeper(w->engines[0], 0);
    expect_done(work);
    free(v.data);
    world_close(w);
}

/* Two threads wait for works of the same rank; one drives, the other's ends first or last. */
static void several_waiters(void)
{
    enum { ROUNDS = 20, WORKS = 3 };
    world *w = world_open((world_options){
        .size = 2, .memory = 1, .algorithm = RC_DIRECT, .engines = 1, .spin_us = 20});
    for (int round = 0; round < ROUNDS; round++) {
        vector v[WORKS][2];
        rc_work *works[WORKS][2];
        pthread_t threads[WORKS];
        for (int rank = 0; rank < 2; rank++) {
            for (int i = 0; i < WORKS; i++) {
                v[i][rank] = make_vector(3000, rank);
                rc_call call = sum_of(&v[i][rank]);
                works[i][rank] = submit(w->comms[rank], &call);
                if (rank == 0)
                    pthread_create(&threads[i], NULL, wait_for_work,
                                   works[(i + round) % (i + 1)][0]);
            }
            if (rank == 0 && round % 2)
                usleep(500);
        }
        for (int i = 0; i < WORKS; i++)
            pthread_join(threads[i], NULL);
        for (int i = 0; i < WORKS; i++) {
            expect_done(works[i][0]);
            expect_done(works[i][1]);
            check_sum(v[i][0], 2);
            check_sum(v[i][1], 2);
        }
    }
    world_close(w);
}

/* ---- what waiting costs ---- */

/* A fraction of a core while a peer is late, with and without a spin; a sanitizer's own threads
 * included. */
static void waiting_is_asleep(void)
{
    enum { LATE_MS = 1000 };
    for (uint32_t spin = 0; spin <= 100; spin += 100) {
        world *w = world_open((world_options){
            .size = 2, .memory = 1, .algorithm = RC_DIRECT, .engines = 1, .spin_us = spin});
        vector v[2] = {make_vector(50000, 0), make_vector(50000, 1)};
        rc_call call = sum_of(&v[0]);
        rc_work *late = submit(w->comms[0], &call);
        double share = least_share(late, LATE_MS, 0.1);
        if (!CHECK(share < 0.1))
            fprintf(stderr, "%.3f of a core with a spin of %u us\n", share, spin);
        call = sum_of(&v[1]);
        rc_work *other = submit(w->comms[1], &call);
        expect_done(late);
        expect_done(other);
        check_sum(v[0], 2);
        check_sum(v[1], 2);
        CHECK(least_share(NULL, LATE_MS / 2, 0.1) < 0.1);
        world_close(w);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"all_worlds", all_worlds},
        {"among_hosts", among_hosts},
        {"between_collectives_over_links", between_collectives_over_links},
        {"floods", floods},
        {"several_megabytes", several_megabytes},
        {"many_communicators", many_communicators},
        {"submitted_while_another_drives", submitted_while_another_drives},
        {"more_laps_than_who_submits_takes", more_laps_than_who_submits_takes},
        {"several_waiters", several_waiters},
        {"waiting_is_asleep", waiting_is_asleep},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
