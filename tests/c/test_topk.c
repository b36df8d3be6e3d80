/* test_topk.c - all-reduces that send the largest elements only: bit for bit what their rules give,
 * nothing lost over many steps, no more bytes than agreed whatever the values are, and payloads
 * that are refused.
 */
#include <float.h>

#include "../../csrc/codec/topk.h"
#include "peer.h"
#include "topk_reference.h"

static uint64_t seed = 88172645463325252u;

typedef enum values { RANDOM, EQUAL, FEW, ONE_PLACE, SMALL_NUMBERS, VALUES } values;

static const char *const value_names[] = {"random", "equal", "few", "one place", "small numbers"};

typedef struct setup {
    int size;
    uint64_t count;
    double density;
    rc_op op;
    values values;
    uint32_t segment_bytes;
    int in_place, steps;
} setup;

static void fill_values(float *x, uint64_t n, values kind, int step)
{
    fill_random(x, RC_F32, n, &seed);
    for (uint64_t i = 0; i < n; i++) {
        if (kind == EQUAL)
            x[i] = i % 2 ? 1.5F : -1.5F;
        else if (kind == FEW && draw_below(&seed, 1000) > 3)
            x[i] = i % 3 ? 0.0F : -0.0F;
        else if (kind == ONE_PLACE && i / 512 != (uint64_t)(step % 3))
            x[i] *= 0x1p-20F;
        else if (kind == SMALL_NUMBERS)
            x[i] = (float)((int)draw_below(&seed, 5) - 2) * 0x1p-149F;
    }
}

/* All ranks' tensors and residuals, and what they must be. */
typedef struct bench {
    world *w;
    float *src[WORLD_MAX], *dst[WORLD_MAX], *want;
    rc_feedback *feedback[WORLD_MAX];
    qref_world ref;
} bench;

static bench bench_open(const setup *s, int feedback)
{
    bench b = {.w = world_open((world_options){.size = s->size, .segment_bytes = s->segment_bytes}),
               .want = calloc(s->count + 1, sizeof(float)),
               .ref = qref_open(s->size, s->count, feedback)};
    for (int rank = 0; rank < s->size; rank++) {
        b.src[rank] = calloc(s->count + 1, sizeof(float));
        b.dst[rank] = calloc(s->count + 1, sizeof(float));
        if (feedback)
            CHECK_EQ(rc_feedback_create(&b.feedback[rank], s->count), RC_OK);
    }
    return b;
}

static void bench_close(bench *b)
{
    for (int rank = 0; rank < b->ref.size; rank++) {
        free(b->src[rank]);
        free(b->dst[rank]);
        rc_feedback_free(b->feedback[rank]);
    }
    free(b->want);
    world_close(b->w);
    qref_close(&b->ref);
}

static rc_call call_of(const bench *b, const setup *s, int rank)
{
    rc_call call = small_call(RC_ALLREDUCE, b->dst[rank], s->count);
    call.codec = RC_CODEC_TOPK;
    call.density = s->density;
    call.op = s->op;
    call.feedback = b->feedback[rank];
    if (s->in_place && s->count > 0)
        memcpy(b->dst[rank], b->src[rank], s->count * sizeof(float));
    else
        call.src = b->src[rank];
    return call;
}

static void run_step(bench *b, const setup *s)
{
    rc_work *works[WORLD_MAX];
    for (int rank = 0; rank < s->size; rank++) {
        rc_call call = call_of(b, s, rank);
        works[rank] = submit(b->w->comms[rank], &call);
    }
    for (int rank = 0; rank < s->size; rank++)
        if (works[rank] != NULL)
            expect_done(works[rank]);
}

static uint64_t payload_sent(const bench *b, int rank)
{
    rc_comm_stats stats;
    rc_comm_stats_get(b->w->comms[rank], &stats);
    return stats.payload_bytes;
}

/* zeros: those of both signs are equal. */
static int alike(const float *got, const float *want, uint64_t n, int zeros, const char *what,
                 int rank)
{
    uint64_t i = 0;
    while (i < n && (memcmp(&got[i], &want[i], sizeof *got) == 0 || (zeros && got[i] == want[i])))
        i++;
    if (!CHECK(i == n))
        CHECK_NOTE("%s of rank %d, element %llu of %llu: got %a, want %a\n", what, rank,
                   (unsigned long long)i, (unsigned long long)n, (double)got[i], (double)want[i]);
    return i == n;
}

static int same(const float *got, const float *want, uint64_t n, const char *what, int rank)
{
    return alike(got, want, n, 0, what, rank);
}

