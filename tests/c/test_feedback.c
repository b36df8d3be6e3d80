/* test_feedback.c - residuals over time: what they make up for, when they stay as they were, who
 * may use them, and what becomes of those that were made for another world.
 */
#include "../../csrc/coll/feedback.h"
#include "peer.h"
#include "quant_world.h"

/* ---- nothing is lost ---- */

/* The sum of all results so far, against that of all values less what is left. */
typedef struct ledger {
    uint64_t count;
    double *values, *results;
} ledger;

static ledger ledger_open(uint64_t count)
{
    return (ledger){count, calloc(count, sizeof(double)), calloc(count, sizeof(double))};
}

static void ledger_close(ledger *l)
{
    free(l->values);
    free(l->results);
}

static void ledger_add(ledger *l, const tensors *t, double divisor)
{
    for (uint64_t i = 0; i < l->count; i++) {
        l->results[i] += (double)t->dst[0][i];
        for (int rank = 0; rank < t->size; rank++)
            l->values[i] += (double)t->src[rank][i] / divisor;
    }
}

static void ledger_check(const ledger *l, rc_feedback **feedback, int size, double divisor,
                         const char *what)
{
    double worst = 0.0;
    double *left = calloc(l->count, sizeof *left);
    for (int rank = 0; rank < size; rank++) {
        uint64_t start, count;
        const float *worker = rc_feedback_worker(feedback[rank]);
        const float *owner = rc_feedback_owner(feedback[rank], &start, &count);
        for (uint64_t i = 0; i < l->count; i++)
            left[i] += (double)worker[i] / divisor;
        for (uint64_t i = 0; i < count; i++)
            left[start + i] += (double)owner[i];
    }
    for (uint64_t i = 0; i < l->count; i++) {
        double off = fabs(l->values[i] - l->results[i] - left[i]);
        worst = off > worst ? off : worst;
    }
    if (!CHECK(worst < 1e-4))
        CHECK_NOTE("%s, world of %d: off by %g\n", what, size, worst);
    free(left);
}

/* Many steps, each by another codec; the plain ones leave nothing. */
static void sums_of_results_are_sums_of_values(void)
{
    enum { COUNT = 1500, STEPS = 40 };
    static const rc_codec turns[] = {RC_CODEC_ONEBIT, RC_CODEC_INT4, RC_CODEC_INT8, RC_CODEC_FP8,
                                     RC_CODEC_ONEBIT, RC_CODEC_NONE, RC_CODEC_INT4};
    for (int size = 1; size <= 5; size++) {
        world *w = world_open((world_options){.size = size, .segment_bytes = 4096});
        double divisor = size % 2 ? size : 1;
        tensors t = make_tensors(size, COUNT);
        rc_feedback *feedback[WORLD_MAX];
        ledger l = ledger_open(COUNT);
        open_feedback(feedback, size, COUNT);
        for (int step = 0; step < STEPS; step++) {
            draw_values(&t);
            run_step(w, &t, feedback, turns[step % (int)CHECK_COUNT(turns)],
                     size % 2 ? RC_AVG : RC_SUM, 0);
            ledger_add(&l, &t, divisor);
            ledger_check(&l, feedback, size, divisor, "in one world");
        }
        close_feedback(feedback, size);
        ledger_close(&l);
        free_tensors(&t);
        world_close(w);
    }
}

/* A plain call takes all residuals along. */
static void other_codecs_flush(void)
{
    enum { COUNT = 777 };
    static const rc_codec plain[] = {RC_CODEC_NONE, RC_CODEC_BF16, RC_CODEC_FP16};
    for (size_t c = 0; c < CHECK_COUNT(plain); c++)
        for (int size = 1; size <= 4; size++) {
            world *w = world_open((world_options){.size = size});
            tensors t = make_tensors(size, COUNT);
            rc_feedback *feedback[WORLD_MAX];
            open_feedback(feedback, size, COUNT);
            draw_values(&t);
            run_step(w, &t, feedback, RC_CODEC_ONEBIT, RC_SUM, 1);
            draw_values(&t);
            run_step(w, &t, feedback, plain[c], RC_SUM, 1);
            for (int rank = 0; rank < size; rank++) {
                uint64_t start, count;
                rc_feedback_owner(feedback[rank], &start, &count);
                CHECK_EQ(count, 0);
                for (int i = 0; i < COUNT; i++)
                    CHECK(rc_feedback_worker(feedback[rank])[i] == 0.0F);
            }
            close_feedback(feedback, size);
            free_tensors(&t);
            world_close(w);
        }
}

