/* test_comm_threads.c - communicators with a second thread: right results whatever it sends, small
 * and large works, failures while it works, fork, and one that has none beside one that has.
 */
#include <pthread.h>
#include <sys/wait.h>

#include "../../csrc/base/clock.h"
#include "world.h"

enum { BULK = 300000 }; /* floats: a work long enough for a sender by itself */

static float data[4][BULK];
static uint64_t seed = 5150u;

static void run_kinds(world_options options, int rounds)
{
    static const uint64_t counts[] = {0, 1, 257, 5000, 20011};
    options.threads = 2;
    world *w = world_open(options);
    for (int round = 0; round < rounds; round++)
        for (int collective = 0; collective < RC_RECV; collective++) {
            uint64_t count = counts[draw_below(&seed, CHECK_COUNT(counts))];
            rc_call call = trial_kind((rc_collective)collective, count, &seed);
            trial t = trial_draw(call, w->size, &seed);
            t.algorithm = options.algorithm ? options.algorithm : RC_RING;
            world_run(w, &t, &seed);
        }
    world_close(w);
}

static void every_kind(void)
{
    run_kinds((world_options){.size = 2}, 2);
    run_kinds((world_options){.size = 4, .engines = 1, .segment_bytes = 4096}, 2);
    run_kinds((world_options){.size = 2, .lanes = 3, .rails = 2, .tcp = 1}, 2);
    run_kinds((world_options){.size = 3, .lanes = 2, .engines = 1, .tcp = 1}, 2);
    run_kinds((world_options){.size = 3, .lanes = 2, .send_buffer = 1, .segment_bytes = 4096}, 2);
}

static void each_algorithm(void)
{
    for (int a = RC_DIRECT; a < RC_ALGORITHM_COUNT; a++)
        run_kinds((world_options){.size = 3,
                                  .algorithm = (rc_algorithm)a,
                                  .engines = 1,
                                  .lanes = 2,
                                  .segment_bytes = 8192},
                  1);
}

static rc_work *submit_bulk(world *w, int rank, uint64_t count)
{
    rc_call call = small_call(RC_ALLREDUCE, data[rank], count);
    return submit(w->comms[rank], &call);
}

/* One all-reduce of two ranks, with sums that are exact. */
static void run_bulk(world *w, uint64_t count, int round, void (*meanwhile)(world *w))
{
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < count; i++)
        for (int rank = 0; rank < 2; rank++)
            data[rank][i] = (float)((i + (uint64_t)(round * rank)) % 1000);
    rc_work *works[2] = {submit_bulk(w, 0, count), submit_bulk(w, 1, count)};
    if (meanwhile != NULL)
        meanwhile(w);
    expect_done(works[0]);
    expect_done(works[1]);
    for (uint64_t i = 0; i < count; i++) {
        float sum = (float)(i % 1000) + (float)((i + (uint64_t)round) % 1000);
        wrong += data[0][i] != sum || data[1][i] != sum;
    }
    CHECK_EQ(wrong, 0);
}

/* As it is set by itself: small works are the driver's, long ones go to the sender. */
static void long_works_by_themselves(void)
{
    world *w = world_open((world_options){.size = 2, .engines = 1, .lanes = 2, .threads = 2});
    for (int rank = 0; rank < 2; rank++) {
        engine_lock(w->engines[rank]);
        w->comms[rank]->sender->least = 32 << 10;
        engine_unlock(w->engines[rank]);
    }
    for (int round = 0; round < 10; round++)
        run_bulk(w, round % 2 ? 100 : BULK, round, NULL);
    rc_comm_stats stats;
    rc_comm_stats_get(w->comms[0], &stats);
    CHECK_EQ(stats.threads, 2);
    CHECK(stats.engine_cpu_s > 0.0);
    world_close(w);
}

/* ---- lanes that are lost ---- */

/* Ends the first lane of rank 0 that lives, as a network would. */
static void cut_a_lane(world *w)
{
    const peer_link *ln = w->comms[0]->env.links[1];
    usleep((unsigned)draw_below(&seed, 2000));
    engine_lock(w->engines[0]);
    for (int i = 0; i < ln->lane_count; i++)
        if (ln->lanes[i]->state == LANE_OPEN) {
            shutdown(ln->lanes[i]->source.fd, SHUT_RDWR);
            break;
        }
    engine_unlock(w->engines[0]);
}

/* Connects again what is lost at one end. */
static void renew_lanes(world *w)
{
    for (int lane = 0; lane < 3; lane++) {
        rc_lane_mark marks[2];
        int pair[2];
        rc_comm_drop_lane(w->comms[0], 1, lane, &marks[0]);
        rc_comm_drop_lane(w->comms[1], 0, lane, &marks[1]);
        tcp_pair(pair);
        for (int rank = 0; rank < 2; rank++)
            CHECK_EQ(rc_comm_renew_lane(w->comms[rank], !rank, lane, pair[rank], &marks[rank],
                                        &marks[!rank]),
                     RC_OK);
    }
}

