/* test_block_pieces.c - what the GPU packs by a codec of blocks goes through the core in pieces:
 * the bits are those of host tensors, residuals included; the legs run side by side; what must not
 * be left out is missed, and whatever fails leaves nothing behind.
 */
#include "block_flights.h"

enum {
    COUNT = 60000,
    SHORT = 20000,
    ARENA = 4 << 20,
    SMALL_ARENA = 64 << 10,
    SEGMENT = 1024,
    SHIFT = 7
}; /* of these, pieces have several rows */

/* ---- all ranks ---- */

typedef struct exchange {
    flights *all;
    int ranks;
    rc_codec codec;
    uint64_t count;
    rc_op op;
    tensors t; /* the sources; dst: what host tensors give */
    rc_feedback *feedback[WORLD_MAX], *at_home[WORLD_MAX];
    cu_address at[WORLD_MAX];
    rc_flight *in_flight[WORLD_MAX];
} exchange;

static exchange begin_with(int ranks, rc_codec codec, uint64_t count, uint64_t arena)
{
    exchange e = {.ranks = ranks, .codec = codec, .count = count};
    e.all = flights_open(ranks, "", ptx(), arena);
    e.t = make_tensors(ranks, count);
    open_feedback(e.feedback, ranks, count);
    open_feedback(e.at_home, ranks, count);
    for (int rank = 0; rank < ranks; rank++) {
        e.all->world->comms[rank]->env.segment_bytes = SEGMENT;
        e.at[rank] = on_device(e.t.src[rank], count);
    }
    return e;
}

static exchange begin(int ranks, rc_codec codec, uint64_t count)
{
    return begin_with(ranks, codec, count, ARENA);
}

static void end(exchange *e)
{
    for (int rank = 0; rank < e->ranks; rank++) {
        rc_flight_free(e->in_flight[rank]);
        cuMemFree_v2(e->at[rank]);
    }
    close_feedback(e->feedback, e->ranks);
    close_feedback(e->at_home, e->ranks);
    free_tensors(&e->t);
    flights_close(e->all);
}

/* New values on the device, and in dst what host tensors of them give. */
static void draw_step(exchange *e, int with_feedback)
{
    draw_values(&e->t);
    for (int rank = 0; rank < e->ranks; rank++)
        CHECK_EQ(fake_cuda_write(e->at[rank], e->t.src[rank], e->count * sizeof(float)), 0);
    run_step(e->all->world, &e->t, with_feedback ? e->at_home : NULL, e->codec, e->op, 0);
}

static rc_call call_for(const exchange *e, int rank, int with_feedback)
{
    rc_call call = call_at(e->at[rank], e->count, e->codec, e->op);
    call.feedback = with_feedback ? e->feedback[rank] : NULL;
    return call;
}

static void submit_one(exchange *e, int rank, int with_feedback)
{
    rc_call call = call_for(e, rank, with_feedback);
    rc_flight_free(e->in_flight[rank]);
    e->in_flight[rank] = flights_submit(e->all, rank, &call, CU_LEGACY_STREAM);
}

static void submit_all(exchange *e, int with_feedback)
{
    for (int rank = 0; rank < e->ranks; rank++)
        submit_one(e, rank, with_feedback);
}

static int is_right(const exchange *e, int rank)
{
    float *got = malloc(e->count * sizeof *got);
    int right = fake_cuda_read(got, e->at[rank], e->count * sizeof *got) == 0 &&
                memcmp(got, e->t.dst[rank], e->count * sizeof *got) == 0;
    free(got);
    return right;
}

static int lands_well(const exchange *e)
{
    int right = 1;
    for (int rank = 0; rank < e->ranks; rank++)
        right &= rc_flight_landed(e->in_flight[rank], WORLD_LONG_MS) == RC_OK;
    for (int rank = 0; rank < e->ranks; rank++)
        right &= is_right(e, rank);
    return right;
}

