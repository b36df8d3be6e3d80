/* test_shared.c - works that go through shared memory, without links and without an engine that
 * runs: ranks take turns in random order, or are threads. Results are compared with collective.h
 * bit for bit; a rank that says it can only wait must not be told that it can go on, and some rank
 * always can.
 */
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../../csrc/base/error.h"
#include "../../csrc/coll/work.h"
#include "check.h"
#include "trial.h"

enum { MOST_WORKS = 6 };

typedef struct side {
    work_env env;
    pool buffers;
    out_frame *frames;
    shared_memory memory;
    peer_link links[TRIAL_MAX_WORLD];
    peer_link *by_rank[TRIAL_MAX_WORLD];
    rc_work *works[MOST_WORKS];
    int submitted, entered, finished;
    pthread_t thread;
} side;

static rc_engine engine; /* only its kernels are used */
static side sides[TRIAL_MAX_WORLD];
static trial trials[MOST_WORKS];
static int world_size, works;
static uint64_t seed = 88172645463325252u;

/* ---- a world without links ---- */

/* One mapping for all: the thread sanitizer does not know that several are the same memory. */
static void open_world(int n, rc_algorithm algorithm)
{
    region shared;
    int fd = memfd_create("ringcomm-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK_EQ(region_map(&shared, fd, 0, n), RC_OK);
    close(fd);
    world_size = n;
    engine.kernels = kernels_find(NULL);
    for (int rank = 0; rank < n; rank++) {
        side *s = &sides[rank];
        *s = (side){.env = {.engine = &engine,
                            .rank = rank,
                            .world_size = n,
                            .contributors = n,
                            .buffers = &s->buffers,
                            .frames = &s->frames,
                            .segment_bytes = 4096,
                            .algorithm = algorithm,
                            .links = s->by_rank}};
        s->memory.hosts = 1;
        s->memory.region = shared;
        s->memory.region.self = rank;
        for (int peer = 0; peer < n; peer++) {
            s->memory.rank_at[peer] = peer;
            s->links[peer].peer = peer;
            s->by_rank[peer] = peer == rank ? NULL : &s->links[peer];
        }
    }
}

static void close_world(void)
{
    for (int rank = 0; rank < world_size; rank++)
        work_env_destroy(&sides[rank].env);
    region_unmap(&sides[0].memory.region);
}

static rc_call drawn_call(uint64_t most)
{
    rc_call call = {.collective = draw_below(&seed, 3) ? RC_ALLREDUCE : RC_BROADCAST,
                    .dtype = (rc_dtype)draw_below(&seed, RC_DTYPE_COUNT),
                    .op = (rc_op)draw_below(&seed, RC_OP_COUNT)};
    if (call.dtype == RC_F32 || call.dtype == RC_F64)
        call.codec = (rc_codec)draw_below(&seed, RC_CODEC_FP16 + 1);
    call.count = 1 + draw_below(&seed, draw_below(&seed, 3) ? 600 : most);
    return call;
}

static void open_trials(rc_algorithm algorithm, int count, uint64_t most)
{
    works = count;
    for (int i = 0; i < works; i++) {
        trials[i] = trial_draw(drawn_call(most), world_size, &seed);
        trials[i].algorithm = algorithm;
        trial_open(&trials[i], &seed);
    }
}

static void close_trials(void)
{
    for (int i = 0; i < works; i++) {
        for (int rank = 0; rank < world_size; rank++)
            trial_check(&trials[i], rank);
        trial_close(&trials[i]);
    }
}

static void submit_next(side *s)
{
    rc_call call = trial_call(&trials[s->submitted], s->env.rank);
    rc_work *w = work_create(&engine, &call, 0);
    w->seq = (uint64_t)s->submitted;
    s->works[s->submitted++] = w;
}

/* Ends the work that has left. */
static void finish(side *s, rc_work *w)
{
    CHECK(w == s->works[s->finished++]); /* in order */
    CHECK(work_complete(w));
    work_finish(w, RC_OK, NULL);
    work_release(w); /* the communicator's reference, and the caller's */
    work_release(w);
}

static int is_idle(const side *s)
{
    return s->memory.head == NULL && s->entered == s->submitted;
}

static shared_event pump(side *s, rc_error *why)
{
    rc_work *w = NULL;
    if (s->memory.entering == NULL && s->entered < s->submitted)
        shared_enter(&s->memory, s->works[s->entered++], &s->env);
    error_clear(why);
    shared_event event = shared_pump(&s->memory, &w, why);
    if (event == SHARED_LEFT)
        finish(s, w);
    return event;
}

/* *more: there is something to do at once. */
static int pump_well(side *s, int *more)
{
    rc_error why;
    shared_event event = pump(s, &why);
    *more = event != SHARED_WAITS;
    int ok = CHECK(event != SHARED_FAILED);
    if (!ok)
        fprintf(stderr, "rank %d: %s\n", s->env.rank, why.message);
    return ok;
}

/* ---- ranks in turns ---- */

static uint64_t progress_of(const side *s)
{
    uint64_t sum = (uint64_t)s->finished;
    for (int stage = 0; stage < REGION_STAGES; stage++)
        sum += region_done_by(&s->memory.region, s->memory.region.self, (region_stage)stage);
    return sum;
}

/* One rank does one thing. Returns 1 if that took it further. */
static int step_of(side *s)
{
    int more = 0;
    if (s->submitted < works && (is_idle(s) || draw_below(&seed, 4) == 0)) {
        submit_next(s);
        return 1;
    }
    if (is_idle(s))
        return 0;
    uint64_t before = progress_of(s);
    int could = shared_can_advance(&s->memory);
    if (!pump_well(s, &more))
        return 0;
    int moved = progress_of(s) > before || more;
    if (before > 0 && could)
        CHECK(moved); /* or an engine that polls would never sleep */
    if (!more && s->memory.head != NULL)
        CHECK(!shared_can_advance(&s->memory)); /* or it would not have stopped */
    return moved;
}

static int all_finished(void)
{
    for (int rank = 0; rank < world_size; rank++)
        if (sides[rank].finished < works)
            return 0;
    return 1;
}

static void run_in_turns(void)
{
    int idle = 0;
    while (!all_finished()) {
        int first = (int)draw_below(&seed, (uint64_t)world_size), moved = 0;
        int times = draw_below(&seed, 3) ? 1 : 20; /* some ranks are much faster for a while */
        for (int i = 0; i < times; i++)
            moved |= step_of(&sides[first]);
        idle = moved ? 0 : idle + 1;
        if (!CHECK(idle < 1000))
            return;
    }
}

static void run_world(int n, rc_algorithm algorithm, uint64_t most)
{
    open_world(n, algorithm);
    open_trials(algorithm, MOST_WORKS, most);
    run_in_turns();
    close_trials();
    close_world();
}

static void any_order_of_ranks(void)
{
    static const int sizes[] = {2, 3, 5, 16};
    for (size_t i = 0; i < CHECK_COUNT(sizes); i++)
        for (int a = RC_DIRECT; a <= RC_ONE_SHOT; a++)
            for (int round = 0; round < CHECK_LESS(4, 2); round++)
                run_world(sizes[i], (rc_algorithm)a, 5000);
}

/* More laps than there are slots, so that those who are ahead must wait for the others. */
static void tensors_of_many_laps(void)
{
    run_world(2, RC_DIRECT, 300000);
    run_world(3, RC_ONE_SHOT, 300000);
    run_world(5, RC_DIRECT, 300000);
}

/* ---- ranks as threads ---- */

static void *run_side(void *arg)
{
    side *s = arg;
    int more = 0;
    while (s->submitted < works)
        submit_next(s);
    while (!is_idle(s)) {
        if (!pump_well(s, &more))
            return NULL;
        while (!is_idle(s) && !more && !shared_can_advance(&s->memory))
            sched_yield();
    }
    return NULL;
}

static void run_in_threads(int n, rc_algorithm algorithm, uint64_t most)
{
    open_world(n, algorithm);
    open_trials(algorithm, MOST_WORKS, most);
    for (int rank = 0; rank < n; rank++)
        pthread_create(&sides[rank].thread, NULL, run_side, &sides[rank]);
    for (int rank = 0; rank < n; rank++)
        pthread_join(sides[rank].thread, NULL);
    CHECK(all_finished());
    close_trials();
    close_world();
}

static void ranks_at_once(void)
{
    for (int n = 2; n <= 4; n++)
        for (int a = RC_DIRECT; a <= RC_ONE_SHOT; a++)
            run_in_threads(n, (rc_algorithm)a, n == 2 ? 200000 : 20000);
}

/* ---- what differs ---- */

static void finish_failed(void)
{
    for (int rank = 0; rank < world_size; rank++) {
        side *s = &sides[rank];
        shared_drop(&s->memory);
        CHECK(s->memory.head == NULL && s->memory.tail == NULL && s->memory.entering == NULL);
        for (; s->finished < s->submitted; s->finished++) {
            rc_error error;
            error_clear(&error);
            work_finish(s->works[s->finished], RC_MISMATCH, &error);
            work_release(s->works[s->finished]);
            work_release(s->works[s->finished]);
        }
    }
}

/* Rank 1 of 3 calls this with count elements more; the others hear of it, whoever comes last. */
static void check_difference(uint64_t elements, uint64_t seq, const char *text)
{
    open_world(3, RC_AUTO);
    works = 1;
    trials[0] = trial_draw(
        (rc_call){.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = 100 + elements}, 3, &seed);
    trials[0].algorithm = RC_ONE_SHOT;
    trial_open(&trials[0], &seed);
    trials[0].call.count = 100;
    for (int rank = 0; rank < 3; rank++) {
        trials[0].call.count = 100 + (rank == 1 ? elements : 0);
        submit_next(&sides[rank]);
        sides[rank].works[0]->seq = rank == 1 ? seq : 0;
    }
    for (int round = 0; round < 2; round++) /* first all contribute */
        for (int rank = 0; rank < 3; rank++) {
            rc_error why;
            shared_event event = pump(&sides[rank], &why);
            if (round == 0 && rank < 2) {
                CHECK_EQ(event, SHARED_WAITS);
                continue;
            }
            CHECK_EQ(event, SHARED_FAILED);
            CHECK_EQ(why.code, RC_MISMATCH);
            CHECK_EQ(why.rank, rank == 1 ? 0 : 1);
            if (!CHECK(strstr(why.message, rank == 1 ? "rank 1 called" : text) != NULL))
                fprintf(stderr, "the error is: %s\n", why.message);
        }
    finish_failed();
    trial_close(&trials[0]);
    close_world();
}

static void who_differs_is_named(void)
{
    check_difference(1, 0, "rank 1 called allreduce(f32[101]");
    check_difference(100000, 0, "rank 1 called allreduce(f32[100100]");
}

static void who_has_called_is_known(void)
{
    rc_error why;
    open_world(3, RC_DIRECT);
    open_trials(RC_DIRECT, 2, 600);
    for (int i = 0; i < 2; i++) {
        submit_next(&sides[0]);
        submit_next(&sides[2]);
    }
    CHECK_EQ(pump(&sides[2], &why), SHARED_WAITS);
    CHECK_EQ(pump(&sides[0], &why), SHARED_WAITS);
    shared_note_calls(&sides[0].memory);
    CHECK_EQ(sides[0].links[1].called, 0);
    CHECK_EQ(sides[0].links[2].called, 1);
    sides[0].links[2].called = 7; /* by a link: never less than what is known already */
    shared_note_calls(&sides[0].memory);
    CHECK_EQ(sides[0].links[2].called, 7);
    finish_failed();
    for (int i = 0; i < works; i++)
        trial_close(&trials[i]);
    close_world();
}

int main(void)
{
    static const check_test tests[] = {
        {"any_order_of_ranks", any_order_of_ranks},
        {"tensors_of_many_laps", tensors_of_many_laps},
        {"ranks_at_once", ranks_at_once},
        {"who_differs_is_named", who_differs_is_named},
        {"who_has_called_is_known", who_has_called_is_known},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
