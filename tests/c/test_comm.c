/* test_comm.c - whole collectives between ranks of one process: every kind over one and several
 * lanes, small and large segments, narrow sockets, floods, ranks that call late or in bursts.
 */
#include "world.h"

static uint64_t seed = 424242u;

static const uint64_t counts[] = {0, 1, 3, 255, 257, 5000, 17001};

static rc_call drawn_call(int collective)
{
    uint64_t count = counts[draw_below(&seed, CHECK_COUNT(counts))];
    return trial_kind((rc_collective)collective, count, &seed);
}

static void run_kinds(world_options options, int rounds)
{
    world *w = world_open(options);
    for (int round = 0; round < rounds; round++)
        for (int collective = 0; collective < RC_RECV; collective++) {
            if (collective_is_p2p((rc_collective)collective) && w->size < 2)
                continue;
            trial t = trial_draw(drawn_call(collective), w->size, &seed);
            t.algorithm = options.algorithm ? options.algorithm : RC_RING;
            world_run(w, &t, &seed);
        }
    rc_error error;
    for (int rank = 0; rank < w->size; rank++) {
        rc_comm_error(w->comms[rank], &error);
        CHECK_EQ(error.code, RC_OK);
    }
    world_close(w);
}

static void every_kind_in_every_world(void)
{
    for (int size = 1; size <= 5; size++)
        run_kinds((world_options){.size = size}, 3);
}

static void several_lanes_and_rails(void)
{
    run_kinds((world_options){.size = 2, .lanes = 3, .rails = 2, .segment_bytes = 4096}, 2);
    run_kinds((world_options){.size = 4, .lanes = 2, .segment_bytes = 8192}, 2);
}

static void an_engine_per_rank(void)
{
    run_kinds((world_options){.size = 3, .lanes = 2, .engines = 1, .segment_bytes = 16384}, 2);
}

static void over_tcp(void)
{
    run_kinds((world_options){.size = 3, .lanes = 2, .rails = 2, .tcp = 1}, 2);
    run_kinds((world_options){.size = 2, .tcp = 1, .segment_bytes = 4096}, 2);
}

static void each_algorithm(void)
{
    for (int a = RC_DIRECT; a < RC_ALGORITHM_COUNT; a++) {
        world_options options = {.algorithm = (rc_algorithm)a, .engines = 1};
        for (options.size = 2; options.size <= 5; options.size++)
            run_kinds(options, 1);
        options.send_buffer = 1;
        options.segment_bytes = 4096;
        options.lanes = 2;
        for (options.size = 3; options.size <= 4; options.size++)
            run_kinds(options, 1);
    }
}

static void through_narrow_sockets(void)
{
    run_kinds((world_options){.size = 3, .lanes = 2, .send_buffer = 1, .segment_bytes = 4096}, 2);
    run_kinds((world_options){.size = 2, .send_buffer = 4096}, 2);
}

static void any_segment_size(void)
{
    for (int i = 0; i < 6; i++)
        run_kinds((world_options){.size = 2 + i % 3,
                                  .lanes = 1 + i % 2,
                                  .segment_bytes = 4096 * (1 + (uint32_t)draw_below(&seed, 40))},
                  1);
}

/* What stays of a rank's own values can be gigabytes: their copy is under way when a call has
 * started, and all else on the engine gets its turn meanwhile. */
static void what_stays_is_copied_bit_by_bit(void)
{
    enum { COUNT = 1 << 20 };
    static float src[COUNT], dst[COUNT];
    for (int i = 0; i < COUNT; i++)
        src[i] = (float)i;
    world *w = world_open((world_options){.size = 1});
    rc_comm *c = w->comms[0];
    rc_call call = small_call(RC_ALLGATHER, src, COUNT);
    call.dst = dst;
    engine_lock(w->engines[0]);
    rc_work *work = submit(c, &call); /* cannot start it now */
    c->member.drain(&c->member);
    CHECK_EQ(rc_work_wait(work, 0), RC_AGAIN);
    CHECK_EQ(c->active.head != NULL, 1);
    engine_unlock(w->engines[0]);
    expect_done(work);
    CHECK(memcmp(src, dst, sizeof src) == 0);
    world_close(w);
}

/* ---- submitted and waited for in one ---- */