/* Residuals of one world, loaded into another: by the memory of ranks and hosts, too. */
static void another_world_goes_on(void)
{
    enum { COUNT = 3000, BEFORE = 6, WORLDS = 5 };
    static const int sizes[WORLDS] = {4, 3, 2, 4, 6}, hosts[WORLDS] = {1, 1, 1, 2, 3};
    rc_feedback *feedback[BEFORE];
    ledger l = ledger_open(COUNT);
    open_feedback(feedback, BEFORE, COUNT);
    for (int round = 0; round < WORLDS; round++) {
        int size = sizes[round];
        world *w = world_open((world_options){.size = size,
                                              .hosts = hosts[round],
                                              .memory = hosts[round] > 1,
                                              .engines = hosts[round] > 1,
                                              .segment_bytes = 4096});
        tensors t = make_tensors(size, COUNT);
        for (int rank = size; rank < BEFORE; rank++) { /* whoever leaves gives its residuals away */
            uint64_t start, count;
            const float *owner = rc_feedback_owner(feedback[rank], &start, &count);
            float *to = rc_feedback_worker(feedback[0]);
            for (uint64_t i = 0; i < COUNT; i++)
                to[i] += rc_feedback_worker(feedback[rank])[i];
            for (uint64_t i = 0; i < count; i++)
                to[start + i] += owner[i];
            CHECK_EQ(rc_feedback_load(feedback[rank], NULL, NULL, 0, 0), RC_OK);
        }
        for (int step = 0; step < 3; step++) {
            draw_values(&t);
            run_step(w, &t, feedback, step == 1 ? RC_CODEC_ONEBIT : RC_CODEC_INT4, RC_SUM,
                     step % 2);
            ledger_add(&l, &t, 1.0);
            ledger_check(&l, feedback, BEFORE, 1.0, "in another world");
        }
        free_tensors(&t);
        world_close(w);
    }
    close_feedback(feedback, BEFORE);
    ledger_close(&l);
}

/* ---- poison ---- */

typedef struct snapshot {
    float *worker, *owner;
    uint64_t start, count;
} snapshot;

static snapshot snapshot_of(rc_feedback *f)
{
    snapshot s = {.worker = calloc(rc_feedback_count(f) + 1, sizeof(float))};
    const float *owner = rc_feedback_owner(f, &s.start, &s.count);
    s.owner = calloc(s.count + 1, sizeof(float));
    memcpy(s.worker, rc_feedback_worker(f), rc_feedback_count(f) * sizeof(float));
    if (s.count > 0)
        memcpy(s.owner, owner, s.count * sizeof(float));
    return s;
}

/* Equal to the bit. Frees the snapshot. */
static void expect_unchanged(snapshot *s, rc_feedback *f, const char *what)
{
    uint64_t start, count;
    const float *owner = rc_feedback_owner(f, &start, &count);
    CHECK_EQ(start, s->start);
    int equal = CHECK_EQ(count, s->count) &&
                (count == 0 || memcmp(owner, s->owner, count * sizeof(float)) == 0) &&
                memcmp(rc_feedback_worker(f), s->worker, rc_feedback_count(f) * sizeof(float)) == 0;
    if (!CHECK(equal))
        CHECK_NOTE("after %s\n", what);
    free(s->worker);
    free(s->owner);
}

