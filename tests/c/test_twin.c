/* test_twin.c - residuals in the memory of a device, played by the host: they come home for
 * whatever is done with them, go there again, and are never lost but with the device.
 */
#include "../../csrc/coll/twin.h"

#include <pthread.h>

#include "../../csrc/base/error.h"
#include "quant_world.h"

enum { COUNT = 1000 };
#define OWN {256, 512}
static const feedback_range own = OWN;

/* ---- a device that is none ---- */

typedef struct device_twin {
    feedback_twin base;
    float *buffers[2];
    int fetches, stores, clears, broken;
} device_twin;

static int dropped;

static rc_result fetch(feedback_twin *twin, int buffer, float *to, feedback_range range,
                       rc_error *error)
{
    device_twin *t = (device_twin *)twin;
    t->fetches++;
    if (t->broken)
        return error_set(error, RC_DEVICE, "it is broken");
    memcpy(to, t->buffers[buffer] + range.start, (range.end - range.start) * sizeof *to);
    return RC_OK;
}

static rc_result store(feedback_twin *twin, int buffer, const float *from, feedback_range range,
                       rc_error *error)
{
    device_twin *t = (device_twin *)twin;
    (void)error;
    t->stores++;
    memcpy(t->buffers[buffer] + range.start, from, (range.end - range.start) * sizeof *from);
    return RC_OK;
}

static rc_result clear(feedback_twin *twin, int buffer, feedback_range range, rc_error *error)
{
    device_twin *t = (device_twin *)twin;
    (void)error;
    t->clears++;
    memset(t->buffers[buffer] + range.start, 0, (range.end - range.start) * sizeof(float));
    return RC_OK;
}

static void drop(feedback_twin *twin)
{
    device_twin *t = (device_twin *)twin;
    free(t->buffers[0]);
    free(t->buffers[1]);
    free(t);
    dropped++;
}

static const twin_calls calls = {fetch, store, clear, drop};

/* Memory that was never written is NaN. */
static device_twin *attach(rc_feedback *f)
{
    device_twin *t = calloc(1, sizeof *t);
    t->base = (feedback_twin){&calls, t, f};
    for (int i = 0; i < 2; i++) {
        t->buffers[i] = malloc(COUNT * sizeof(float));
        memset(t->buffers[i], 0xff, COUNT * sizeof(float));
    }
    twin_attach(f, &t->base);
    return t;
}

/* ---- works ---- */

static const feedback_use whole = {.worker = {0, COUNT}, .exact = OWN, .owner = OWN, .fold = 1.0};

/* What a GPU does: what is left is what was, and so much more; then the core's part of it. */
static void run(rc_feedback *f, device_twin *t, float more, int succeeds)
{
    twin_view view;
    rc_error error;
    CHECK(feedback_claim(f));
    CHECK(twin_suits(f, &whole, RC_SUM));
    CHECK_EQ(twin_begin(f, &whole, &view, &error), RC_OK);
    CHECK_EQ(view.out, !f->now);
    for (uint64_t i = 0; i < COUNT; i++)
        if (i < own.start || i >= own.end)
            t->buffers[view.out][i] = (view.in < 0 ? 0.0F : t->buffers[view.in][i]) + more;
    CHECK(feedback_take_ready(f));
    for (uint64_t i = 0; i < own.end - own.start; i++)
        f->ready.owner_out[i] = (f->ready.owner_in != NULL ? f->ready.owner_in[i] : 0.0F) + more;
    if (succeeds)
        feedback_commit(f, RC_SUM);
    feedback_unclaim(f);
}

static int is(rc_feedback *f, float value)
{
    uint64_t start, count;
    const float *worker = rc_feedback_worker(f), *owner = rc_feedback_owner(f, &start, &count);
    int right = worker != NULL && count == own.end - own.start && start == own.start;
    for (uint64_t i = 0; i < COUNT && right; i++)
        right = worker[i] == (i >= own.start && i < own.end ? 0.0F : value);
    for (uint64_t i = 0; i < count && right; i++)
        right = owner[i] == value;
    return right;
}

static rc_feedback *make(device_twin **t)
{
    rc_feedback *f;
    CHECK_EQ(rc_feedback_create(&f, COUNT), RC_OK);
    *t = attach(f);
    dropped = 0;
    return f;
}

/* ---- tests ---- */