static void residuals_are_alike(const exchange *e)
{
    for (int rank = 0; rank < e->ranks; rank++) {
        uint64_t start, count, other_start, other_count;
        same(rc_feedback_worker(e->feedback[rank]), rc_feedback_worker(e->at_home[rank]), e->count,
             "worker", rank);
        const float *owner = rc_feedback_owner(e->feedback[rank], &start, &count);
        const float *at_home = rc_feedback_owner(e->at_home[rank], &other_start, &other_count);
        if (CHECK_EQ(count, other_count) && CHECK_EQ(start, other_start) && count > 0)
            same(owner, at_home, count, "owner", rank);
    }
}

static int waits_until(flights_state *holds, const exchange *e)
{
    return flights_wait_until(holds, e->in_flight, e->ranks);
}

/* ---- bits ---- */

static void it_has_the_bits_of_host_tensors(void)
{
    for (int ranks = 2; ranks <= CHECK_LESS(4, 3); ranks++)
        for (size_t c = 0; c < CHECK_COUNT(codecs); c++) {
            exchange e = begin(ranks, codecs[c], COUNT - 1 - c * 256);
            for (int i = 0; i < 5; i++) {
                int with = i != 1, on_gpu = i != 3 || ranks == 2; /* looked at before */
                e.op = c % 2 ? RC_SUM : RC_AVG;
                draw_step(&e, with);
                submit_all(&e, with);
                if (!CHECK(lands_well(&e)))
                    CHECK_NOTE("codec %d world %d step %d\n", codecs[c], ranks, i);
                for (int rank = 0; rank < ranks; rank++)
                    CHECK_EQ(e.in_flight[rank]->work->gate != NULL, on_gpu);
                CHECK_EQ(e.feedback[0]->twin != NULL, on_gpu);
                if (i == 2)
                    residuals_are_alike(&e);
            }
            residuals_are_alike(&e);
            end(&e);
            gpu_expect_clean();
        }
}

/* A rank on the CPU, one whose pieces are others, and one that packs it whole: nobody can tell. */
static void other_ranks_cannot_tell(void)
{
    for (size_t c = 0; c < CHECK_COUNT(codecs); c++) {
        exchange e = begin(3, codecs[c], COUNT);
        draw_step(&e, 0);
        for (int turn = 0; turn < 3; turn++) {
            int host = turn;
            float *got = malloc(e.count * sizeof *got);
            for (int rank = 0; rank < 3; rank++)
                if (rank != host) {
                    CHECK_EQ(fake_cuda_write(e.at[rank], e.t.src[rank], e.count * 4), 0);
                    submit_one(&e, rank, 0);
                }
            rc_call call = call_of(&e.t, host, e.codec, e.op, 0);
            call.dst = got;
            expect_done(submit(e.all->world->comms[host], &call));
            CHECK(memcmp(got, e.t.dst[host], e.count * sizeof *got) == 0);
            for (int rank = 0; rank < 3; rank++)
                CHECK(rank == host ||
                      (rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS) == RC_OK &&
                       is_right(&e, rank)));
            free(got);
        }
        end(&e);
        gpu_expect_clean();
    }
}

/* Pieces of the tensor with gaps between them, cut by those of the flight at odd places. */
static void a_tensor_in_parts(void)
{
    enum { PARTS = 9 };
    for (int ranks = 2; ranks <= 3; ranks++) {
        exchange e = begin(ranks, RC_CODEC_INT4, COUNT);
        rc_piece parts[WORLD_MAX][PARTS];
        for (int rank = 0; rank < ranks; rank++)
            memset(e.t.src[rank], 0, COUNT * sizeof(float));
        draw_values(&e.t);
        for (int i = 0; i < PARTS; i++) {
            uint64_t from = (uint64_t)i * COUNT / PARTS, to = (uint64_t)(i + 1) * COUNT / PARTS;
            uint64_t gap = i % 3 == 1 ? 37 : 0;
            for (int rank = 0; rank < ranks; rank++) {
                memset(e.t.src[rank] + to - gap, 0, gap * sizeof(float));
                parts[rank][i] = (rc_piece){e.at[rank] + from * 4, from * 4, (to - gap - from) * 4};
            }
        }
        run_step(e.all->world, &e.t, NULL, e.codec, e.op, 0);
        for (int rank = 0; rank < ranks; rank++) {
            rc_error error;
            rc_call call = call_for(&e, rank, 0);
            call.src = call.dst = NULL;
            CHECK_EQ(fake_cuda_write(e.at[rank], e.t.src[rank], COUNT * sizeof(float)), 0);
            CHECK_EQ(rc_pipe_submit(e.all->pipes[rank], &call, parts[rank], PARTS, 1,
                                    &e.in_flight[rank], &error),
                     RC_OK);
        }
        CHECK(lands_well(&e)); /* sums of zeros are zeros: in the gaps nothing was written */
        for (int rank = 0; rank < ranks; rank++)
            CHECK(e.in_flight[rank]->work->gate != NULL);
        end(&e);
        gpu_expect_clean();
    }
}