static void one_poison(world_options options, rc_codec codec, uint64_t where, int who, float what)
{
    enum { COUNT = 2000 };
    world *w = world_open(options);
    tensors t = make_tensors(options.size, COUNT);
    rc_feedback *feedback[WORLD_MAX];
    snapshot before[WORLD_MAX];
    open_feedback(feedback, options.size, COUNT);
    draw_values(&t);
    run_step(w, &t, feedback, RC_CODEC_ONEBIT, RC_AVG, 0);
    for (int rank = 0; rank < options.size; rank++)
        before[rank] = snapshot_of(feedback[rank]);
    t.src[who][where] = what;
    run_step(w, &t, feedback, codec, RC_AVG, (int)(where % 2));
    for (int rank = 0; rank < options.size; rank++) {
        for (int i = 0; i < COUNT; i++)
            CHECK(isnan(t.dst[rank][i]));
        expect_unchanged(&before[rank], feedback[rank], "a value that is not finite");
    }
    draw_values(&t);
    run_step(w, &t, feedback, codec, RC_AVG, 0);
    for (int rank = 0; rank < options.size; rank++)
        for (int i = 0; i < COUNT; i++)
            CHECK(isfinite(t.dst[rank][i]));
    close_feedback(feedback, options.size);
    free_tensors(&t);
    world_close(w);
}

static void poison_changes_no_residual(void)
{
    static const float what[] = {NAN, INFINITY, -INFINITY};
    for (size_t c = 0; c < CHECK_COUNT(codecs); c++)
        for (int size = 2; size <= 4; size++)
            for (int i = 0; i < 6; i++)
                one_poison((world_options){.size = size, .segment_bytes = 4096}, codecs[c],
                           draw_below(&seed, 2000), (int)draw_below(&seed, (uint64_t)size),
                           what[i % 3]);
}

static void poison_reaches_all_hosts(void)
{
    for (int hosts = 2; hosts <= 3; hosts++)
        for (int i = 0; i < 6; i++)
            one_poison((world_options){.size = 2 * hosts,
                                       .hosts = hosts,
                                       .memory = 1,
                                       .engines = 1,
                                       .segment_bytes = 4096},
                       RC_CODEC_INT4, draw_below(&seed, 2000),
                       (int)draw_below(&seed, 2 * (uint64_t)hosts), i % 2 ? NAN : INFINITY);
}

/* An infinity is what a plain sum gives; it takes no residuals along. */
static void a_flush_that_is_not_finite_flushes_nothing(void)
{
    enum { COUNT = 600, N = 2 };
    world *w = world_open((world_options){.size = N});
    tensors t = make_tensors(N, COUNT);
    rc_feedback *feedback[WORLD_MAX];
    snapshot before[WORLD_MAX];
    open_feedback(feedback, N, COUNT);
    draw_values(&t);
    run_step(w, &t, feedback, RC_CODEC_ONEBIT, RC_SUM, 0);
    for (int rank = 0; rank < N; rank++)
        before[rank] = snapshot_of(feedback[rank]);
    t.src[1][300] = INFINITY;
    run_step(w, &t, feedback, RC_CODEC_BF16, RC_SUM, 0);
    for (int rank = 0; rank < N; rank++) {
        CHECK(isinf(t.dst[rank][300]) && isfinite(t.dst[rank][301]));
        expect_unchanged(&before[rank], feedback[rank], "an infinite result");
    }
    close_feedback(feedback, N);
    free_tensors(&t);
    world_close(w);
}

/* ---- failure ---- */

