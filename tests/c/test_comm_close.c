/* test_comm_close.c - the ends of a communicator: goodbyes, aborts, mismatches, peers that vanish,
 * closing with works in flight, fork. Every rank must hear of a failure, with the same code and
 * naming the same culprit, and nothing may be left behind.
 */
#include <poll.h>
#include <pthread.h>
#include <sys/wait.h>

#include "../../csrc/base/clock.h"
#include "peer.h"

enum { BULK = 300000 };

static float data[4][BULK];
static uint64_t seed = 99u;

static rc_work *submit_kind(world *w, int rank, rc_collective kind, uint64_t count)
{
    rc_call call = small_call(kind, data[rank], count);
    return submit(w->comms[rank], &call);
}

/* The work must fail with this code, against this rank; frees it. */
static void expect_blame(rc_work *work, rc_result code, int rank, const char *text)
{
    rc_error error;
    CHECK_EQ(outcome(work, &error), code);
    CHECK_EQ(error.rank, rank);
    if (!CHECK(strstr(error.message, text) != NULL))
        fprintf(stderr, "the error is: %s\n", error.message);
    rc_work_free(work);
}

/* ---- leaving in order ---- */

static void leaving_rank_is_missed_when_needed(void)
{
    world *w = world_open((world_options){.size = 3, .lanes = 2});
    rc_work *works[3];
    for (int rank = 0; rank < 3; rank++)
        works[rank] = submit_kind(w, rank, RC_ALLREDUCE, 1000);
    for (int rank = 0; rank < 3; rank++)
        expect_done(works[rank]);
    rc_work *pending = submit_kind(w, 0, RC_ALLREDUCE, 1000);
    CHECK_EQ(rc_comm_close(w->comms[1], WORLD_LONG_MS), RC_OK);
    expect_blame(pending, RC_PEER_LOST, 1, "rank 1 has shut down without taking part in it");
    expect_blame(submit_kind(w, 2, RC_BARRIER, 0), RC_PEER_LOST, 1, "rank 1 has shut down");
    world_close(w);
}

/* No work in flight, all leave one after the other: nobody sees a failure. */
static void leaving_in_turn_fails_nobody(void)
{
    world *w = world_open((world_options){.size = 4, .engines = 1, .lanes = 2});
    for (int round = 0; round < 3; round++) {
        rc_work *works[4];
        for (int rank = 0; rank < 4; rank++)
            works[rank] = submit_kind(w, rank, RC_ALLREDUCE, 5000);
        for (int rank = 0; rank < 4; rank++)
            expect_done(works[rank]);
    }
    for (int rank = 0; rank < 4; rank++) {
        CHECK_EQ(rc_comm_close(w->comms[rank], WORLD_LONG_MS), RC_OK);
        for (int other = rank + 1; other < 4; other++) {
            rc_error error;
            rc_comm_error(w->comms[other], &error);
            CHECK_EQ(error.code, RC_OK);
        }
    }
    world_close(w);
}

/* What a rank sent before it left is still there to be received. */
static void last_words_are_received(void)
{
    for (int p2p = 0; p2p < 2; p2p++) {
        world *w = world_open((world_options){.size = 2, .lanes = 2, .segment_bytes = 4096});
        rc_call call = small_call(p2p ? RC_SEND : RC_BROADCAST, data[1], 5000);
        for (int i = 0; i < 5000; i++)
            data[1][i] = (float)i;
        memset(data[0], 0, sizeof data[0]);
        call.root = !p2p;
        expect_done(submit(w->comms[1], &call));
        CHECK_EQ(rc_comm_close(w->comms[1], WORLD_LONG_MS), RC_OK);
        usleep(10000);
        rc_call receive = small_call(p2p ? RC_RECV : RC_BROADCAST, data[0], 5000);
        receive.root = 1;
        expect_done(submit(w->comms[0], &receive));
        CHECK(memcmp(data[0], data[1], 5000 * sizeof(float)) == 0);
        expect_blame(submit(w->comms[0], &receive), RC_PEER_LOST, 1, "rank 1 has shut down");
        world_close(w);
    }
}