/* It is found in the last rows, when others have come back. */
static void a_value_that_is_not_finite_makes_all_of_it_nan(void)
{
    for (int ranks = 2; ranks <= 3; ranks++)
        for (int guilty = 0; guilty < ranks; guilty++) {
            exchange e = begin(ranks, RC_CODEC_INT8, COUNT);
            for (int i = 0; i < 2; i++) {
                draw_step(&e, 1);
                submit_all(&e, 1);
                CHECK(lands_well(&e));
            }
            draw_values(&e.t);
            e.t.src[guilty][COUNT - 1] = INFINITY;
            for (int rank = 0; rank < ranks; rank++)
                CHECK_EQ(fake_cuda_write(e.at[rank], e.t.src[rank], COUNT * sizeof(float)), 0);
            run_step(e.all->world, &e.t, e.at_home, e.codec, e.op, 0);
            submit_all(&e, 1);
            CHECK(lands_well(&e));
            for (int rank = 0; rank < ranks; rank++)
                CHECK_EQ(qref_bits(e.t.dst[rank][0]), 0x7fc00000);
            residuals_are_alike(&e);
            end(&e);
            gpu_expect_clean();
        }
}

/* ---- side by side ---- */

/* The core has the work, and most of the tensor is still to be packed. */
static void the_core_has_it_before_the_last_copy(void)
{
    for (int ranks = 2; ranks <= 3; ranks++) {
        exchange e = begin(ranks, RC_CODEC_INT8, COUNT);
        draw_step(&e, 0);
        int launched = fake_cuda_calls("cuLaunchKernel");
        atomic_store(&pipe_pieces_fed, 1);
        submit_all(&e, 0);
        CHECK(waits_until(flights_reached_core, &e));
        usleep(2000); /* no more are queued */
        int in_pieces = fake_cuda_calls("cuLaunchKernel") - launched;
        CHECK(in_pieces >= ranks && in_pieces <= ranks * (ranks - 1) * PIPE_PIECES_AHEAD);
        CHECK(fake_cuda_pending() > 0);
        for (int rank = 0; rank < ranks; rank++)
            CHECK_EQ(rc_flight_wait(e.in_flight[rank], 0), RC_AGAIN);
        atomic_store(&pipe_pieces_fed, INT32_MAX);
        CHECK(lands_well(&e));
        CHECK(fake_cuda_calls("cuLaunchKernel") - launched > in_pieces);
        end(&e);
        gpu_expect_clean();
    }
}

/* On each rank, of each part. */
static int some_has_come_back(rc_flight *const *in_flight, int ranks)
{
    return in_flight[0] != NULL &&
           fake_cuda_calls("cuMemcpyHtoDAsync_v2") >= ranks * (ranks > 2 ? ranks : 1);
}

/* A part of the result is on its way back, and the last rows cannot have come: no rank has the last
 * of its source. */
