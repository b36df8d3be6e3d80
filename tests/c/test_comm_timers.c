/* test_comm_timers.c - deadlines and idle memory. Times are some tens of milliseconds, and what is
 * checked from above is only that they are not minutes.
 */
#include "../../csrc/base/clock.h"
#include "peer.h"

static float data[4][300000];

/* ---- deadlines ---- */

static void missing_ranks_are_named(void)
{
    world *w = world_open((world_options){.size = 4});
    rc_work *works[2];
    for (int i = 0; i < 2; i++) {
        rc_call call = small_call(RC_ALLREDUCE, data[2 * i], 10);
        call.timeout_ms = i == 0 ? 80 : 30000;
        works[i] = submit(w->comms[2 * i], &call);
    }
    rc_error error;
    CHECK_EQ(outcome(works[0], &error), RC_TIMEOUT);
    CHECK_EQ(error.rank, 1);
    CHECK(strstr(error.message, "ranks 1, 3 have not called it") != NULL ||
          strstr(error.message, "ranks 1, 2, 3 have not called it") != NULL); /* 2 tells 3 only */
    CHECK(error.elapsed_s >= 0.08 && error.elapsed_s < 10.0);
    rc_work_free(works[0]);
    expect_failure(works[1], RC_TIMEOUT, "not called it"); /* rank 2 hears of it */
    rc_call late = small_call(RC_ALLREDUCE, data[1], 10);
    expect_failure(submit(w->comms[1], &late), RC_TIMEOUT, "not called it");
    world_close(w);
}

static void missing_partner_is_named(void)
{
    for (int sends = 0; sends < 2; sends++) {
        world *w = world_open((world_options){.size = 2, .segment_bytes = 4096});
        rc_call call = small_call(sends ? RC_SEND : RC_RECV, data[0], 300000);
        call.root = 1;
        call.timeout_ms = 50;
        expect_failure(submit(w->comms[0], &call), RC_TIMEOUT,
                       sends ? "no receive by rank 1 within 0.05"
                             : "no send by rank 1 within 0.05");
        world_close(w);
    }
}

/* Everyone has called, and still it is not done: no rank is to blame. */
static void slow_network_is_told_from_missing_ranks(void)
{
    stage s = stage_open((stage_options){0});
    rc_call call = small_call(RC_BROADCAST, data[0], 10);
    call.root = 1;
    call.timeout_ms = 60;
    frame_header h = control_header(FRAME_CALL, 0);
    h.fingerprint = fingerprint_of(&call);
    play(s.far[1][0], h, NULL);
    wait_until_read(&s, 1, 0, FRAME_HEADER_BYTES);
    rc_work *work = submit(s.comm, &call);
    rc_error error;
    CHECK_EQ(outcome(work, &error), RC_TIMEOUT);
    CHECK_EQ(error.rank, -1);
    CHECK(strstr(error.message, "called by every rank") != NULL);
    rc_work_free(work);
    expect_abort(s.far[1][0], RC_TIMEOUT, -1);
    stage_close(&s);
}

/* Only the works themselves have deadlines: waiting in vain changes nothing. */
static void waiting_is_no_deadline(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *work = submit(w->comms[0], &call);
    CHECK_EQ(rc_work_wait(work, 0), RC_AGAIN);
    CHECK_EQ(rc_work_wait(work, 30), RC_AGAIN);
    CHECK(rc_work_elapsed(work) == 0.0);
    rc_work *other = submit(w->comms[1], &call);
    CHECK_EQ(rc_work_wait(work, WORLD_LONG_MS), RC_OK);
    CHECK(rc_work_elapsed(work) >= 0.03);
    rc_work_free(work);
    expect_done(other);
    world_close(w);
}

static void earliest_deadline_counts(void)
{
    world *w = world_open((world_options){.size = 2});
    static const uint32_t timeouts[] = {30000, 60, 20000};
    rc_work *works[3];
    for (int i = 0; i < 3; i++) {
        rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
        call.timeout_ms = timeouts[i];
        works[i] = submit(w->comms[0], &call);
    }
    uint64_t start = clock_ns();
    for (int i = 0; i < 3; i++)
        expect_failure(works[i], RC_TIMEOUT, "rank 1 has not called it");
    CHECK(clock_seconds(start, clock_ns()) < 10.0);
    world_close(w);
}

/* A finished work's deadline must not fail anything. */
static void deadlines_end_with_the_work(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *a = submit(w->comms[0], &call), *b = submit(w->comms[1], &call);
    if (expect_done(a) && expect_done(b)) {
        for (int rank = 0; rank < 2; rank++) {
            engine_lock(w->comms[rank]->engine);
            comm_tick(&w->comms[rank]->member, clock_ns() + 2 * call.timeout_ms * CLOCK_MS);
            engine_unlock(w->comms[rank]->engine);
        }
        a = submit(w->comms[0], &call);
        b = submit(w->comms[1], &call);
        expect_done(a);
        expect_done(b);
    }
    world_close(w);
}

/* ---- idle memory ---- */

/* A group that is done with a large tensor does not sit on its buffers. Here time passes in leaps,
 * over each of which the peer's silence is forgiven. */
static void idle_buffers_go(void)
{
    enum { TICKS = 20, LEAP_S = 6 };
    world *w = world_open((world_options){.size = 2, .segment_bytes = 16384});
    for (int round = 0; round < 2; round++) {
        rc_work *works[2];
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, data[rank], 300000);
            works[rank] = submit(w->comms[rank], &call);
        }
        expect_done(works[0]);
        expect_done(works[1]);
        rc_comm *c = w->comms[0];
        engine_lock(c->engine);
        CHECK(c->buffers.idle > 0);
        uint64_t now = clock_ns() + (uint64_t)round * TICKS * LEAP_S * CLOCK_S;
        for (uint64_t tick = 0; tick < TICKS; tick++)
            comm_tick(&c->member, now + tick * LEAP_S * CLOCK_S);
        CHECK_EQ(c->buffers.idle, 0);
        engine_unlock(c->engine);
    }
    world_close(w);
}

int main(void)
{
    static const check_test tests[] = {
        {"missing_ranks_are_named", missing_ranks_are_named},
        {"missing_partner_is_named", missing_partner_is_named},
        {"slow_network_is_told_from_missing_ranks", slow_network_is_told_from_missing_ranks},
        {"waiting_is_no_deadline", waiting_is_no_deadline},
        {"earliest_deadline_counts", earliest_deadline_counts},
        {"deadlines_end_with_the_work", deadlines_end_with_the_work},
        {"idle_buffers_go", idle_buffers_go},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
