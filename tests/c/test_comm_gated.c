/* test_comm_gated.c - works with a gate over real links: sources that come late and bit by bit,
 * peers that run ahead, failures meanwhile. */
#include "world.h"

enum { PARTS = 24, LEAST = 4096, ENOUGH = 65536 };

static uint64_t seed = 88172645463325252u;

/* Of one rank: what is still to be shown. */
typedef struct source {
    uint8_t *at;
    order_stretch parts[PARTS];
    int count;
} source;

static void hide(source *s, const trial *t, int rank)
{
    size_t size = dtype_bytes(t->call.dtype);
    uint64_t count = t->call.count;
    *s = (source){.at = t->in_place ? t->dst[rank] : t->src[rank], .count = PARTS};
    memset(s->at, 0xff, count * size);
    for (uint64_t i = 0; i < PARTS; i++)
        s->parts[i] = (order_stretch){i * count / PARTS, (i + 1) * count / PARTS};
    for (int i = 0; i < PARTS; i++)
        s->parts[i].elems -= s->parts[i].start;
}

static void show_one(source *s, const trial *t, int rank, rc_comm *comm, rc_work *work)
{
    int which = (int)draw_below(&seed, (uint64_t)s->count);
    order_stretch one = s->parts[which];
    size_t size = dtype_bytes(t->call.dtype);
    s->parts[which] = s->parts[--s->count];
    memcpy(s->at + one.start * size, t->before[rank] + one.start * size, one.elems * size);
    engine_lock(comm->engine);
    comm_show(comm, work, one);
    engine_unlock(comm->engine);
}

static rc_work *submit_gated(rc_comm *comm, const rc_call *call)
{
    rc_work *work = NULL;
    CHECK_EQ(rc_check(comm, call, NULL), RC_OK);
    CHECK_EQ(comm_submit(comm, call, gate_create(PARTS, LEAST, ENOUGH), &work), RC_OK);
    return work;
}

/* late: this rank's source comes when all others have shown theirs; -1: all come side by side. */
static void run_gated(world *w, trial *t, int late)
{
    source sources[WORLD_MAX];
    rc_work *works[WORLD_MAX];
    trial_open(t, &seed);
    for (int rank = 0; rank < w->size; rank++) {
        rc_call call = trial_call(t, rank);
        hide(&sources[rank], t, rank);
        works[rank] = submit_gated(w->comms[rank], &call);
    }
    for (int left = w->size * PARTS; left > 0; left--) {
        int rank = (int)draw_below(&seed, (uint64_t)w->size);
        while (sources[rank].count == 0 || (rank == late && left > PARTS))
            rank = (rank + 1) % w->size;
        if (left == PARTS && late >= 0)
            usleep(2000); /* what others could send has come */
        show_one(&sources[rank], t, rank, w->comms[rank], works[rank]);
        if (left % 16 == 0)
            usleep(200);
    }
    for (int rank = 0; rank < w->size; rank++)
        if (expect_done(works[rank]))
            trial_check(t, rank);
    trial_close(t);
}

static void sources_that_come_late(void)
{
    static const rc_algorithm all[] = {RC_RING, RC_DIRECT, RC_ONE_SHOT};
    for (size_t a = 0; a < CHECK_COUNT(all); a++)
        for (int n = 2; n <= 4; n++) {
            world *w = world_open((world_options){.size = n,
                                                  .engines = n % 2,
                                                  .lanes = 2,
                                                  .algorithm = all[a],
                                                  .segment_bytes = 32768});
            for (int late = -1; late < n; late++)
                for (int codec = 0; codec <= RC_CODEC_FP16; codec += 1 + (late >= 0)) {
                    rc_call call = {.collective = RC_ALLREDUCE,
                                    .dtype = RC_F32,
                                    .codec = (rc_codec)codec,
                                    .op = late >= 0 ? RC_SUM : RC_AVG,
                                    .count = 40000 + (uint64_t)codec};
                    trial t = trial_draw(call, n, &seed);
                    t.algorithm = all[a];
                    run_gated(w, &t, late);
                }
            world_close(w);
        }
}

/* What ranks call after it goes past a work that waits for its source. */
static void others_go_past_it(void)
{
    static float data[2][100000], small[2][4];
    rc_work *works[2];
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_ALLREDUCE, data[0], 100000);
    for (int rank = 0; rank < 2; rank++) {
        call.src = call.dst = data[rank];
        works[rank] = submit_gated(w->comms[rank], &call);
    }
    for (int round = 0; round < 10; round++) {
        rc_work *brief[2];
        for (int rank = 0; rank < 2; rank++) {
            rc_call next = small_call(RC_ALLREDUCE, small[rank], 4);
            brief[rank] = submit(w->comms[rank], &next);
        }
        expect_done(brief[0]);
        expect_done(brief[1]);
    }
    for (int rank = 0; rank < 2; rank++) {
        CHECK_EQ(rc_work_wait(works[rank], 0), RC_AGAIN);
        engine_lock(w->comms[rank]->engine);
        comm_show(w->comms[rank], works[rank], (order_stretch){0, 100000});
        engine_unlock(w->comms[rank]->engine);
    }
    expect_done(works[0]);
    expect_done(works[1]);
    world_close(w);
}

enum end { END_ABORT, END_CLOSE, END_TIMEOUT, END_COUNT };

/* All of it was shown on one rank, some on the others; then the end comes. */
static void an_end_behind_a_gate(void)
{
    static float data[3][100000];
    for (int a = RC_RING; a <= RC_ONE_SHOT; a++)
        for (int end = 0; end < END_COUNT; end++) {
            rc_work *works[3];
            rc_error error;
            world *w = world_open((world_options){.size = 3, .algorithm = (rc_algorithm)a});
            rc_call call = small_call(RC_ALLREDUCE, data[0], 100000);
            call.timeout_ms = end == END_TIMEOUT ? 60 : 30000;
            for (int rank = 0; rank < 3; rank++) {
                call.src = call.dst = data[rank];
                works[rank] = submit_gated(w->comms[rank], &call);
                engine_lock(w->comms[rank]->engine);
                comm_show(w->comms[rank], works[rank],
                          (order_stretch){0, rank == 0 ? 100000 : 40000});
                engine_unlock(w->comms[rank]->engine);
            }
            usleep(2000);
            if (end == END_ABORT)
                rc_comm_abort(w->comms[1], "it is enough");
            if (end == END_CLOSE)
                rc_comm_close(w->comms[1], 100);
            for (int rank = 0; rank < 3; rank++) {
                rc_result result = outcome(works[rank], &error);
                CHECK_EQ(result, end == END_TIMEOUT ? RC_TIMEOUT : RC_ABORTED);
                engine_lock(w->comms[rank]->engine);
                comm_show(w->comms[rank], works[rank], (order_stretch){40000, 60000});
                engine_unlock(w->comms[rank]->engine); /* who shows it hears of that later */
                rc_work_free(works[rank]);
            }
            world_close(w);
        }
}

int main(void)
{
    static const check_test tests[] = {
        {"sources_that_come_late", sources_that_come_late},
        {"others_go_past_it", others_go_past_it},
        {"an_end_behind_a_gate", an_end_behind_a_gate},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