static void works_read_what_works_have_left(void)
{
    device_twin *t;
    rc_feedback *f = make(&t);
    run(f, t, 1.0F, 1);
    run(f, t, 1.0F, 1);
    run(f, t, 5.0F, 0); /* it fails, and has changed nothing */
    run(f, t, 1.0F, 1);
    CHECK_EQ(t->stores + t->fetches, 0);
    CHECK_EQ(t->clears, 2); /* the own part of either */
    CHECK(is(f, 3.0F));
    CHECK_EQ(t->fetches, 1);
    CHECK(is(f, 3.0F));
    CHECK_EQ(t->fetches, 1);
    rc_feedback_free(f);
    CHECK_EQ(dropped, 1);
}

static void what_is_done_at_home_is_done_away(void)
{
    device_twin *t;
    rc_feedback *f = make(&t);
    run(f, t, 1.0F, 1);
    CHECK_EQ(rc_feedback_rescale(f, 0.5), RC_OK);
    run(f, t, 1.0F, 1);
    CHECK_EQ(t->fetches, 1);
    CHECK_EQ(t->stores, 1);
    run(f, t, 1.0F, 1);
    CHECK_EQ(rc_feedback_undo(f), RC_OK);
    CHECK_EQ(t->fetches, 1);
    run(f, t, 2.0F, 1);
    CHECK_EQ(rc_feedback_undo(f), RC_OK);
    CHECK(is(f, 1.5F));
    CHECK_EQ(rc_feedback_undo(f), RC_OK); /* a look is no work, and there is nothing to undo */
    CHECK(is(f, 1.5F));
    CHECK_EQ(rc_feedback_load(f, NULL, NULL, 0, 0), RC_OK);
    t->broken = 1; /* what is replaced need not be fetched */
    run(f, t, 7.0F, 1);
    CHECK_EQ(rc_feedback_load(f, NULL, NULL, 0, 0), RC_OK);
    CHECK(rc_feedback_worker(f)[0] == 0.0F);
    rc_feedback_free(f);
}

static void what_it_cannot_do_does_not_suit(void)
{
    device_twin *t;
    rc_feedback *f = make(&t);
    feedback_use other = whole;
    run(f, t, 1.0F, 1);
    CHECK(twin_suits(f, &whole, RC_SUM));
    CHECK(!twin_suits(f, &whole, RC_AVG));
    other.owner.end--;
    CHECK(!twin_suits(f, &other, RC_SUM)); /* it would fold */
    other = whole;
    other.exact.start--;
    CHECK(!twin_suits(f, &other, RC_SUM)); /* it would add what is left there */
    CHECK(is(f, 1.0F));
    CHECK(!twin_suits(f, &whole, RC_SUM)); /* it may have been written there */
    rc_feedback_free(f);
}

/* As an all-reduce of a host tensor would have left it. */
static void a_work_of_the_cpu_has_them_at_home(void)
{
    rc_feedback *feedback[WORLD_MAX], *reference[WORLD_MAX];
    world *w = world_open((world_options){.size = 3, .segment_bytes = 4096});
    tensors t = make_tensors(3, COUNT);
    open_feedback(feedback, 3, COUNT);
    open_feedback(reference, 3, COUNT);
    dropped = 0;
    device_twin *twin = attach(feedback[1]);
    for (int step = 0; step < 3; step++) {
        uint64_t start, count;
        draw_values(&t);
        run_step(w, &t, reference, RC_CODEC_INT4, RC_SUM, 0);
        if (step == 1) { /* as if the GPU had done the step before */
            CHECK(feedback_claim(feedback[1]));
            twin = attach(feedback[1]);
            twin_view view;
            rc_error error;
            const feedback_use use = {
                .worker = {0, COUNT}, .exact = feedback[1]->owned, .owner = feedback[1]->owned};
            CHECK_EQ(twin_begin(feedback[1], &use, &view, &error), RC_OK);
            CHECK_EQ(twin->stores, 1);
            for (uint64_t i = 0; i < COUNT; i++)
                twin->buffers[view.out][i] = twin->buffers[view.in][i];
            CHECK(feedback_take_ready(feedback[1]));
            memcpy(feedback[1]->ready.owner_out, feedback[1]->ready.owner_in,
                   (use.owner.end - use.owner.start) * sizeof(float));
            feedback_commit(feedback[1], RC_SUM);
            feedback_unclaim(feedback[1]);
        }
        run_step(w, &t, feedback, RC_CODEC_INT4, RC_SUM, 0);
        for (int rank = 0; rank < 3; rank++) {
            const float *want = rc_feedback_owner(reference[rank], &start, &count);
            same(rc_feedback_owner(feedback[rank], &start, &count), want, count, "owner", rank);
            same(rc_feedback_worker(feedback[rank]), rc_feedback_worker(reference[rank]), COUNT,
                 "worker", rank);
        }
    }
    CHECK_EQ(dropped, 2);
    CHECK(feedback[1]->twin == NULL);
    close_feedback(feedback, 3);
    close_feedback(reference, 3);
    free_tensors(&t);
    world_close(w);
}