/* A receive half of whose data came before the goodbye will never be whole. */
static void half_a_message_is_no_message(void)
{
    stage s = stage_open((stage_options){0});
    rc_call call = small_call(RC_RECV, data[0], 1500);
    call.root = 1;
    frame_header h = data_header(&call, 0);
    h.length = PEER_SEGMENT;
    play(s.far[1][0], h, data[1]);
    play(s.far[1][0], control_header(FRAME_GOODBYE, 0), NULL);
    usleep(10000);
    expect_blame(submit(s.comm, &call), RC_PEER_LOST, 1, "rank 1 has shut down");
    stage_close(&s);
}

/* The caller lets go of its works while they are in flight; the goodbye ends them. */
static void goodbye_ends_works_nobody_holds(void)
{
    world *w = world_open((world_options){.size = 2});
    for (int i = 0; i < 5; i++)
        rc_work_free(submit_kind(w, 0, RC_ALLREDUCE, 100));
    CHECK_EQ(rc_comm_close(w->comms[1], WORLD_LONG_MS), RC_OK);
    expect_blame(submit_kind(w, 0, RC_ALLREDUCE, 100), RC_PEER_LOST, 1, "rank 1 has shut down");
    world_close(w);
}

static void goodbye_on_one_lane_is_not_all(void)
{
    stage s = stage_open((stage_options){.lanes = 2});
    rc_call call = small_call(RC_RECV, data[0], 10);
    call.root = 1;
    rc_work *work = submit(s.comm, &call);
    play(s.far[1][0], control_header(FRAME_GOODBYE, 0), NULL);
    close(s.far[1][0]);
    s.far[1][0] = -1;
    CHECK_EQ(rc_work_wait(work, 50), RC_AGAIN);
    frame_header h = data_header(&call, 0);
    h.length = 40;
    play(s.far[1][1], h, data[1]);
    expect_done(work);
    stage_close(&s);
}

/* ---- leaving without a word ---- */

static void vanished_peer_is_named_by_everyone(void)
{
    stage s = stage_open((stage_options){.world_size = 3});
    rc_call call = small_call(RC_ALLREDUCE, data[0], BULK);
    rc_work *work = submit(s.comm, &call);
    usleep(10000);
    hang_up(&s, 2);
    expect_blame(work, RC_PEER_LOST, 2, "rank 2 is lost: the connection");
    expect_abort(s.far[1][0], RC_PEER_LOST, 2);
    stage_close(&s);
}

static void vanished_peer_is_seen_when_idle(void)
{
    stage s = stage_open((stage_options){0});
    rc_error error = {.code = RC_OK};
    uint64_t start = clock_ns();
    hang_up(&s, 1);
    while (error.code == RC_OK && clock_seconds(start, clock_ns()) < 10.0) {
        usleep(1000);
        rc_comm_error(s.comm, &error);
    }
    CHECK_EQ(error.code, RC_PEER_LOST);
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    expect_blame(submit(s.comm, &call), RC_PEER_LOST, 1, "without a goodbye");
    CHECK_EQ(rc_comm_close(s.comm, WORLD_LONG_MS), RC_OK);
    stage_close(&s);
}

