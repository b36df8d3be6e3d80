/* test_api_sparse.c - the public functions of sparse payloads refuse what is no format, kernel set
 * or number, and touch nothing then.
 */
#include <math.h>

#include "check.h"
#include "sparse_values.h"

static void refuses_what_is_no_format(void)
{
    static const rc_sparse_format wrong[] = {
        {4096, 2, 4, RC_F32},    {8, 1, 4, RC_F32},    {4096, 1, 0, RC_F32},
        {131072, 1, 4, RC_F32},  {24, 16, 1, RC_F32},  {4096, 1, 4097, RC_F32},
        {4096, 16, 257, RC_F32}, {4096, 1, 4, RC_F64},
    };
    float x = 1, left;
    uint8_t wire[64];
    int poisoned;
    for (size_t i = 0; i < CHECK_COUNT(wrong); i++) {
        CHECK_EQ(rc_sparse_bytes(&wrong[i], 1), 0);
        CHECK_EQ(rc_sparse_record_bytes(&wrong[i]), 0);
        CHECK_EQ(rc_sparse_select(&wrong[i], NULL, wire, &left, NULL, &x, 1.0F, 1, &poisoned),
                 RC_INVALID_ARGUMENT);
    }
    CHECK_EQ(
        rc_sparse_select(&sparse_formats[0], "none", wire, &left, NULL, &x, 1.0F, 1, &poisoned),
        RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_select(&sparse_formats[0], NULL, wire, &left, NULL, &x, NAN, 1, &poisoned),
             RC_INVALID_ARGUMENT);
}

static void refuses_wrong_arguments(void)
{
    const rc_sparse_format *f = &sparse_formats[2], none = {4096, 2, 4, RC_F32};
    uint32_t counts[1] = {0}, last[256] = {0};
    uint16_t index[64] = {0};
    float values[64] = {0}, weights[4096] = {0}, states[4096] = {0};
    rc_sparse_entries entries = {counts, index, values};
    rc_sparse_sgd_step sgd = {.momentum = 0.9F};
    rc_sparse_adam_step adam = {.number = 0};
    uint64_t total;
    int poisoned, wrong;
    const uint8_t *wires[1] = {NULL};
    CHECK_EQ(rc_sparse_most(f, 4096, 0), 0);
    CHECK_EQ(rc_sparse_most(&none, 4096, 1), 0);
    CHECK_EQ(rc_sparse_most(f, 4096, 2), 128);
    CHECK_EQ(rc_sparse_join(f, NULL, wires, 0, 1, 1, &entries, &total, &poisoned, &wrong),
             RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_scatter(f, "none", &entries, weights, 4096), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_add(&none, &entries, 1, weights, 4096), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_take(&none, &entries, weights, 4096), RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_put(f, NULL, &entries, weights, RC_F64, 4096), RC_INVALID_ARGUMENT);
    /* A momentum without a buffer, or a buffer without the steps of its blocks. */
    CHECK_EQ(rc_sparse_sgd(f, NULL, &entries, &sgd, weights, 4096, NULL, NULL),
             RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_sgd(f, NULL, &entries, &sgd, weights, 4096, NULL, last),
             RC_INVALID_ARGUMENT);
    CHECK_EQ(rc_sparse_adam(f, NULL, &entries, &adam, weights, 4096, states, states),
             RC_INVALID_ARGUMENT);
    for (size_t i = 0; i < 4096; i++)
        CHECK(weights[i] == 0.0F);
}

int main(void)
{
    const check_test tests[] = {
        {"what is no format is refused", refuses_what_is_no_format},
        {"wrong arguments are refused", refuses_wrong_arguments},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
