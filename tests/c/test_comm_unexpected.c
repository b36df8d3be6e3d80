/* test_comm_unexpected.c - frames that come before their receive or collective is called: tens of
 * thousands of them, in any order, take time in proportion to their number, and each finds the call
 * that it is for. */
#include <math.h>
#include <time.h>

#include "world.h"

/* One-byte sends; with segments of 1 MiB, MOST of them are within the credit. */
enum {
    FEW = CHECK_LESS(5000, 500),
    MOST = CHECK_LESS(40000, 4000),
    TIMES = MOST / FEW,
    SEGMENT = 1 << 20
};

static uint8_t out[MOST], in[MOST];
static rc_work *sends[MOST], *receives[MOST];

static void shuffle(uint32_t *order, uint32_t count, uint64_t seed)
{
    for (uint32_t i = 0; i < count; i++)
        order[i] = i;
    for (uint32_t i = count - 1; i > 0; i--) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407;
        uint32_t other = (uint32_t)((seed >> 33) % (i + 1)), kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
}

static rc_work *start(const world *w, int rank, rc_collective kind, int peer, uint32_t tag,
                      uint8_t *data)
{
    rc_call call = small_call(kind, data, 1);
    call.dtype = RC_U8;
    call.root = peer;
    call.tag = tag;
    return submit(w->comms[rank], &call);
}

/* Waits until rank 0 has so many frames, or has failed. */
static void wait_for_frames(const world *w, uint64_t frames)
{
    rc_lane_stats lane = {0};
    rc_error error;
    do {
        usleep(1000);
        rc_comm_lane_stats(w->comms[0], &lane, 1);
        rc_comm_error(w->comms[0], &error);
    } while (lane.received_frames < frames && error.code == RC_OK);
}

static double cpu_seconds(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

/* Every tag once, sent in one order and received in another. The CPU seconds that it took. */
typedef rc_work *receive_fn(const world *w, uint32_t tag, uint8_t *data);

static rc_work *receive_from_rank(const world *w, uint32_t tag, uint8_t *data)
{
    return start(w, 0, RC_RECV, 1, tag, data);
}

static rc_work *receive_from_any(const world *w, uint32_t tag, uint8_t *data)
{
    return start(w, 0, RC_RECV, RC_ANY_SOURCE, tag, data);
}

static void receive_all(const world *w, receive_fn *receive, uint32_t count, uint64_t seed)
{
    static uint32_t order[MOST];
    shuffle(order, count, seed);
    for (uint32_t i = 0; i < count; i++)
        receives[order[i]] = receive(w, order[i], &in[order[i]]);
}

static void send_all(const world *w, uint32_t count, uint64_t seed)
{
    static uint32_t order[MOST];
    shuffle(order, count, seed);
    for (uint32_t i = 0; i < count; i++) {
        out[order[i]] = (uint8_t)(order[i] * 7);
        sends[order[i]] = start(w, 1, RC_SEND, 0, order[i], &out[order[i]]);
    }
}

static void settle(uint32_t count)
{
    for (uint32_t tag = 0; tag < count; tag++)
        if (!expect_done(sends[tag]) || !expect_done(receives[tag]) ||
            !CHECK_EQ(in[tag], (uint8_t)(tag * 7)))
            return;
}

static double sent_before(receive_fn *receive, uint32_t count)
{
    world *w = world_open((world_options){.size = 2, .segment_bytes = SEGMENT});
    double start = cpu_seconds();
    send_all(w, count, 1);
    wait_for_frames(w, count);
    receive_all(w, receive, count, 2);
    settle(count);
    double took = cpu_seconds() - start;
    world_close(w);
    return took;
}

static double received_before(receive_fn *receive, uint32_t count)
{
    world *w = world_open((world_options){.size = 2, .segment_bytes = SEGMENT});
    double start = cpu_seconds();
    receive_all(w, receive, count, 2);
    send_all(w, count, 1);
    settle(count);
    double took = cpu_seconds() - start;
    world_close(w);
    return took;
}

/* With little credit most sends are held until their receives are known. */
static double sends_held(receive_fn *receive, uint32_t count)
{
    world *w = world_open((world_options){.size = 2, .segment_bytes = 4096});
    double start = cpu_seconds();
    send_all(w, count, 1);
    receive_all(w, receive, count, 2);
    settle(count);
    double took = cpu_seconds() - start;
    world_close(w);
    return took;
}

/* Most messages take at most so many times as long as few. A busy machine switches threads more
 * often, which costs CPU time as well, so the least of some runs counts. */
static void expect_within(double times, double (*run)(receive_fn *, uint32_t), receive_fn *receive,
                          uint32_t count, uint32_t other)
{
    double few = INFINITY, most = INFINITY;
    for (int tries = 0; tries < 5 && !(most < few * times); tries++) {
        few = fmin(few, run(receive, count));
        most = fmin(most, run(receive, other));
    }
    if (!CHECK(most < few * times))
        fprintf(stderr, "%u messages took %.3f s, %u took %.3f s\n", count, few, other, most);
}

/* Eight times as many take eight times as long, and what a larger table costs; quadratic code takes
 * 64 times as long. */
static void expect_linear(double (*run)(receive_fn *, uint32_t), receive_fn *receive)
{
    expect_within(TIMES * 3, run, receive, FEW, MOST);
}

static void many_sends_before_their_receives(void)
{
    expect_linear(sent_before, receive_from_rank);
}

static void many_receives_before_their_sends(void)
{
    expect_linear(received_before, receive_from_rank);
}

static void many_sends_over_the_credit(void)
{
    expect_linear(sends_held, receive_from_rank);
}

static void many_receives_from_any_source(void)
{
    expect_linear(received_before, receive_from_any);
    expect_linear(sent_before, receive_from_any);
}

/* What goes on bit by bit is found among what does, not among all that is in flight. */
static double reduce_beside(receive_fn *receive, uint32_t count)
{
    enum { ROUNDS = 10, ELEMS = CHECK_LESS(200000, 50000) };
    static float values[2][ELEMS];
    world *w = world_open((world_options){.size = 2, .segment_bytes = 4096});
    receive_all(w, receive, count, 2);
    double start = cpu_seconds();
    for (int i = 0; i < ROUNDS; i++) {
        rc_work *works[2];
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, values[rank], ELEMS);
            call.codec = RC_CODEC_INT4;
            works[rank] = submit(w->comms[rank], &call);
        }
        expect_done(works[0]);
        expect_done(works[1]);
    }
    double took = cpu_seconds() - start;
    send_all(w, count, 1);
    settle(count);
    world_close(w);
    return took;
}