/* One rank of four is freed in the middle of everything, at any moment. */
static void any_moment_is_survived(void)
{
    for (int trial = 0; trial < 12; trial++) {
        world *w = world_open((world_options){
            .size = 4, .engines = trial % 2, .lanes = 1 + trial % 3, .segment_bytes = 4096});
        rc_work *works[4][8];
        for (int i = 0; i < 8; i++)
            for (int rank = 0; rank < 4; rank++) {
                rc_call call = small_call(i % 2 ? RC_ALLREDUCE : RC_BROADCAST,
                                          data[rank] + i * (BULK / 8), BULK / 8);
                works[rank][i] = submit(w->comms[rank], &call);
            }
        usleep((useconds_t)draw_below(&seed, 4000));
        world_free_rank(w, 2);
        for (int i = 0; i < 8; i++)
            for (int rank = 0; rank < 4; rank++) {
                rc_error error;
                rc_result result = outcome(works[rank][i], &error);
                CHECK(result == RC_OK || result == RC_ABORTED || result == RC_PEER_LOST);
                if (!CHECK(result == RC_OK || error.rank == 2))
                    fprintf(stderr, "rank %d: %s\n", rank, error.message);
                rc_work_free(works[rank][i]);
            }
        world_close(w);
    }
}

/* ---- aborts ---- */

static void abort_reaches_everyone(void)
{
    for (int bulk = 0; bulk < 2; bulk++) {
        world *w = world_open((world_options){.size = 3, .lanes = 2, .segment_bytes = 4096});
        rc_work *works[3] = {NULL};
        for (int rank = bulk ? 0 : 1; rank < 3; rank++)
            works[rank] = submit_kind(w, rank, RC_ALLREDUCE, bulk ? BULK : 10);
        rc_comm_abort(w->comms[0], "the loss is NaN");
        for (int rank = 0; rank < 3; rank++)
            if (works[rank] != NULL)
                expect_blame(works[rank], RC_ABORTED, 0, "rank 0 aborted: the loss is NaN");
        for (int rank = 0; rank < 3; rank++)
            expect_blame(submit_kind(w, rank, RC_BARRIER, 0), RC_ABORTED, 0, "the loss is NaN");
        rc_comm_abort(w->comms[1], "too late to matter");
        expect_blame(submit_kind(w, 1, RC_BARRIER, 0), RC_ABORTED, 0, "the loss is NaN");
        world_close(w);
    }
}

/* The end of one lane can be seen before what came on another: each carries the reason. */
static void every_lane_ends_with_the_reason(void)
{
    stage s = stage_open((stage_options){.world_size = 3, .lanes = 3});
    rc_comm_abort(s.comm, "the loss is NaN");
    for (int peer = 1; peer < 3; peer++)
        for (int i = 0; i < 3; i++)
            expect_abort(s.far[peer][i], RC_ABORTED, 0);
    stage_close(&s);
}

static void long_reasons_are_cut(void)
{
    char reason[2000];
    memset(reason, 'z', sizeof reason);
    reason[sizeof reason - 1] = '\0';
    world *w = world_open((world_options){.size = 2});
    rc_comm_abort(w->comms[0], reason);
    expect_blame(submit_kind(w, 0, RC_BARRIER, 0), RC_ABORTED, 0, "zzzzzzzz");
    expect_blame(submit_kind(w, 1, RC_BARRIER, 0), RC_ABORTED, 0, "zzzzzzzz");
    world_close(w);
}

/* ---- mismatches ---- */

static void both_sides_see(int size, rc_call ours, rc_call theirs, const char *here,
                           const char *there)
{
    world *w = world_open((world_options){.size = size});
    rc_work *works[4];
    for (int rank = 0; rank < size; rank++)
        works[rank] = submit(w->comms[rank], rank == 1 ? &theirs : &ours);
    for (int rank = 0; rank < size; rank++) {
        rc_error error;
        if (outcome(works[rank], &error) == RC_OK) { /* over before: the next call tells */
            rc_work_free(works[rank]);
            works[rank] = submit_kind(w, rank, RC_BARRIER, 0);
            outcome(works[rank], &error);
        }
        CHECK_EQ(error.code, RC_MISMATCH);
        CHECK(error.rank != rank);
        if (!CHECK(strstr(error.message, here) != NULL && strstr(error.message, there) != NULL))
            fprintf(stderr, "rank %d: %s\n", rank, error.message);
        rc_work_free(works[rank]);
    }
    world_close(w);
}