static void lanes_may_be_lost_while_it_sends(void)
{
    for (int trial = 0; trial < 8; trial++) {
        world *w = world_open((world_options){
            .size = 2, .lanes = 3, .tcp = 1, .threads = 2, .recovers = 1, .engines = trial % 2});
        for (int round = 0; round < 9; round++) {
            void (*const harm[])(world *) = {NULL, cut_a_lane, renew_lanes};
            run_bulk(w, round % 3 ? BULK : 5000, round, harm[round % 3]);
        }
        world_close(w);
    }
}

/* ---- ends ---- */

static void *abort_later(void *arg)
{
    usleep((unsigned)draw_below(&seed, 3000));
    rc_comm_abort(arg, "enough");
    return NULL;
}

static void abort_at_any_moment(void)
{
    for (int trial = 0; trial < 12; trial++) {
        world *w = world_open((world_options){
            .size = 2, .engines = 1, .lanes = 1 + trial % 2, .tcp = trial % 3 == 0, .threads = 2});
        float *own[2] = {calloc(BULK, sizeof(float)), calloc(BULK, sizeof(float))};
        rc_work *works[2];
        pthread_t aborter;
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = small_call(RC_ALLREDUCE, own[rank], BULK);
            works[rank] = submit(w->comms[rank], &call);
        }
        pthread_create(&aborter, NULL, abort_later, w->comms[trial % 2]);
        for (int rank = 0; rank < 2; rank++) {
            rc_error error;
            rc_result result = outcome(works[rank], &error);
            CHECK(result == RC_OK || (result == RC_ABORTED && error.rank == trial % 2));
            free(own[rank]); /* nobody may read it any more */
            rc_work_free(works[rank]);
        }
        pthread_join(aborter, NULL);
        world_close(w);
    }
}

static void freed_at_any_moment(void)
{
    for (int trial = 0; trial < 12; trial++) {
        world *w = world_open((world_options){.size = 2, .engines = 1, .threads = 2});
        rc_work *works[2] = {submit_bulk(w, 0, BULK), submit_bulk(w, 1, BULK)};
        usleep((unsigned)draw_below(&seed, 2000));
        world_free_rank(w, trial % 2);
        for (int rank = 0; rank < 2; rank++) {
            rc_error error;
            rc_result result = outcome(works[rank], &error);
            CHECK(result == RC_OK || result == RC_ABORTED || result == RC_PEER_LOST);
            rc_work_free(works[rank]);
        }
        world_close(w);
    }
}

static void forked_child_keeps_nothing(void)
{
    int before = open_fds();
    world *w = world_open((world_options){.size = 2, .engines = 1, .threads = 2});
    rc_work *pending = submit_bulk(w, 0, BULK);
    pid_t child = fork();
    if (child == 0) {
        for (int rank = 0; rank < 2; rank++)
            rc_engine_after_fork(w->engines[rank]);
        for (int rank = 0; rank < 2; rank++) {
            rc_comm_free(w->comms[rank]);
            rc_engine_free(w->engines[rank]);
        }
        _exit(open_fds() != before);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    rc_work *other = submit_bulk(w, 1, BULK);
    expect_done(pending); /* the parent goes on */
    expect_done(other);
    world_close(w);
    CHECK_EQ(open_fds(), before);
}

/* One engine, two communicators, of which one asked for a sender. */
static void only_who_asks_has_one(void)
{
    world *without = world_open((world_options){.size = 2, .threads = 1});
    world with = *without;
    rc_comm_stats stats;
    with.options.threads = 2;
    for (int rank = 0; rank < 2; rank++) {
        rc_comm_config config = world_config(&with.options, rank);
        CHECK_EQ(rc_comm_create(&with.comms[rank], with.engines[0], &config), RC_OK);
    }
    world_join(&with, 0, 1);
    for (int rank = 0; rank < 2; rank++)
        world_start(with.comms[rank]);
    for (int i = 0; i < 3; i++) {
        world *which = i == 1 ? &with : without;
        rc_work *works[2] = {submit_bulk(which, 0, BULK), submit_bulk(which, 1, BULK)};
        expect_done(works[0]);
        expect_done(works[1]);
        rc_comm_stats_get(which->comms[0], &stats);
        CHECK_EQ(stats.threads, i == 1 || getenv("WORLD_THREADS") != NULL ? 2 : 1);
    }
    for (int rank = 0; rank < 2; rank++)
        rc_comm_free(with.comms[rank]);
    world_close(without);
}

int main(void)
{
    static const check_test tests[] = {
        {"every_kind", every_kind},
        {"each_algorithm", each_algorithm},
        {"long_works_by_themselves", long_works_by_themselves},
        {"lanes_may_be_lost_while_it_sends", lanes_may_be_lost_while_it_sends},
        {"abort_at_any_moment", abort_at_any_moment},
        {"freed_at_any_moment", freed_at_any_moment},
        {"forked_child_keeps_nothing", forked_child_keeps_nothing},
        {"only_who_asks_has_one", only_who_asks_has_one},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