static void results_return_before_the_last_segment(void)
{
    for (int ranks = 2; ranks <= 4; ranks++) {
        exchange e = begin(ranks, RC_CODEC_ONEBIT, 4 * COUNT);
        draw_step(&e, 0);
        atomic_store(&pipe_pieces_fed, ranks == 2 ? 4 : 11 - ranks); /* but for the last ones */
        submit_all(&e, 0);
        CHECK(waits_until(some_has_come_back, &e));
        for (int rank = 0; rank < ranks; rank++) {
            CHECK_EQ(rc_flight_wait(e.in_flight[rank], 0), RC_AGAIN);
            CHECK(!is_right(&e, rank));
        }
        atomic_store(&pipe_pieces_fed, INT32_MAX);
        CHECK(lands_well(&e));
        end(&e);
        gpu_expect_clean();
    }
}

/* ---- what must not be left out ---- */

/* A stream makes the values before the call, and looks at them after it; nothing runs while
 * landings wait. */
static int follows_streams(int fault)
{
    enum { RANKS = 3 };
    exchange e = begin(RANKS, RC_CODEC_INT8, SHORT);
    int right = 1;
    cu_stream stream = flights_stream();
    draw_step(&e, 0);
    pipe_fault = fault;
    atomic_store(&pipe_paused, 1);
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_EQ(fake_cuda_add(stream, e.at[rank], 5.0F, SHORT), CU_OK);
        for (uint64_t i = 0; i < SHORT; i++)
            e.t.src[rank][i] += 5.0F;
    }
    run_step(e.all->world, &e.t, NULL, e.codec, e.op, 0);
    for (int rank = 0; rank < RANKS; rank++) {
        rc_call call = call_for(&e, rank, 0);
        e.in_flight[rank] = flights_submit(e.all, rank, &call, stream);
    }
    flights_follow(e.in_flight, RANKS, stream);
    for (int rank = 0; rank < RANKS; rank++)
        right &= is_right(&e, rank);
    atomic_store(&pipe_paused, 0);
    for (int rank = 0; rank < RANKS; rank++)
        CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
    cuStreamDestroy_v2(stream);
    end(&e);
    pipe_fault = PIPE_SOUND;
    return right;
}

static void faults_are_seen(void)
{
    CHECK(follows_streams(PIPE_SOUND));
    gpu_expect_clean();
    for (int i = 0; i < CHECK_LESS(10, 2); i++) {
        CHECK(!follows_streams(PIPE_EARLY_SHOW));
        CHECK(!follows_streams(PIPE_NO_INPUT_EVENT));
        CHECK(!follows_streams(PIPE_NO_DONE_EVENT));
    }
}

static void an_early_release_is_seen(void)
{
    for (int sound = 0; sound < 2; sound++)
        for (int i = 0; i < CHECK_LESS(10, 2); i++) {
            exchange e = begin(3, RC_CODEC_INT8, SHORT);
            pipe_fault = sound ? PIPE_SOUND : PIPE_EARLY_RELEASE;
            submit_all(&e, 0);
            for (int rank = 0; rank < 3; rank++)
                CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_OK);
            CHECK_EQ(fake_cuda_pending() == 0, sound);
            end(&e);
            pipe_fault = PIPE_SOUND;
        }
}

/* ---- room ---- */

static int first_is_fed(rc_flight *const *in_flight, int ranks)
{
    rc_pipe *p = in_flight[0]->pipe;
    pthread_mutex_lock(&p->lock);
    int over = ranks > 0 && in_flight[0]->work != NULL && !in_flight[0]->feed.is_on;
    pthread_mutex_unlock(&p->lock);
    return over;
}

static void submit_in_parts(exchange *e, int rank, int in_parts)
{
    rc_error error;
    rc_call call = call_for(e, rank, 0);
    const rc_piece whole = {e->at[rank], 0, COUNT * sizeof(float)};
    CHECK_EQ(rc_pipe_submit(e->all->pipes[rank], &call, in_parts ? &whole : NULL, in_parts, 1,
                            &e->in_flight[rank], &error),
             RC_OK);
}