static void mismatches_are_seen_on_both_sides(void)
{
    rc_call ours = small_call(RC_ALLREDUCE, data[0], 1000), theirs;
    for (int size = 2; size <= 4; size++) {
        theirs = ours;
        theirs.count = 1001;
        both_sides_see(size, ours, theirs, "allreduce(f32[1000], op=sum)",
                       "allreduce(f32[1001], op=sum)");
        theirs.count = 0;
        both_sides_see(size, ours, theirs, "f32[1000]", "f32[0]");
        theirs = ours;
        theirs.op = RC_MAX;
        both_sides_see(size, ours, theirs, "op=sum", "op=max");
        theirs = ours;
        theirs.dtype = RC_I32;
        both_sides_see(size, ours, theirs, "f32[1000]", "i32[1000]");
        theirs = ours;
        theirs.codec = RC_CODEC_BF16;
        both_sides_see(size, ours, theirs, "op=sum)", "compression=bf16");
        theirs = ours;
        theirs.collective = RC_BROADCAST;
        both_sides_see(size, ours, theirs, "allreduce(", "broadcast(");
        rc_call from0 = theirs;
        theirs.root = 1;
        both_sides_see(size, from0, theirs, "root=0", "root=1");
        theirs = small_call(RC_BARRIER, NULL, 0);
        both_sides_see(size, ours, theirs, "allreduce(", "barrier()");
    }
}

static void sends_and_receives_must_match(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call send = small_call(RC_SEND, data[0], 10), receive = small_call(RC_RECV, data[1], 11);
    send.root = 1;
    expect_done(submit(w->comms[0], &send));
    expect_blame(
        submit(w->comms[1], &receive), RC_MISMATCH, 0,
        "send/recv #0: rank 1 called send/recv(f32[11]), rank 0 called send/recv(f32[10])");
    receive.root = 1;
    expect_blame(submit(w->comms[0], &receive), RC_MISMATCH, 1, "send/recv(f32[11])");
    world_close(w);
}

/* ---- closing ---- */

static void close_ends_works_in_flight(void)
{
    world *w = world_open((world_options){.size = 3, .engines = 1});
    rc_work *works[2];
    for (int rank = 0; rank < 2; rank++)
        works[rank] = submit_kind(w, rank, RC_ALLREDUCE, BULK);
    usleep(5000);
    uint64_t start = clock_ns();
    CHECK_EQ(rc_comm_close(w->comms[0], WORLD_LONG_MS), RC_OK);
    CHECK(clock_ns() - start < WORLD_LONG_MS / 2 * CLOCK_MS);
    memset(data[0], 0, sizeof data[0]); /* the caller's again */
    const char *text = "rank 0 closed its communicator with collectives in flight";
    for (int rank = 0; rank < 2; rank++)
        expect_blame(works[rank], RC_ABORTED, 0, text);
    world_close(w);
}

static void close_does_not_wait_for_ever(void)
{
    stage s = stage_open((stage_options){0}); /* whose peer reads nothing */
    uint64_t start = clock_ns();
    CHECK_EQ(rc_comm_close(s.comm, 50), RC_TIMEOUT);
    double took = clock_seconds(start, clock_ns());
    CHECK(took >= 0.05 && took < 10.0);
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    CHECK(watch_frame(s.far[1][0], &h, payload)); /* and yet it was said */
    CHECK_EQ(h.type, FRAME_GOODBYE);
    CHECK(!watch_frame(s.far[1][0], &h, payload));
    stage_close(&s);
}

static void closed_takes_no_calls(void)
{
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *work;
    rc_error error;
    CHECK_EQ(rc_comm_close(w->comms[0], WORLD_LONG_MS), RC_OK);
    CHECK_EQ(rc_comm_close(w->comms[0], WORLD_LONG_MS), RC_OK);
    CHECK_EQ(rc_submit(w->comms[0], &call, &work, &error), RC_INVALID_STATE);
    CHECK(work == NULL);
    CHECK(strstr(error.message, "closed") != NULL);
    rc_comm_abort(w->comms[0], "nothing happens");
    rc_comm_error(w->comms[0], &error);
    CHECK_EQ(error.code, RC_INVALID_STATE);
    world_close(w);
}