static void a_run_leaves_what_is_not_over(void)
{
    float first[10] = {0}, second[10] = {0};
    world *w = world_open((world_options){.size = 2});
    rc_call call = small_call(RC_ALLREDUCE, NULL, 0);
    rc_work *work = (rc_work *)w;
    call.timeout_ms = 0;
    CHECK_EQ(rc_run(w->comms[0], &call, 10, first, first, 0, &work), RC_INVALID_ARGUMENT);
    CHECK(work == NULL); /* refused */
    call = small_call(RC_ALLREDUCE, NULL, 0);
    CHECK_EQ(rc_run(w->comms[0], &call, 10, first, first, 5, &work), RC_AGAIN);
    rc_work *late = work;
    CHECK_EQ(rc_run(w->comms[1], &call, 10, second, second, WORLD_LONG_MS, &work), RC_OK);
    CHECK(work == NULL);
    expect_done(late);
    CHECK_EQ(rc_run(w->comms[0], &call, 10, first, first, 0, &late), RC_AGAIN);
    rc_comm_abort(w->comms[0], "enough");
    CHECK_EQ(rc_run(w->comms[0], &call, 10, first, first, WORLD_LONG_MS, &work), RC_ABORTED);
    CHECK_EQ(rc_work_wait(late, WORLD_LONG_MS), RC_ABORTED);
    rc_work_free(late);
    rc_work_free(work);
    world_close(w);
}

/* ---- floods: all submitted before any is waited for ---- */

enum { FLOOD = 100 };

static void submit_flood(world *w, trial *trials, rc_work *works[FLOOD][WORLD_MAX], int rank)
{
    for (int i = 0; i < FLOOD; i++) {
        rc_call call = trial_call(&trials[i], rank);
        if (trial_takes_part(&trials[i], rank))
            works[i][rank] = submit(w->comms[rank], &call);
    }
}

/* Each rank in turn submits everything, so the first runs far ahead of the last. */
static void flood(world_options options, int collective)
{
    static trial trials[FLOOD];
    static rc_work *works[FLOOD][WORLD_MAX];
    world *w = world_open(options);
    memset(works, 0, sizeof works);
    for (int i = 0; i < FLOOD; i++) {
        int kind = collective >= 0 ? collective : (int)draw_below(&seed, RC_RECV);
        trials[i] = trial_draw(drawn_call(kind), w->size, &seed);
        trials[i].algorithm = options.algorithm ? options.algorithm : RC_RING;
        if (trials[i].call.count > 5000)
            trials[i].call.count = 5000;
        trial_open(&trials[i], &seed);
    }
    for (int rank = 0; rank < w->size; rank++)
        submit_flood(w, trials, works, rank);
    for (int i = FLOOD - 1; i >= 0; i--) {
        for (int rank = 0; rank < w->size; rank++) {
            if (works[i][rank] != NULL)
                expect_done(works[i][rank]);
            trial_check(&trials[i], rank);
        }
        trial_close(&trials[i]);
    }
    world_close(w);
}

static void floods(void)
{
    flood((world_options){.size = 2, .segment_bytes = 4096}, -1);
    flood((world_options){.size = 3, .lanes = 2, .segment_bytes = 4096}, -1);
    flood((world_options){.size = 4, .engines = 1, .lanes = 2}, -1);
    flood((world_options){.size = 3, .segment_bytes = 4096}, RC_ALLREDUCE);
    flood((world_options){.size = 3, .segment_bytes = 4096}, RC_BROADCAST);
    flood((world_options){.size = 2, .segment_bytes = 4096}, RC_SEND);
}

/* ---- ranks that come late ---- */

/* Much more than the credit is ready to be sent when the receiver calls at last. */
static void late_receiver_of_bulk(void)
{
    enum { COUNT = 60000 };
    for (int collective = RC_ALLREDUCE; collective <= RC_SEND; collective++) {
        world *w = world_open((world_options){.size = 3, .lanes = 2, .segment_bytes = 4096});
        rc_call call = {.collective = (rc_collective)collective, .dtype = RC_F32, .count = COUNT};
        trial t = trial_draw(call, 3, &seed);
        rc_work *works[3] = {NULL};
        int last = (t.from + 1) % 3;
        trial_open(&t, &seed);
        for (int i = 1; i <= 3; i++) {
            int rank = (last + i) % 3;
            rc_call mine = trial_call(&t, rank);
            if (rank == last)
                usleep(20000);
            if (trial_takes_part(&t, rank))
                works[rank] = submit(w->comms[rank], &mine);
        }
        for (int rank = 0; rank < 3; rank++) {
            if (works[rank] != NULL)
                expect_done(works[rank]);
            trial_check(&t, rank);
        }
        trial_close(&t);
        world_close(w);
    }
}