static void many_receives_beside_a_collective(void)
{
    expect_within(4, reduce_beside, receive_from_rank, 1, MOST);
}

/* Calls that wait in line for shared memory are announced, here before this rank has called them;
 * nothing is kept of what it has compared. */
static void calls_that_go_through_memory(void)
{
    enum { CALLS = 5 };
    float values[2][CALLS] = {{0.0F}};
    rc_work *works[2][CALLS];
    world *w = world_open((world_options){.size = 2,
                                          .memory = 1,
                                          .algorithm = RC_DIRECT,
                                          .engines = 1,
                                          .heartbeat_ms = 60000, /* deadlines come before */
                                          .peer_timeout_ms = 120000});
    for (int rank = 1; rank >= 0; rank--) {
        for (int i = 0; i < CALLS; i++) {
            rc_call call = small_call(RC_ALLREDUCE, &values[rank][i], 1);
            works[rank][i] = submit(w->comms[rank], &call);
        }
        if (rank == 1)
            wait_for_frames(w, CALLS - 1);
    }
    for (int i = 0; i < CALLS; i++) {
        expect_done(works[0][i]);
        expect_done(works[1][i]);
    }
    engine_lock(w->engines[0]);
    CHECK_EQ(w->comms[0]->early_calls, 0);
    engine_unlock(w->engines[0]);
    world_close(w);
}

int main(void)
{
    static const check_test tests[] = {
        {"many_sends_before_their_receives", many_sends_before_their_receives},
        {"many_receives_before_their_sends", many_receives_before_their_sends},
        {"many_sends_over_the_credit", many_sends_over_the_credit},
        {"many_receives_beside_a_collective", many_receives_beside_a_collective},
        {"many_receives_from_any_source", many_receives_from_any_source},
        {"calls_that_go_through_memory", calls_that_go_through_memory},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