static void a_failure_changes_no_residual(void)
{
    enum { COUNT = 50000, N = 3 };
    world *w = world_open((world_options){.size = N, .segment_bytes = 4096});
    tensors t = make_tensors(N, COUNT);
    rc_feedback *feedback[WORLD_MAX];
    snapshot before[WORLD_MAX];
    open_feedback(feedback, N, COUNT);
    draw_values(&t);
    run_step(w, &t, feedback, RC_CODEC_INT8, RC_AVG, 0);
    for (int rank = 0; rank < N; rank++)
        before[rank] = snapshot_of(feedback[rank]);
    rc_work *works[N] = {NULL};
    for (int rank = 0; rank < N - 1; rank++) { /* the last one never calls */
        rc_call call = call_of(&t, rank, RC_CODEC_INT8, RC_AVG, rank % 2);
        call.feedback = feedback[rank];
        works[rank] = submit(w->comms[rank], &call);
        CHECK_EQ(rc_feedback_busy(feedback[rank]), 1);
        CHECK(rc_feedback_worker(feedback[rank]) == NULL);
        CHECK_EQ(rc_feedback_rescale(feedback[rank], 2.0), RC_INVALID_STATE);
        CHECK_EQ(rc_feedback_load(feedback[rank], NULL, NULL, 0, 0), RC_INVALID_STATE);
    }
    rc_comm_abort(w->comms[N - 1], "enough");
    for (int rank = 0; rank < N - 1; rank++)
        expect_failure(works[rank], RC_ABORTED, "enough");
    rc_call late = call_of(&t, N - 1, RC_CODEC_INT8, RC_AVG, 0); /* it ends at once */
    late.feedback = feedback[N - 1];
    expect_failure(submit(w->comms[N - 1], &late), RC_ABORTED, "enough");
    for (int rank = 0; rank < N; rank++) {
        CHECK_EQ(rc_feedback_undo(feedback[rank]), RC_OK); /* the call before succeeded */
        CHECK_EQ(rc_feedback_busy(feedback[rank]), 0);
        expect_unchanged(&before[rank], feedback[rank], "an abort");
    }
    close_feedback(feedback, N);
    free_tensors(&t);
    world_close(w);
}

/* A segment of a wrong length; nothing of it is used. */
static void lengths_must_be_exact(void)
{
    enum { COUNT = 1000 };
    static const int off[] = {-1, 1, 2, 64};
    static float src[COUNT], dst[COUNT];
    for (size_t i = 0; i < CHECK_COUNT(off); i++) {
        stage s = stage_open((stage_options){0});
        rc_feedback *feedback;
        CHECK_EQ(rc_feedback_create(&feedback, COUNT), RC_OK);
        rc_call call = small_call(RC_ALLREDUCE, dst, COUNT);
        call.src = src;
        call.codec = RC_CODEC_ONEBIT;
        call.feedback = feedback;
        rc_work *work = submit(s.comm, &call);
        uint8_t payload[512] = {0};
        frame_header h = data_header(&call, 0);
        h.chunk = 2;
        h.length = (uint32_t)(4 * (2 + 32) + off[i]);
        play(s.far[1][0], h, payload);
        expect_failure(work, RC_PROTOCOL, "bytes, not 136");
        CHECK_EQ(rc_feedback_busy(feedback), 0);
        rc_feedback_free(feedback);
        stage_close(&s);
    }
}

/* ---- whose turn ---- */

static void expect_refusal(rc_comm *comm, const rc_call *call, rc_result code, const char *text)
{
    rc_work *work = NULL;
    rc_error error;
    CHECK_EQ(rc_submit(comm, call, &work, &error), code);
    CHECK(work == NULL);
    if (!CHECK(strstr(error.message, text) != NULL))
        CHECK_NOTE("the error is: %s\n", error.message);
}

static void one_work_at_a_time(void)
{
    enum { COUNT = 100, N = 2 };
    world *w = world_open((world_options){.size = N});
    tensors t = make_tensors(N, COUNT), other = make_tensors(N, COUNT);
    rc_feedback *feedback[WORLD_MAX];
    open_feedback(feedback, N, COUNT);
    draw_values(&t);
    rc_call call = call_of(&t, 0, RC_CODEC_INT4, RC_SUM, 0);
    rc_call again = call_of(&other, 0, RC_CODEC_INT4, RC_SUM, 0);
    call.feedback = again.feedback = feedback[0];
    rc_work *first = submit(w->comms[0], &call);
    expect_refusal(w->comms[0], &again, RC_INVALID_STATE, "in use");
    rc_feedback_free(feedback[0]); /* the work keeps it */
    call = call_of(&t, 1, RC_CODEC_INT4, RC_SUM, 0);
    rc_work *second = submit(w->comms[1], &call);
    expect_done(first);
    expect_done(second);
    rc_feedback_free(feedback[1]);
    free_tensors(&t);
    free_tensors(&other);
    world_close(w);
}