typedef struct caller {
    rc_comm *comm;
    pthread_t thread;
} caller;

/* Submits until it is refused; every work that was taken must end. */
static void *keep_calling(void *arg)
{
    caller *c = arg;
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    rc_result result;
    do {
        rc_work *work;
        result = rc_submit(c->comm, &call, &work, NULL);
        if (result == RC_OK) {
            rc_error error;
            CHECK(outcome(work, &error) != RC_OK); /* nobody answers */
            rc_work_free(work);
        }
    } while (result == RC_OK);
    CHECK_EQ(result, RC_INVALID_STATE);
    return NULL;
}

/* A close that has to wait for its peer leaves other threads time to submit. */
static void calls_during_close_end(void)
{
    for (int trial = 0; trial < 5; trial++) {
        stage s = stage_open((stage_options){0});
        caller c = {.comm = s.comm};
        pthread_create(&c.thread, NULL, keep_calling, &c);
        usleep((useconds_t)draw_below(&seed, 3000));
        rc_comm_close(s.comm, 30);
        pthread_join(c.thread, NULL);
        stage_close(&s);
    }
}

/* A quiet communicator, whose goodbye nobody reads, is called while it closes. */
static void *close_slowly(void *arg)
{
    rc_comm_close(arg, 300);
    return NULL;
}

/* Closing has begun: its goodbye is on the way. */
static void await_goodbye(const stage *s)
{
    struct pollfd far = {.fd = s->far[1][0], .events = POLLIN};
    CHECK_EQ(poll(&far, 1, 20000), 1);
}

static void call_during_goodbye_ends(void)
{
    stage s = stage_open((stage_options){0});
    pthread_t thread;
    pthread_create(&thread, NULL, close_slowly, s.comm);
    await_goodbye(&s);
    rc_call call = small_call(RC_ALLREDUCE, data[0], 10);
    rc_work *work;
    if (rc_submit(s.comm, &call, &work, NULL) == RC_OK)
        expect_failure(work, RC_INVALID_STATE, "closed");
    pthread_join(thread, NULL);
    stage_close(&s);
}

/* However often it is closed, and whatever still comes. */
static void goodbye_is_the_last_frame(void)
{
    stage s = stage_open((stage_options){.lanes = 2});
    pthread_t threads[2];
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    for (int i = 0; i < 2; i++)
        pthread_create(&threads[i], NULL, close_slowly, s.comm);
    await_goodbye(&s);
    rc_call call = small_call(RC_BROADCAST, data[1], BULK);
    for (uint32_t i = 0; i < 5; i++) { /* of which it would say what it has called */
        h = data_header(&call, 0);
        h.segment = i;
        h.length = PEER_SEGMENT;
        play(s.far[1][0], h, data[1]);
    }
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++) {
        CHECK(watch_frame(s.far[1][i], &h, payload));
        CHECK_EQ(h.type, FRAME_GOODBYE);
        CHECK(!watch_frame(s.far[1][i], &h, payload));
    }
    stage_close(&s);
}

/* ---- fork ---- */

static int be_a_child(world *w, int fds_without_world)
{
    for (int rank = 0; rank < w->size; rank++)
        rc_engine_after_fork(w->engines[rank]);
    if (open_fds() != fds_without_world)
        return 1;
    rc_call call = small_call(RC_BARRIER, NULL, 0);
    rc_work *work;
    rc_error error;
    if (rc_submit(w->comms[0], &call, &work, &error) != RC_INVALID_STATE ||
        strstr(error.message, "forked") == NULL)
        return 2;
    rc_comm_error(w->comms[0], &error);
    if (error.code != RC_INVALID_STATE || rc_comm_close(w->comms[0], 1000) != RC_INVALID_STATE)
        return 3;
    rc_comm_stats stats;
    rc_comm_stats_get(w->comms[0], &stats);
    rc_comm_abort(w->comms[0], "a child has no say");
    for (int rank = 0; rank < w->size; rank++)
        rc_comm_free(w->comms[rank]);
    return 0;
}