/* Rank 0 starts a collective that rank 1 calls late, and then sends what rank 1 receives first.
 * What waits for the collective must not keep the send from its receiver. */
static void small_send_behind_a_waiting_collective(void)
{
    enum { BULK = 1 << 18, SMALL = 100 };
    static float bulk[2][BULK], small[2][SMALL];
    world *w = world_open((world_options){.size = 2, .segment_bytes = 4096});
    rc_call reduce0 = small_call(RC_ALLREDUCE, bulk[0], BULK);
    rc_call reduce1 = small_call(RC_ALLREDUCE, bulk[1], BULK);
    rc_call send = small_call(RC_SEND, small[0], SMALL),
            receive = small_call(RC_RECV, small[1], SMALL);
    send.root = 1;
    small[0][7] = 3.5F;
    rc_work *first = submit(w->comms[0], &reduce0);
    rc_work *sent = submit(w->comms[0], &send);
    usleep(20000);
    CHECK(expect_done(submit(w->comms[1], &receive)));
    CHECK(small[1][7] == 3.5F);
    rc_work *second = submit(w->comms[1], &reduce1);
    expect_done(first);
    expect_done(sent);
    expect_done(second);
    world_close(w);
}

/* The other way round: bulk sends wait, a small collective goes by. */
static void small_collective_behind_a_waiting_send(void)
{
    enum { BULK = 1 << 18, SMALL = 100 };
    static float bulk[2][BULK], small[3][SMALL];
    for (int root = 0; root < 3; root++) {
        world *w = world_open((world_options){.size = 3, .segment_bytes = 4096});
        rc_call send = small_call(RC_SEND, bulk[0], BULK);
        rc_call receive = small_call(RC_RECV, bulk[1], BULK);
        rc_work *works[3];
        send.root = 1;
        rc_work *sent = submit(w->comms[0], &send);
        for (int rank = 0; rank < 3; rank++) {
            rc_call call = small_call(RC_BROADCAST, small[rank], SMALL);
            call.root = root;
            works[rank] = submit(w->comms[rank], &call);
        }
        for (int rank = 0; rank < 3; rank++)
            expect_done(works[rank]);
        rc_work *received = submit(w->comms[1], &receive);
        expect_done(sent);
        expect_done(received);
        world_close(w);
    }
}

/* ---- counters ---- */

static void counters_add_up(void)
{
    world *w = world_open((world_options){.size = 3, .lanes = 2, .rails = 2});
    for (int i = 0; i < 5; i++) {
        trial t = trial_draw((rc_call){.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = 90000},
                             3, &seed);
        world_run(w, &t, &seed);
    }
    for (int rank = 0; rank < 3; rank++) {
        rc_comm_stats stats;
        rc_lane_stats lanes[16];
        uint64_t sent = 0;
        rc_comm_stats_get(w->comms[rank], &stats);
        CHECK_EQ(stats.works, 5);
        CHECK_EQ(stats.lanes, 8);
        CHECK(stats.payload_bytes >= UINT64_C(5) * 2 * 2 * (90000 / 3 - 256) * 4);
        CHECK(stats.payload_bytes <= UINT64_C(5) * 2 * 2 * (90000 / 3 + 256) * 4);
        CHECK_EQ(rc_comm_lane_stats(w->comms[rank], NULL, 0), 8);
        CHECK_EQ(rc_comm_lane_stats(w->comms[rank], lanes, 16), 8);
        for (int i = 0; i < 8; i++) {
            CHECK(lanes[i].peer != rank);
            CHECK(lanes[i].rail == 0 || lanes[i].rail == 1);
            sent += lanes[i].sent_bytes;
        }
        CHECK_EQ(stats.wire_bytes, sent);
        CHECK(stats.wire_bytes > stats.payload_bytes);
    }
    world_close(w);
}