static void what_does_not_fit_is_refused(void)
{
    enum { COUNT = 512, N = 2 };
    world *w = world_open((world_options){.size = N});
    tensors t = make_tensors(N, COUNT);
    rc_feedback *feedback[WORLD_MAX];
    open_feedback(feedback, N, COUNT);
    draw_values(&t);
    run_step(w, &t, feedback, RC_CODEC_INT4, RC_SUM, 0);
    rc_call call = call_of(&t, 0, RC_CODEC_INT4, RC_AVG, 0);
    call.feedback = feedback[0];
    expect_refusal(w->comms[0], &call, RC_INVALID_ARGUMENT, "another op");
    call.op = RC_SUM;
    call.count = COUNT - 1;
    expect_refusal(w->comms[0], &call, RC_INVALID_ARGUMENT, "512 elements does not fit");
    call.count = COUNT;
    call.op = RC_MAX;
    expect_refusal(w->comms[0], &call, RC_INVALID_ARGUMENT, "sums and averages");
    call.op = RC_SUM;
    call.collective = RC_BROADCAST;
    expect_refusal(w->comms[0], &call, RC_INVALID_ARGUMENT, "all-reduces");
    call.feedback = NULL;
    expect_refusal(w->comms[0], &call, RC_INVALID_ARGUMENT, "all-reduces");
    CHECK_EQ(rc_feedback_busy(feedback[0]), 0);
    for (int rank = 0; rank < N; rank++) /* zeros have no unit */
        CHECK_EQ(rc_feedback_load(feedback[rank], NULL, NULL, 0, 0), RC_OK);
    run_step(w, &t, feedback, RC_CODEC_INT4, RC_AVG, 0);
    close_feedback(feedback, N);
    free_tensors(&t);
    world_close(w);
}

/* ---- by itself ---- */

static void residuals_come_back_as_loaded(void)
{
    float worker[300], owner[20];
    rc_feedback *f;
    uint64_t start, count;
    for (int i = 0; i < 300; i++)
        worker[i] = (float)i;
    for (int i = 0; i < 20; i++)
        owner[i] = (float)-i;
    CHECK_EQ(rc_feedback_create(&f, 300), RC_OK);
    CHECK_EQ((uintptr_t)rc_feedback_worker(f) % 64, 0);
    CHECK_EQ(rc_feedback_load(f, worker, owner, 290, 11), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_feedback_load(f, worker, NULL, 0, 1), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_feedback_load(f, worker, owner, 280, 20), RC_OK);
    CHECK_EQ(rc_feedback_rescale(f, NAN), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_feedback_rescale(f, 1e39), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_feedback_rescale(f, 3e38), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_feedback_rescale(f, 0.5), RC_OK);
    const float *got = rc_feedback_owner(f, &start, &count);
    CHECK_EQ(start, 280);
    CHECK_EQ(count, 20);
    for (int i = 0; i < 300; i++)
        CHECK(rc_feedback_worker(f)[i] == 0.5F * worker[i]);
    for (int i = 0; i < 20; i++)
        CHECK(got[i] == 0.5F * owner[i]);
    rc_feedback_free(f);
}

/* What a work does not write must be zero afterwards, wherever it writes and whatever was there. */
static void what_is_known_of_zeros_is_true(void)
{
    enum { COUNT = 64 };
    rc_feedback *f;
    CHECK_EQ(feedback_create(&f, COUNT), RC_OK);
    for (int round = 0; round < 3000; round++) {
        uint64_t ends[4];
        for (int i = 0; i < 4; i++)
            ends[i] = draw_below(&seed, COUNT + 1);
        for (int i = 0; i < 4; i++)
            for (int k = i + 1; k < 4; k++)
                if (ends[k] < ends[i]) {
                    uint64_t swap = ends[i];
                    ends[i] = ends[k];
                    ends[k] = swap;
                }
        feedback_use use = {.worker = {ends[0], ends[3]}, .exact = {ends[1], ends[2]}, .fold = 1};
        feedback_view view;
        if (draw_below(&seed, 4) == 0)
            feedback_worker(f);
        CHECK_EQ(feedback_begin(f, &use, &view), RC_OK);
        for (uint64_t i = use.worker.start; i < use.worker.end; i++)
            if (i < use.exact.start || i >= use.exact.end)
                view.worker_out[i - use.worker.start] = (float)round + 1;
        if (draw_below(&seed, 3) == 0)
            continue; /* it failed */
        feedback_commit(f, RC_SUM);
        for (uint64_t i = 0; i < COUNT; i++) {
            int written = i >= use.worker.start && i < use.worker.end &&
                          (i < use.exact.start || i >= use.exact.end);
            CHECK(f->worker[f->now].data[i] == (written ? (float)round + 1 : 0.0F));
        }
    }
    feedback_release(f);
}