static void what_a_device_takes_with_it_is_lost_and_said_so(void)
{
    device_twin *t;
    rc_error error;
    rc_work *work;
    float values[COUNT] = {0};
    world *w = world_open((world_options){.size = 2});
    rc_feedback *f = make(&t);
    run(f, t, 1.0F, 1);
    t->broken = 1;
    error_clear(&error);
    rc_call call = small_call(RC_ALLREDUCE, values, COUNT);
    call.codec = RC_CODEC_INT8;
    call.feedback = f;
    CHECK_EQ(rc_submit(w->comms[0], &call, &work, &error), RC_DEVICE);
    CHECK(!rc_feedback_busy(f));
    CHECK_EQ(dropped, 0); /* it may be for this time only */
    t->broken = 0;
    run(f, t, 1.0F, 1);
    t->broken = 1;
    CHECK_EQ(twin_recall(f, t, &error), RC_DEVICE);
    CHECK_EQ(dropped, 1);
    CHECK(rc_feedback_worker(f) == NULL);
    CHECK_EQ(rc_feedback_rescale(f, 2.0), RC_DEVICE);
    CHECK(!twin_suits(f, &whole, RC_SUM));
    error_clear(&error);
    CHECK_EQ(rc_submit(w->comms[0], &call, &work, &error), RC_DEVICE);
    CHECK(strstr(error.message, "on a GPU that has failed") != NULL);
    values[3] = 4.0F;
    CHECK_EQ(rc_feedback_load(f, values, NULL, 0, 0), RC_OK);
    CHECK(rc_feedback_worker(f)[3] == 4.0F);
    rc_feedback_free(f);
    world_close(w);
}

static void a_device_that_goes_leaves_them_at_home(void)
{
    device_twin *t, *other;
    rc_feedback *f = make(&t);
    run(f, t, 1.0F, 1);
    run(f, t, 1.0F, 1);
    CHECK_EQ(twin_recall(f, t, NULL), RC_OK);
    CHECK_EQ(dropped, 1);
    CHECK_EQ(twin_recall(f, t, NULL), RC_OK); /* it has gone */
    other = attach(f);
    run(f, other, 1.0F, 1);
    CHECK_EQ(twin_recall(f, other, NULL), RC_OK);
    CHECK_EQ(rc_feedback_undo(f), RC_OK); /* the one before is at home, too */
    CHECK(is(f, 2.0F));
    rc_feedback_free(f);
}

/* ---- several threads ---- */

static void *look(void *f)
{
    for (int i = 0; i < 50; i++)
        CHECK(rc_feedback_worker(f)[0] == 2.0F);
    return NULL;
}

static void a_device_may_go_while_somebody_looks(void)
{
    for (int i = 0; i < 20; i++) {
        pthread_t thread;
        device_twin *t;
        rc_feedback *f = make(&t);
        run(f, t, 1.0F, 1);
        run(f, t, 1.0F, 1);
        CHECK(feedback_retain_living(f));
        CHECK_EQ(pthread_create(&thread, NULL, look, f), 0);
        CHECK_EQ(twin_recall(f, t, NULL), RC_OK);
        feedback_release(f);
        CHECK_EQ(pthread_join(thread, NULL), 0);
        CHECK(is(f, 2.0F));
        rc_feedback_free(f);
        CHECK_EQ(dropped, 1);
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"works_read_what_works_have_left", works_read_what_works_have_left},
        {"what_is_done_at_home_is_done_away", what_is_done_at_home_is_done_away},
        {"what_it_cannot_do_does_not_suit", what_it_cannot_do_does_not_suit},
        {"a_work_of_the_cpu_has_them_at_home", a_work_of_the_cpu_has_them_at_home},
        {"what_a_device_takes_with_it_is_lost_and_said_so",
         what_a_device_takes_with_it_is_lost_and_said_so},
        {"a_device_that_goes_leaves_them_at_home", a_device_that_goes_leaves_them_at_home},
        {"a_device_may_go_while_somebody_looks", a_device_may_go_while_somebody_looks},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