/* What a communicator has counted for one work, and nothing else, is what the work says. */
static void check_figures(rc_comm *comm, rc_work *work)
{
    rc_comm_stats all;
    rc_work_stats own;
    uint64_t wire = 0;
    rc_comm_stats_get(comm, &all);
    rc_work_stats_get(work, &own);
    for (int rail = 0; rail < 8; rail++)
        wire += own.rail_bytes[rail];
    CHECK_EQ(own.sent_bytes, all.payload_bytes - all.shared_bytes);
    CHECK_EQ(own.shared_bytes, all.shared_bytes);
    CHECK(wire > own.sent_bytes && wire <= all.wire_bytes);
    CHECK(own.rail_bytes[0] > 0 && own.rail_bytes[1] > 0);
    CHECK(own.submitted_ns > 0 && own.submitted_ns <= own.started_ns);
    CHECK(own.started_ns <= own.finished_ns);
}

static void figures_of_a_work(world_options options)
{
    enum { COUNT = 300000 };
    static float data[4][COUNT];
    world *w = world_open(options);
    rc_work *works[4];
    rc_work_stats early;
    for (int rank = 0; rank < w->size; rank++) {
        rc_call call = small_call(RC_ALLREDUCE, data[rank], COUNT);
        works[rank] = submit(w->comms[rank], &call);
        rc_work_stats_get(works[0], &early);
        CHECK(early.submitted_ns > 0);
        CHECK(rank > 0 || (early.finished_ns == 0 && early.sent_bytes == 0));
    }
    for (int rank = 0; rank < w->size; rank++)
        CHECK_EQ(rc_work_wait(works[rank], 30000), RC_OK);
    for (int rank = 0; rank < w->size; rank++) {
        check_figures(w->comms[rank], works[rank]);
        rc_work_free(works[rank]);
    }
    world_close(w);
}

static void works_know_what_they_have_moved(void)
{
    figures_of_a_work((world_options){.size = 2, .rails = 2, .segment_bytes = 4096});
    figures_of_a_work((world_options){.size = 4, .rails = 2, .segment_bytes = 4096, .threads = 2});
    figures_of_a_work(
        (world_options){.size = 4, .rails = 2, .segment_bytes = 4096, .hosts = 2, .memory = 1});
}

static void identical_bits_on_every_rank(void)
{
    enum { COUNT = 30011 };
    static float data[4][COUNT];
    for (int lanes = 1; lanes <= 3; lanes++)
        for (int codec = 0; codec <= RC_CODEC_FP16; codec++) {
            world *w =
                world_open((world_options){.size = 4, .lanes = lanes, .segment_bytes = 4096});
            rc_work *works[4];
            for (int rank = 0; rank < 4; rank++) {
                fill_random(data[rank], RC_F32, COUNT, &seed);
                rc_call call = small_call(RC_ALLREDUCE, data[rank], COUNT);
                call.codec = (rc_codec)codec;
                works[rank] = submit(w->comms[rank], &call);
            }
            for (int rank = 0; rank < 4; rank++)
                expect_done(works[rank]);
            for (int rank = 1; rank < 4; rank++)
                CHECK(memcmp(data[rank], data[0], sizeof data[0]) == 0);
            world_close(w);
        }
}

static void nothing_leaks(void)
{
    int before = open_fds();
    for (int i = 0; i < 5; i++)
        run_kinds((world_options){.size = 3, .lanes = 2, .engines = i % 2}, 1);
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"every_kind_in_every_world", every_kind_in_every_world},
        {"several_lanes_and_rails", several_lanes_and_rails},
        {"an_engine_per_rank", an_engine_per_rank},
        {"over_tcp", over_tcp},
        {"each_algorithm", each_algorithm},
        {"through_narrow_sockets", through_narrow_sockets},
        {"any_segment_size", any_segment_size},
        {"what_stays_is_copied_bit_by_bit", what_stays_is_copied_bit_by_bit},
        {"a_run_leaves_what_is_not_over", a_run_leaves_what_is_not_over},
        {"floods", floods},
        {"late_receiver_of_bulk", late_receiver_of_bulk},
        {"small_send_behind_a_waiting_collective", small_send_behind_a_waiting_collective},
        {"small_collective_behind_a_waiting_send", small_collective_behind_a_waiting_send},
        {"counters_add_up", counters_add_up},
        {"works_know_what_they_have_moved", works_know_what_they_have_moved},
        {"identical_bits_on_every_rank", identical_bits_on_every_rank},
        {"nothing_leaks", nothing_leaks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