/* An owner's residuals that do not fit a work are in the worker's while it lasts. */
static void what_is_folded_comes_back(void)
{
    enum { COUNT = 64 };
    feedback_use use = {.worker = {0, COUNT}, .owner = {0, COUNT}, .fold = 3};
    float worker[COUNT], owner[8];
    uint64_t start, count;
    rc_feedback *f;
    rc_error error;
    for (int i = 0; i < COUNT; i++)
        worker[i] = 0.1F * (float)i;
    for (int i = 0; i < 8; i++)
        owner[i] = 0.3F;
    CHECK_EQ(feedback_create(&f, COUNT), RC_OK);
    CHECK_EQ(feedback_load(f, worker, owner, 16, 8), RC_OK);
    for (int undone = 0; undone < 2; undone++) {
        feedback_view view;
        CHECK_EQ(feedback_claim(f, &error), RC_OK);
        CHECK_EQ(feedback_begin(f, &use, &view), RC_OK);
        CHECK(view.worker_in[16] > 2.4F);
        memset(view.worker_out, 0, sizeof worker);
        memset(view.owner_out, 0, sizeof worker);
        if (undone)
            feedback_commit(f, RC_SUM);
        feedback_unclaim(f);
        feedback_undo(f);
        const float *left = rc_feedback_owner(f, &start, &count);
        CHECK_EQ(start, 16);
        CHECK_EQ(count, 8);
        CHECK(memcmp(left, owner, sizeof owner) == 0);
        CHECK(memcmp(rc_feedback_worker(f), worker, sizeof worker) == 0);
    }
    feedback_release(f);
}

static void a_step_that_is_taken_back_leaves_nothing(void)
{
    enum { COUNT = 64, OWNED = 8 };
    feedback_use use = {.worker = {0, COUNT}, .owner = {16, 16 + OWNED}, .fold = 1};
    feedback_view view;
    rc_feedback *f;
    uint64_t start, count;
    CHECK_EQ(feedback_create(&f, COUNT), RC_OK);
    CHECK_EQ(feedback_begin(f, &use, &view), RC_OK);
    for (int i = 0; i < COUNT; i++)
        view.worker_out[i] = 1.0F;
    for (int i = 0; i < OWNED; i++)
        view.owner_out[i] = 2.0F;
    feedback_commit(f, RC_SUM);
    for (int times = 0; times < 2; times++) {
        feedback_undo(f);
        rc_feedback_owner(f, &start, &count);
        CHECK_EQ(count, 0);
        for (int i = 0; i < COUNT; i++)
            CHECK(f->worker[f->now].data[i] == 0.0F);
    }
    feedback_release(f);
}

int main(void)
{
    static const check_test tests[] = {
        {"sums_of_results_are_sums_of_values", sums_of_results_are_sums_of_values},
        {"other_codecs_flush", other_codecs_flush},
        {"another_world_goes_on", another_world_goes_on},
        {"poison_changes_no_residual", poison_changes_no_residual},
        {"poison_reaches_all_hosts", poison_reaches_all_hosts},
        {"a_flush_that_is_not_finite_flushes_nothing", a_flush_that_is_not_finite_flushes_nothing},
        {"a_failure_changes_no_residual", a_failure_changes_no_residual},
        {"lengths_must_be_exact", lengths_must_be_exact},
        {"one_work_at_a_time", one_work_at_a_time},
        {"what_does_not_fit_is_refused", what_does_not_fit_is_refused},
        {"residuals_come_back_as_loaded", residuals_come_back_as_loaded},
        {"what_is_folded_comes_back", what_is_folded_comes_back},
        {"a_step_that_is_taken_back_leaves_nothing", a_step_that_is_taken_back_leaves_nothing},
        {"what_is_known_of_zeros_is_true", what_is_known_of_zeros_is_true},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