/* Rank 0 brings all of its source, the others some; so some of the result comes back. */
static void begin_to_come_back(exchange *e, int in_parts)
{
    draw_step(e, 0);
    submit_in_parts(e, 0, in_parts);
    CHECK(waits_until(first_is_fed, e));
    int is_half = e->codec == RC_CODEC_BF16;
    atomic_store(&pipe_pieces_fed, is_half ? 6 : e->ranks == 2 ? 4 : 7);
    for (int rank = 1; rank < e->ranks; rank++)
        submit_in_parts(e, rank, in_parts);
    CHECK(waits_until(some_has_come_back, e));
    CHECK_EQ(rc_flight_wait(e->in_flight[0], 0), RC_AGAIN);
}

/* A longer one of 16 bits, which goes whole: rank 0 has it on the GPU, where it may find no room.
 */
static void go_past_it(exchange *e, int first_failure, int failures)
{
    enum { LONG = 10 * COUNT };
    static float host[WORLD_MAX][LONG];
    rc_work *works[WORLD_MAX];
    cu_address at = on_device(host[0], LONG);
    for (int rank = 0; rank < e->ranks; rank++)
        e->all->world->comms[rank]->env.algorithm = RC_HALVING;
    for (int k = 0; k < failures; k++)
        fake_cuda_fail("cuMemAlloc_v2", first_failure + k, 2);
    rc_call call = call_at(at, LONG, RC_CODEC_BF16, RC_SUM);
    rc_flight *flight = flights_submit(e->all, 0, &call, CU_LEGACY_STREAM);
    for (int rank = 1; rank < e->ranks; rank++) {
        rc_call other = small_call(RC_ALLREDUCE, host[rank], LONG);
        other.codec = RC_CODEC_BF16;
        works[rank] = submit(e->all->world->comms[rank], &other);
    }
    CHECK_EQ(rc_flight_landed(flight, WORLD_LONG_MS), RC_OK);
    CHECK(flight->work->gate == NULL);
    for (int rank = 1; rank < e->ranks; rank++)
        expect_done(works[rank]);
    rc_flight_free(flight);
    cuMemFree_v2(at);
}

/* Room is lost when some of a result has come back (what it had is given up for what is longer),
 * and not to be had again for a while. Staging is unpinned when it is given back: what still copied
 * from it would be found out. */
static void room_is_lost(rc_codec codec)
{
    for (int first = 1; first <= 2; first++)
        for (int failures = first > 1; failures <= 5; failures += CHECK_LESS(1, 2)) {
            int ranks = codec == RC_CODEC_BF16 ? 2 : 2 + (first + failures) % 2;
            exchange e = begin_with(ranks, codec, COUNT, SMALL_ARENA);
            begin_to_come_back(&e, failures % 3 == 1);
            go_past_it(&e, first, failures);
            CHECK_EQ(rc_flight_wait(e.in_flight[0], 0), RC_AGAIN);
            atomic_store(&pipe_pieces_fed, INT32_MAX);
            if (!CHECK(lands_well(&e)))
                CHECK_NOTE("%d failures from %d on\n", failures, first);
            end(&e);
            CHECK_EQ(fake_cuda_leaks(NULL), 0);
            CHECK(fake_cuda_misuse() == NULL);
        }
}

static void the_gpu_loses_room_to_unpack(void)
{
    room_is_lost(RC_CODEC_INT8);
    room_is_lost(RC_CODEC_BF16); /* which is no codec of blocks, and goes the same way */
}

/* ---- failures ---- */

/* The core fails while there is something to pack: staging and feedback stay until that is over,
 * and residuals are as they were. */