/* Whether a residual of 0, which turns -0 into 0, is added at all is left open. */
static int same_residuals(bench *b)
{
    int equal = 1;
    for (int rank = 0; rank < b->ref.size && b->ref.feedback; rank++) {
        uint64_t start, count;
        const float *owner = rc_feedback_owner(b->feedback[rank], &start, &count);
        equal &= alike(rc_feedback_worker(b->feedback[rank]), b->ref.worker[rank], b->ref.count, 1,
                       "worker", rank);
        equal &= count == 0 || alike(owner, b->ref.owner[rank] + start, count, 1, "owner", rank);
    }
    return equal;
}

static void one_setup(const setup *s, int feedback)
{
    bench b = bench_open(s, feedback);
    int equal = 1;
    for (int step = 0; step < s->steps && equal; step++) {
        uint64_t sent[QREF_MAX_WORLD], before[WORLD_MAX];
        topk_job job = {s->density, (uint64_t)step, s->segment_bytes};
        for (int rank = 0; rank < s->size; rank++) {
            fill_values(b.src[rank], s->count, s->values, step);
            before[rank] = payload_sent(&b, rank);
        }
        topk_allreduce(&b.ref, &job, s->op, b.src, b.want, sent);
        run_step(&b, s);
        for (int rank = 0; rank < s->size; rank++) {
            equal &= same(b.dst[rank], b.want, s->count, "result", rank);
            equal &= CHECK_EQ(payload_sent(&b, rank) - before[rank], 6 * sent[rank]);
        }
        equal &= same_residuals(&b);
    }
    if (!equal)
        CHECK_NOTE("world %d count %llu density %g op %d %s segment %u in place %d feedback %d\n",
                   s->size, (unsigned long long)s->count, s->density, s->op, value_names[s->values],
                   s->segment_bytes, s->in_place, feedback);
    bench_close(&b);
}

static void all_reduce_is_what_the_rules_give(void)
{
    static const int sizes[] = {2, 3, 4, 5, 8};
    static const double densities[] = {0.01, 0.1, 0.001, 0.5, 1.0};
    for (size_t w = 0; w < CHECK_COUNT(sizes); w++) {
        int n = sizes[w];
        const uint64_t counts[] = {0, 1, (uint64_t)n - 1, 255, 256, 257, 3001, 100003};
        for (size_t c = 0; c < CHECK_COUNT(counts); c++)
            for (size_t d = 0; d < CHECK_COUNT(densities); d++) {
                size_t at = w + c + d;
                setup s = {n,
                           counts[c],
                           densities[d],
                           at % 2 ? RC_AVG : RC_SUM,
                           (values)(at % VALUES),
                           c % 2 ? 4096 : 256 << 10,
                           at % 3 == 0,
                           3};
                one_setup(&s, at % 4 != 1);
            }
    }
}

static void whatever_the_values_are(void)
{
    for (int kind = 0; kind < VALUES; kind++)
        for (int size = 2; size <= 4; size += 2) {
            setup s = {size, 60000, 0.01, RC_SUM, (values)kind, 64 << 10, 0, 6};
            one_setup(&s, 1);
        }
}

/* ---- nothing is lost, and little is sent ---- */

/* Over many steps what comes out is what went in, less what is left. Contributions are as many as
 * the density says, results half as many again, give or take a tenth, in any world. */
static void nothing_is_lost(void)
{
    static const int sizes[] = {2, 3, 4, 5, 8};
    enum { COUNT = 20011, STEPS = 200 };
    for (size_t w = 0; w < CHECK_COUNT(sizes); w++) {
        setup s = {sizes[w], COUNT, 0.02, w % 2 ? RC_AVG : RC_SUM, RANDOM, 32 << 10, 0, STEPS};
        bench b = bench_open(&s, 1);
        double *in = calloc(COUNT, sizeof *in), *out = calloc(COUNT, sizeof *out), worst = 0.0;
        double by = s.op == RC_AVG ? 1.0 / s.size : 1.0;
        for (int step = 0; step < STEPS; step++) {
            for (int rank = 0; rank < s.size; rank++) {
                fill_values(b.src[rank], COUNT, RANDOM, step);
                for (int i = 0; i < COUNT; i++)
                    in[i] += (double)b.src[rank][i] * by;
            }
            run_step(&b, &s);
            for (int i = 0; i < COUNT; i++)
                out[i] += (double)b.dst[0][i];
        }
        for (int rank = 0; rank < s.size; rank++) {
            uint64_t start, count;
            const float *owner = rc_feedback_owner(b.feedback[rank], &start, &count);
            const float *worker = rc_feedback_worker(b.feedback[rank]);
            for (int i = 0; i < COUNT; i++)
                in[i] -= (double)worker[i] * by;
            for (uint64_t i = 0; i < count; i++)
                in[start + i] -= (double)owner[i];
        }
        for (int i = 0; i < COUNT; i++)
            worst = fmax(worst, fabs(in[i] - out[i]));
        CHECK(worst < 1e-2);
        double share = (double)payload_sent(&b, 0) / 6 / STEPS / COUNT;
        double want = s.density * (s.size == 2 ? 1.0 : 2.5 * (s.size - 1) / s.size);
        if (!CHECK(share > 0.9 * want && share < 1.1 * want))
            CHECK_NOTE("world %d: %g of all elements, not %g\n", s.size, share, want);
        free(in);
        free(out);
        bench_close(&b);
    }
}

