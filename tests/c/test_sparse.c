/* test_sparse.c - flights whose codec is topk: what the GPU packs, beside ranks whose CPU does, is
 * what the rules say, bit for bit, with residuals that come and go; faults are seen, and failures
 * leave nothing behind.
 */
#include "../../csrc/plan/fingerprint.h"
#include "block_flights.h"
#include "topk_reference.h"

typedef enum values { RANDOM, EQUAL, ONE_PLACE, ZEROS, VALUES } values;

typedef struct setup {
    int size;
    uint64_t count;
    double density;
    rc_op op;
    uint32_t segment_bytes;
} setup;

static void fill(tensors *t, values kind, unsigned step)
{
    draw_values(t);
    for (int rank = 0; rank < t->size; rank++)
        for (uint64_t i = 0; i < t->count; i++)
            if (kind == EQUAL)
                t->src[rank][i] = i % 2 ? 1.5F : -1.5F;
            else if (kind == ONE_PLACE && i / 300 != step % 3)
                t->src[rank][i] *= 0x1p-20F;
            else if (kind == ZEROS)
                t->src[rank][i] = 0.0F;
}

/* ---- bits ---- */

static rc_call topk_call(const setup *s, rc_call call, rc_feedback *feedback)
{
    call.codec = RC_CODEC_TOPK;
    call.op = s->op;
    call.density = s->density;
    call.feedback = feedback;
    return call;
}

/* An all-reduce, of ranks of a set on the GPU and others on the host. 1 if all have the result. */
static int run_mixed(const flights *all, const setup *s, tensors *t, rc_feedback **feedback,
                     unsigned on_gpu, const float *want)
{
    rc_flight *in_flight[WORLD_MAX];
    rc_work *works[WORLD_MAX];
    cu_address at[WORLD_MAX];
    int right = 1;
    for (int rank = 0; rank < s->size; rank++) {
        rc_call call = call_of(t, rank, RC_CODEC_TOPK, s->op, 1);
        if (on_gpu >> rank & 1) {
            at[rank] = on_device(t->src[rank], s->count);
            call = topk_call(s, call_at(at[rank], s->count, RC_CODEC_TOPK, s->op), feedback[rank]);
            in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
        } else {
            call = topk_call(s, call, feedback[rank]);
            works[rank] = submit(all->world->comms[rank], &call);
        }
    }
    for (int rank = 0; rank < s->size; rank++) {
        if (on_gpu >> rank & 1) {
            CHECK_EQ(rc_flight_landed(in_flight[rank], WORLD_LONG_MS), RC_OK);
            rc_flight_free(in_flight[rank]);
            CHECK_EQ(fake_cuda_read(t->dst[rank], at[rank], s->count * sizeof(float)), 0);
            cuMemFree_v2(at[rank]);
        } else {
            expect_done(works[rank]);
        }
        right &= same(t->dst[rank], want, s->count, "result", rank);
    }
    return right;
}

/* Staging that has been used is not zeros. */
static void use_staging(const flights *all)
{
    enum { ELEMENTS = 100000 };
    static float values[ELEMENTS];
    rc_flight *in_flight[WORLD_MAX];
    cu_address at[WORLD_MAX];
    for (int i = 0; i < ELEMENTS; i++)
        values[i] = -1.5F;
    for (int rank = 0; rank < all->world->size; rank++) {
        at[rank] = on_device(values, ELEMENTS);
        rc_call call = call_at(at[rank], ELEMENTS, RC_CODEC_NONE, RC_SUM);
        in_flight[rank] = flights_submit(all, rank, &call, CU_LEGACY_STREAM);
    }
    flights_land(in_flight, at, all->world->size);
}