static void forked_child_keeps_no_lane(void)
{
    int before = open_fds();
    world *w = world_open((world_options){.size = 3, .lanes = 2, .engines = 1});
    rc_work *pending = submit_kind(w, 0, RC_ALLREDUCE, 1000);
    pid_t child = fork();
    if (child == 0)
        _exit(be_a_child(w, before));
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    rc_work *works[2] = {submit_kind(w, 1, RC_ALLREDUCE, 1000),
                         submit_kind(w, 2, RC_ALLREDUCE, 1000)};
    expect_done(pending); /* the parent goes on */
    expect_done(works[0]);
    expect_done(works[1]);
    world_close(w);
    CHECK_EQ(open_fds(), before);
}

/* A child that lives on must not keep a dead parent's connections open. */
static void peer_of_a_dead_parent_hears_of_it(void)
{
    stage s = stage_open((stage_options){0});
    int hold[2];
    CHECK_EQ(pipe(hold), 0);
    pid_t child = fork();
    if (child == 0) {
        char byte;
        rc_engine_after_fork(s.engine);
        close(s.far[1][0]);
        close(hold[1]);
        _exit(read(hold[0], &byte, 1) != 0);
    }
    usleep(20000);
    rc_comm_free(s.comm);
    s.comm = NULL;
    uint8_t payload[PEER_SEGMENT];
    frame_header h;
    while (watch_frame(s.far[1][0], &h, payload)) /* to the end of the stream, within the limit */
        ;
    close(hold[0]);
    close(hold[1]);
    waitpid(child, NULL, 0);
    stage_close(&s);
}

static void nothing_leaks(void)
{
    int before = open_fds();
    abort_reaches_everyone();
    any_moment_is_survived();
    calls_during_close_end();
    close_ends_works_in_flight();
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"leaving_rank_is_missed_when_needed", leaving_rank_is_missed_when_needed},
        {"leaving_in_turn_fails_nobody", leaving_in_turn_fails_nobody},
        {"last_words_are_received", last_words_are_received},
        {"half_a_message_is_no_message", half_a_message_is_no_message},
        {"goodbye_ends_works_nobody_holds", goodbye_ends_works_nobody_holds},
        {"goodbye_on_one_lane_is_not_all", goodbye_on_one_lane_is_not_all},
        {"vanished_peer_is_named_by_everyone", vanished_peer_is_named_by_everyone},
        {"vanished_peer_is_seen_when_idle", vanished_peer_is_seen_when_idle},
        {"any_moment_is_survived", any_moment_is_survived},
        {"abort_reaches_everyone", abort_reaches_everyone},
        {"every_lane_ends_with_the_reason", every_lane_ends_with_the_reason},
        {"long_reasons_are_cut", long_reasons_are_cut},
        {"mismatches_are_seen_on_both_sides", mismatches_are_seen_on_both_sides},
        {"sends_and_receives_must_match", sends_and_receives_must_match},
        {"close_ends_works_in_flight", close_ends_works_in_flight},
        {"close_does_not_wait_for_ever", close_does_not_wait_for_ever},
        {"closed_takes_no_calls", closed_takes_no_calls},
        {"calls_during_close_end", calls_during_close_end},
        {"call_during_goodbye_ends", call_during_goodbye_ends},
        {"goodbye_is_the_last_frame", goodbye_is_the_last_frame},
        {"forked_child_keeps_no_lane", forked_child_keeps_no_lane},
        {"peer_of_a_dead_parent_hears_of_it", peer_of_a_dead_parent_hears_of_it},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