/* ---- poison ---- */

static void poison_reaches_all_and_changes_nothing(void)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY, FLT_MAX};
    for (int size = 2; size <= 4; size++)
        for (size_t k = 0; k < CHECK_COUNT(bad); k++)
            for (int where = 0; where < size; where++) {
                setup s = {size, 5000, 0.001, RC_SUM, RANDOM, 8192, 0, 1};
                bench b = bench_open(&s, 1);
                float *kept = malloc(s.count * sizeof *kept);
                for (int rank = 0; rank < size; rank++)
                    fill_values(b.src[rank], s.count, RANDOM, 0);
                run_step(&b, &s);
                memcpy(kept, rc_feedback_worker(b.feedback[where]), s.count * sizeof *kept);
                uint64_t at = draw_below(&seed, s.count);
                for (int rank = 0; rank < size; rank++)
                    if (rank == where || bad[k] == FLT_MAX) /* whose sum is too large */
                        b.src[rank][at] = bad[k];
                run_step(&b, &s);
                for (int rank = 0; rank < size; rank++) {
                    uint64_t numbers = 0;
                    for (uint64_t i = 0; i < s.count; i++)
                        numbers += b.dst[rank][i] == b.dst[rank][i];
                    CHECK_EQ(numbers, 0);
                }
                same(rc_feedback_worker(b.feedback[where]), kept, s.count, "residual", where);
                free(kept);
                bench_close(&b);
            }
}

/* ---- the other collectives ---- */

static int submit_all(const bench *b, const rc_call *calls)
{
    rc_work *works[WORLD_MAX];
    int done = 1;
    for (int rank = 0; rank < b->ref.size; rank++)
        works[rank] = submit(b->w->comms[rank], &calls[rank]);
    for (int rank = 0; rank < b->ref.size; rank++)
        done &= works[rank] != NULL && expect_done(works[rank]);
    return done;
}

/* Each rank's own part of a sum is dense, and exact but for what the others have left. */
static void reduce_scatter_keeps_the_rest(void)
{
    for (int size = 2; size <= 5; size++) {
        enum { COUNT = 3000 };
        setup s = {size, (uint64_t)COUNT * (uint64_t)size, 0.05, RC_SUM, RANDOM, 8192, 0, 1};
        bench b = bench_open(&s, 1);
        rc_call calls[WORLD_MAX];
        for (int rank = 0; rank < size; rank++) {
            fill_values(b.src[rank], s.count, RANDOM, 0);
            calls[rank] = call_of(&b, &s, rank);
            calls[rank].collective = RC_REDUCE_SCATTER;
            calls[rank].count = COUNT;
        }
        submit_all(&b, calls);
        for (int rank = 0; rank < size; rank++)
            for (int i = 0; i < COUNT; i++) {
                float sum = 0.0F;
                size_t at = (size_t)rank * COUNT + (size_t)i;
                for (int from = 0; from < size; from++)
                    sum += b.src[from][at] - rc_feedback_worker(b.feedback[from])[at];
                if (!CHECK(memcmp(&sum, &b.dst[rank][i], sizeof sum) == 0))
                    break;
            }
        bench_close(&b);
    }
}

