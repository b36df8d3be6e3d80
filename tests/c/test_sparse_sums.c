/* test_sparse_sums.c - the sum of payloads is that of what they say, in their order; and payloads
 * that no rank makes are refused.
 */
#include <math.h>

#include "../../csrc/sparse/payload.h"
#include "check.h"
#include "sparse_values.h"

enum { PAYLOADS = 3 };

static rc_sparse_entries room_for(const rc_sparse_format *f, uint64_t count)
{
    uint64_t most = rc_sparse_most(f, count, PAYLOADS);
    return (rc_sparse_entries){calloc(count / f->chunk + 1, sizeof(uint32_t)),
                               calloc(most + 1, sizeof(uint16_t)),
                               calloc(most * f->block + 1, sizeof(float))};
}

static void let_go(rc_sparse_entries *e)
{
    free(e->counts), free(e->index), free(e->values);
}

/* Sends delta; what was sent of it becomes dense. */
static uint8_t *send(const rc_sparse_format *f, uint64_t count, float *dense)
{
    float *delta = sparse_fill(count), *left = sparse_fill(count);
    uint8_t *wire = calloc(1, rc_sparse_bytes(f, count) + 1);
    int poisoned;
    rc_sparse_select(f, NULL, wire, left, NULL, delta, 1.0F, count, &poisoned);
    for (uint64_t i = 0; i < count; i++)
        dense[i] = delta[i] - left[i];
    free(delta), free(left);
    return wire;
}

static void join_once(const rc_sparse_format *f, uint64_t count, float factor)
{
    float *sent[PAYLOADS], *got = sparse_fill(count), *added = calloc(count, sizeof *added);
    uint8_t *wires[PAYLOADS];
    rc_sparse_entries out = room_for(f, count);
    uint64_t total = 0;
    int poisoned, wrong;
    for (int p = 0; p < PAYLOADS; p++) {
        sent[p] = sparse_fill(count);
        wires[p] = send(f, count, sent[p]);
    }
    CHECK_EQ(rc_sparse_join(f, NULL, (const uint8_t *const *)wires, PAYLOADS, factor, count, &out,
                            &total, &poisoned, &wrong),
             RC_OK);
    CHECK_EQ(poisoned, 0);
    CHECK(total <= rc_sparse_most(f, count, PAYLOADS));
    CHECK_EQ(rc_sparse_scatter(f, NULL, &out, got, count), RC_OK);
    CHECK_EQ(rc_sparse_add(f, &out, 2.0F, added, count), RC_OK);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t start = i - i % f->chunk % f->block;
        float want = 0.0F;
        int senders = 0;
        for (int p = 0; p < PAYLOADS; p++) {
            int there = 0;
            for (uint64_t e = start; e < start + f->block && e < count; e++)
                there |= sent[p][e] != 0.0F;
            senders += there;
            want += sent[p][i];
        }
        want *= factor != 0.0F ? factor : 1.0F / (float)(senders > 0 ? senders : 1);
        if (!CHECK(got[i] == want))
            CHECK_NOTE("element %zu: %g instead of %g\n", (size_t)i, (double)got[i], (double)want);
        CHECK(added[i] == 2.0F * want);
    }
    for (int p = 0; p < PAYLOADS; p++)
        free(sent[p]), free(wires[p]);
    free(got), free(added), let_go(&out);
}

static void sums_are_those_of_the_payloads(void)
{
    static const uint64_t counts[] = {1, 17, 4096, 9001};
    for (size_t f = 0; f < CHECK_COUNT(sparse_formats); f++) {
        for (size_t i = 0; i < CHECK_COUNT(counts); i++) {
            join_once(&sparse_formats[f], counts[i], 0.25F);
            join_once(&sparse_formats[f], counts[i], 0.0F);
        }
    }
}

static void no_payload_is_refused(void)
{
    const rc_sparse_format f = {1008, 1, 20, RC_BF16};
    rc_sparse_entries out = room_for(&f, 2000);
    float dense[2000];
    uint8_t *good = send(&f, 2000, dense), *bad = send(&f, 2000, dense);
    const uint8_t *wires[] = {good, bad};
    uint64_t total;
    int poisoned, wrong, refused = 0;
    for (int trial = 0; trial < 200; trial++) {
        size_t bytes = sparse_chunk_at(&f, 2000, 0).index_bytes;
        for (size_t i = 0; i < bytes; i++)
            bad[i] = (uint8_t)draw_below(&sparse_seed, 256);
        rc_result result =
            rc_sparse_join(&f, NULL, wires, 2, 1.0F, 2000, &out, &total, &poisoned, &wrong);
        if (result == RC_PROTOCOL && CHECK_EQ(wrong, 1))
            refused++;
    }
    CHECK_EQ(refused, 200); /* that 20 at random ascend is less likely than anything */
    free(good), free(bad), let_go(&out);
}

static void sums_that_are_not_finite_are_told(void)
{
    const rc_sparse_format f = {16, 1, 2, RC_F32};
    rc_sparse_entries out = room_for(&f, 16);
    float x[16] = {[3] = 3e38F}, left[16];
    uint8_t wire[64];
    const uint8_t *wires[] = {wire, wire};
    uint64_t total;
    int poisoned, wrong;
    rc_sparse_select(&f, NULL, wire, left, NULL, x, 1.0F, 16, &poisoned);
    CHECK_EQ(poisoned, 0);
    rc_sparse_join(&f, NULL, wires, 1, 1.0F, 16, &out, &total, &poisoned, &wrong);
    CHECK_EQ(poisoned, 0);
    rc_sparse_join(&f, NULL, wires, 2, 1.0F, 16, &out, &total, &poisoned, &wrong);
    CHECK_EQ(poisoned, 1);
    let_go(&out);
}

int main(void)
{
    const check_test tests[] = {
        {"sums are those of the payloads", sums_are_those_of_the_payloads},
        {"what is no payload is refused", no_payload_is_refused},
        {"sums that are not finite are told", sums_that_are_not_finite_are_told},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