static void an_end_while_it_is_fed(void)
{
    for (int closes = 0; closes < 2; closes++)
        for (int ranks = 2; ranks <= 3; ranks++) {
            exchange e = begin(ranks, RC_CODEC_ONEBIT, 2 * COUNT);
            draw_step(&e, 1);
            submit_all(&e, 1);
            CHECK(lands_well(&e));
            atomic_store(&pipe_pieces_fed, 2);
            submit_all(&e, 1);
            CHECK(waits_until(flights_reached_core, &e));
            if (closes)
                rc_comm_close(e.all->world->comms[1], 100);
            else
                rc_comm_abort(e.all->world->comms[1], "it is enough");
            CHECK_EQ(rc_work_wait(e.in_flight[0]->work, WORLD_LONG_MS), RC_ABORTED);
            for (int rank = 0; rank < ranks; rank++) {
                CHECK_EQ(rc_flight_landed(e.in_flight[rank], 20), RC_AGAIN);
                CHECK(rc_feedback_busy(e.feedback[rank]));
            }
            atomic_store(&pipe_pieces_fed, INT32_MAX);
            for (int rank = 0; rank < ranks; rank++) {
                CHECK_EQ(rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS), RC_ABORTED);
                CHECK(!rc_feedback_busy(e.feedback[rank]));
            }
            CHECK_EQ(fake_cuda_pending(), 0);
            residuals_are_alike(&e);
            end(&e);
            gpu_expect_clean();
        }
}

/* Any call of the driver may fail: no rank waits, no feedback stays in use, all is given back. */
static int one_call_fails(int k, int error)
{
    exchange e = begin(3, RC_CODEC_INT4, COUNT);
    int failed = 0, before = fake_cuda_faults();
    for (int rank = 0; rank < 3; rank++)
        CHECK_EQ(fake_cuda_write(e.at[rank], e.t.src[rank], COUNT * sizeof(float)), 0);
    fake_cuda_fail("*", k, error);
    for (int turn = 0; turn < 2; turn++) {
        for (int rank = 0; rank < 3; rank++) {
            rc_error why;
            rc_call call = call_for(&e, rank, 1);
            rc_flight_free(e.in_flight[rank]);
            e.in_flight[rank] = NULL;
            if (rc_pipe_submit(e.all->pipes[rank], &call, NULL, 0, 1, &e.in_flight[rank], &why) !=
                RC_OK)
                rc_comm_abort(e.all->world->comms[rank], "it was not submitted");
        }
        for (int rank = 0; rank < 3; rank++) {
            if (e.in_flight[rank] == NULL)
                continue;
            rc_result result = rc_flight_landed(e.in_flight[rank], WORLD_LONG_MS);
            CHECK(result != RC_AGAIN && result != RC_TIMEOUT);
            CHECK(!rc_feedback_busy(e.feedback[rank]));
            failed |= result != RC_OK;
        }
    }
    int happened = fake_cuda_faults() == before;
    if (!happened)
        CHECK(!failed);
    for (int rank = 0; rank < 3; rank++)
        (void)rc_feedback_worker(e.feedback[rank]);
    end(&e);
    CHECK_EQ(fake_cuda_leaks(NULL), 0);
    CHECK(fake_cuda_misuse() == NULL);
    return happened;
}

static void any_call_may_fail(void)
{
    int k = 1;
    for (; k < 2000 && one_call_fails(k, CU_LAUNCH_FAILED); k += 1 + k / CHECK_LESS(24, 8))
        continue;
    CHECK(k > 200 && k < 2000);
}

int main(void)
{
    const check_test tests[] = {
        {"it has the bits of host tensors", it_has_the_bits_of_host_tensors},
        {"other ranks cannot tell", other_ranks_cannot_tell},
        {"a tensor in parts", a_tensor_in_parts},
        {"a value that is not finite makes all of it NaN",
         a_value_that_is_not_finite_makes_all_of_it_nan},
        {"the core has it before the last copy", the_core_has_it_before_the_last_copy},
        {"results return before the last segment", results_return_before_the_last_segment},
        {"faults are seen", faults_are_seen},
        {"an early release is seen", an_early_release_is_seen},
        {"the GPU loses room to unpack", the_gpu_loses_room_to_unpack},
        {"an end while it is fed", an_end_while_it_is_fed},
        {"any call may fail", any_call_may_fail},
    };
    pipe_pieces_shift = SHIFT;
    return check_run(tests, CHECK_COUNT(tests));
}