static void all_gather_is_what_each_has_sent(void)
{
    for (int size = 2; size <= 5; size++) {
        setup s = {size, 3000, 0.05, RC_SUM, RANDOM, 8192, 0, 1};
        bench b = bench_open(&s, 1);
        rc_call calls[WORLD_MAX];
        for (int rank = 0; rank < size; rank++) {
            fill_values(b.src[rank], s.count, RANDOM, 0);
            free(b.dst[rank]);
            b.dst[rank] = calloc(s.count * (uint64_t)size, sizeof(float));
            calls[rank] = call_of(&b, &s, rank);
            calls[rank].collective = RC_ALLGATHER;
        }
        submit_all(&b, calls);
        for (int rank = 0; rank < size; rank++)
            for (int from = 0; from < size; from++) {
                const float *got = b.dst[rank] + (uint64_t)from * s.count;
                const float *left = rc_feedback_worker(b.feedback[from]);
                uint64_t kept = 0, wrong = 0;
                for (uint64_t i = 0; i < s.count; i++) {
                    kept += got[i] != 0.0F;
                    wrong += got[i] != b.src[from][i] - left[i];
                }
                CHECK_EQ(kept, 150);
                CHECK_EQ(wrong, 0);
            }
        bench_close(&b);
    }
}

/* f64 is rounded first; the result is the same. */
static void doubles_go_as_floats(void)
{
    for (int size = 2; size <= 3; size++) {
        enum { COUNT = 5003 };
        setup s = {size, COUNT, 0.02, RC_AVG, RANDOM, 8192, 0, 1};
        bench b = bench_open(&s, 1);
        double *wide[WORLD_MAX];
        rc_call calls[WORLD_MAX];
        uint64_t sent[QREF_MAX_WORLD];
        topk_job job = {s.density, 0, s.segment_bytes};
        for (int rank = 0; rank < size; rank++) {
            fill_values(b.src[rank], COUNT, RANDOM, 0);
            wide[rank] = malloc(COUNT * sizeof(double));
            for (int i = 0; i < COUNT; i++)
                wide[rank][i] = (double)b.src[rank][i] * (1.0 + 0x1p-40);
            calls[rank] = call_of(&b, &s, rank);
            calls[rank].dtype = RC_F64;
            calls[rank].src = calls[rank].dst = wide[rank];
        }
        topk_allreduce(&b.ref, &job, s.op, b.src, b.want, sent);
        submit_all(&b, calls);
        for (int rank = 0; rank < size; rank++) {
            for (int i = 0; i < COUNT; i++)
                b.dst[rank][i] = (float)wide[rank][i];
            same(b.dst[rank], b.want, COUNT, "result", rank);
            free(wide[rank]);
        }
        same_residuals(&b);
        bench_close(&b);
    }
}

/* ---- what is refused ---- */

static int valid(const uint16_t *index, size_t kept, size_t n)
{
    uint16_t wire[64] = {0};
    memcpy(wire, index, kept * sizeof *index);
    return topk_valid(wire, kept * TOPK_BYTES, n);
}

static void indices_are_checked(void)
{
    CHECK(valid((uint16_t[]){9}, 0, 0));
    CHECK(valid((uint16_t[]){0}, 1, 1));
    CHECK(!valid((uint16_t[]){0}, 1, 0));
    CHECK(!valid((uint16_t[]){1}, 1, 1));
    CHECK(valid((uint16_t[]){3, 4, 255}, 3, 256));
    CHECK(!valid((uint16_t[]){3, 4, 256}, 3, 256));
    CHECK(!valid((uint16_t[]){3, 3}, 2, 256));
    CHECK(!valid((uint16_t[]){4, 3}, 2, 256));
    CHECK(!valid((uint16_t[]){0, 1, 2}, 3, 2));
    CHECK(!valid((uint16_t[]){65535, 0}, 2, 32768));
    CHECK(valid((uint16_t[]){65535}, 1, 65536));
    CHECK(!topk_valid((uint16_t[8]){0}, 7, 256));
}

static rc_call staged_call(float *data)
{
    rc_call call = small_call(RC_ALLREDUCE, data, 256);
    call.codec = RC_CODEC_TOPK;
    call.density = 0.01;
    return call;
}

/* One frame with this payload, before or after the call. */
static void refused(const void *payload, uint32_t length, const char *text, int early)
{
    float data[256] = {1.0F};
    rc_call call = staged_call(data);
    stage s = stage_open((stage_options){0});
    frame_header h = data_header(&call, 0);
    rc_work *work = NULL;
    h.chunk = 2; /* from rank 1 to rank 0 */
    h.length = length;
    if (!early)
        work = submit(s.comm, &call);
    play(s.far[1][0], h, payload);
    if (early) {
        usleep(10000);
        work = submit(s.comm, &call);
    }
    expect_failure(work, RC_PROTOCOL, text);
    stage_close(&s);
}