static void one_world(const setup *s, int with)
{
    uint64_t sent[WORLD_MAX];
    const world_options options = {.size = s->size, .segment_bytes = s->segment_bytes};
    flights *all = flights_open_in(options, "", ptx(), 4 << 20);
    formulas f = formulas_open(s->size, s->count, with);
    rc_call any = topk_call(s, call_at(0, s->count, RC_CODEC_TOPK, s->op), NULL);
    topk_job job = {fingerprint_density(fingerprint_of(&any)), 1,
                    all->world->comms[0]->env.segment_bytes};
    use_staging(all);
    for (unsigned step = 0; step < 6; step++, job.seq++) {
        unsigned on_gpu = step < 3 ? (1U << s->size) - 1 : (unsigned)draw_below(&seed, 16);
        fill(&f.t, step % VALUES, step);
        topk_allreduce(&f.ref, &job, s->op, f.t.src, f.want, sent);
        if (!run_mixed(all, s, &f.t, f.feedback, on_gpu, f.want))
            CHECK_NOTE("world %d, %llu elements, density %g, step %u, GPUs %x\n", s->size,
                       (unsigned long long)s->count, s->density, step, on_gpu);
        if (with && step < 3) /* before the last one they were looked at */
            CHECK((f.feedback[0]->twin != NULL) == (step < 2 || s->size == 2));
        if (with && step % 2 == 1)
            check_residuals(f.feedback, &f.ref);
    }
    if (with)
        check_residuals(f.feedback, &f.ref);
    CHECK(fake_cuda_calls("cuMemcpy2DAsync_v2") > 0);
    formulas_close(&f);
    flights_close(all);
    gpu_expect_clean();
}

static void it_is_what_the_rules_say(void)
{
    static const setup setups[] = {
        {2, 1, 0.5, RC_SUM, 0},         {2, 4500, 0.1, RC_AVG, 4096},
        {2, 40000, 0.01, RC_SUM, 0},    {3, 700, 0.05, RC_AVG, 0},
        {3, 300, 0.2, RC_SUM, 0}, /* rank 2 owns nothing, and rank 1 but 44 */
        {3, 5000, 0.001, RC_SUM, 4096}, {3, 5000, 0.1, RC_AVG, 4096},
        {3, 60000, 0.01249, RC_AVG, 0}, {4, 3000, 1.0, RC_SUM, 4096},
        {4, 9000, 0.3, RC_AVG, 8192},   {4, 200, 0.1, RC_SUM, 0}, /* all is rank 0's */
    };
    for (size_t i = 0; i < CHECK_COUNT(setups); i++)
        for (int with = 0; with <= 1; with++)
            one_world(&setups[i], with);
}

/* Whose value is not finite, ranks on the host and on the GPU find out alike. */
static void what_is_not_finite_is_found_by_all(void)
{
    const setup setups[] = {{2, 3000, 0.1, RC_AVG, 4096}, {3, 3000, 0.1, RC_SUM, 4096}};
    for (size_t i = 0; i < CHECK_COUNT(setups); i++)
        for (int guilty = 0; guilty < setups[i].size; guilty++) {
            const setup *s = &setups[i];
            rc_feedback *feedback[WORLD_MAX];
            float before[WORLD_MAX], nan[3000];
            flights *all = flights_open_in((world_options){.size = s->size, .segment_bytes = 4096},
                                           "", ptx(), 1 << 20);
            tensors t = make_tensors(s->size, s->count);
            open_feedback(feedback, s->size, s->count);
            for (int k = 0; k < 3000; k++)
                nan[k] = NAN;
            fill(&t, RANDOM, 0);
            t.src[guilty][2999 * guilty / s->size] = -INFINITY;
            for (int rank = 0; rank < s->size; rank++)
                before[rank] = rc_feedback_worker(feedback[rank])[7] = 0x1p-30F;
            run_mixed(all, s, &t, feedback, guilty == 1 ? 7 : 2, nan);
            for (int rank = 0; rank < s->size; rank++)
                CHECK(rc_feedback_worker(feedback[rank])[7] == before[rank]);
            close_feedback(feedback, s->size);
            free_tensors(&t);
            flights_close(all);
            gpu_expect_clean();
        }
}

/* ---- faults and failures ---- */

static void faults_are_seen(void)
{
    const setup s = {3, FLIGHTS_COUNT, 1.0, RC_SUM, 0};
    expect_faults_seen(s.size, topk_call(&s, flights_call(0), NULL));
}

static void failures_leave_nothing_behind(void)
{
    const setup s = {3, 3000, 0.1, RC_AVG, 0};
    expect_clean_failures(s.size, topk_call(&s, call_at(0, s.count, 0, 0), NULL));
}

int main(void)
{
    const check_test tests[] = {
        {"it is what the rules say", it_is_what_the_rules_say},
        {"what is not finite is found by all", what_is_not_finite_is_found_by_all},
        {"faults are seen", faults_are_seen},
        {"failures leave nothing behind", failures_leave_nothing_behind},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