static void payloads_that_are_none(void)
{
    uint8_t payload[PEER_SEGMENT] = {0};
    for (int early = 0; early <= 1; early++) {
        refused(payload, 7, "has 7 bytes", early);
        refused(payload, 257 * 6, "has 1542 bytes", early);
        refused(payload, 12, "is none of its codec", early);
        payload[1] = 1; /* index 256 */
        refused(payload, 6, "is none of its codec", early);
        payload[1] = 0;
    }
}

/* Whatever comes is refused or taken; nothing is written where it does not belong. */
static void any_bytes(void)
{
    for (int round = 0; round < 300; round++) {
        float data[256] = {1.0F};
        uint8_t payload[60];
        rc_call call = staged_call(data);
        stage s = stage_open((stage_options){0});
        frame_header h = data_header(&call, 0);
        rc_work *work = submit(s.comm, &call);
        size_t kept = draw_below(&seed, 10), index = draw_below(&seed, 100);
        for (size_t i = 0; i < sizeof payload; i++)
            payload[i] = (uint8_t)draw(&seed);
        for (size_t i = 0; i < kept && round % 4 > 0; i++, index += draw_below(&seed, 30)) {
            payload[2 * i] = (uint8_t)index;
            payload[2 * i + 1] = 0;
        }
        int good = topk_valid(payload, kept * TOPK_BYTES, 256);
        h.chunk = 2;
        h.length = (uint32_t)(kept * TOPK_BYTES);
        play(s.far[1][0], h, payload);
        if (good)
            expect_done(work);
        else
            expect_failure(work, RC_PROTOCOL, "is none of its codec");
        stage_close(&s);
    }
}

static void densities_are_checked(void)
{
    static const double bad[] = {0.0, -0.1, 1.0000001, INFINITY, NAN};
    float data[16] = {0};
    world *w = world_open((world_options){.size = 2});
    for (size_t i = 0; i < CHECK_COUNT(bad); i++) {
        rc_call call = staged_call(data);
        rc_work *work = NULL;
        rc_error error;
        call.density = bad[i];
        CHECK_EQ(rc_submit(w->comms[0], &call, &work, &error), RC_INVALID_ARGUMENT);
        CHECK(strstr(error.message, "density") != NULL);
    }
    world_close(w);
}

static void ranks_that_differ_in_density_find_out(void)
{
    float data[2][256] = {{0}};
    rc_work *works[2];
    world *w = world_open((world_options){.size = 2});
    for (int rank = 0; rank < 2; rank++) {
        rc_call call = staged_call(data[rank]);
        call.density = rank ? 0.001 : 0.01;
        works[rank] = submit(w->comms[rank], &call);
    }
    for (int rank = 0; rank < 2; rank++)
        expect_failure(works[rank], RC_MISMATCH, "compression=topk:0.001");
    world_close(w);
}

/* Pointers are made into the room, so there has to be one, also of a call without elements. */
static void nothing_has_room(void)
{
    float data[1] = {0};
    static const rc_dtype dtypes[] = {RC_F32, RC_F64};
    world *w = world_open((world_options){.size = 2});
    for (size_t i = 0; i < CHECK_COUNT(dtypes); i++) {
        rc_work *works[2];
        for (int rank = 0; rank < 2; rank++) {
            rc_call call = staged_call(data);
            call.dtype = dtypes[i];
            call.count = 0;
            works[rank] = submit(w->comms[rank], &call);
        }
        for (int rank = 0; rank < 2; rank++)
            expect_done(works[rank]);
    }
    world_close(w);
    topk none = {0};
    CHECK(topk_room(&none, &(topk_source){0}, (topk_segments){0}) > 0);
}

int main(void)
{
    static const check_test tests[] = {
        {"all_reduce_is_what_the_rules_give", all_reduce_is_what_the_rules_give},
        {"whatever_the_values_are", whatever_the_values_are},
        {"nothing_is_lost", nothing_is_lost},
        {"poison_reaches_all_and_changes_nothing", poison_reaches_all_and_changes_nothing},
        {"reduce_scatter_keeps_the_rest", reduce_scatter_keeps_the_rest},
        {"all_gather_is_what_each_has_sent", all_gather_is_what_each_has_sent},
        {"doubles_go_as_floats", doubles_go_as_floats},
        {"indices_are_checked", indices_are_checked},
        {"payloads_that_are_none", payloads_that_are_none},
        {"any_bytes", any_bytes},
        {"densities_are_checked", densities_are_checked},
        {"nothing_has_room", nothing_has_room},
        {"ranks_that_differ_in_density_find_out", ranks_that_differ_in_density_find_out},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
