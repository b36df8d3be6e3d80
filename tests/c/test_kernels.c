/* test_kernels.c - the table of kernel sets, and their reductions, scalings and conversions.
 *
 * Each set must give the scalar set's bits, which tests/test_kernels.py holds to numpy's, for all
 * dtypes, ops, sizes, offsets and aliases.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "../../csrc/kernels/kernels.h"
#include "check.h"
#include "operands.h"

/* ---- elements of any dtype ---- */

static double load_float(rc_dtype dtype, const void *data, size_t i)
{
    return dtype == RC_F32 ? (double)((const float *)data)[i] : ((const double *)data)[i];
}

static int is_float(rc_dtype dtype)
{
    return dtype == RC_F32 || dtype == RC_F64;
}

/* ---- reductions ---- */

/* The one freedom that the contract leaves. */
static int payload_is_free(rc_dtype dtype, rc_op op, const void *a, const void *b, size_t i)
{
    return is_float(dtype) && (op == RC_SUM || op == RC_PROD) && isnan(load_float(dtype, a, i)) &&
           isnan(load_float(dtype, b, i));
}

static void reduce_case(const kernel_set *set, rc_dtype dtype, rc_op op, size_t n, size_t offset,
                        enum alias alias)
{
    const size_t width = size_of(dtype);
    const size_t bytes = n * width;
    const size_t skip[] = {offset * width, offset * 3 % 5 * width, offset * 2 % 7 * width};
    void *a = make(skip[0], bytes);
    void *b = make(skip[1], bytes);
    void *out = make(skip[2], bytes + GUARD);
    void *left = make(0, bytes);
    void *right = make(0, bytes);
    void *want = make(0, bytes);
    void *dst = alias == ALIAS_A ? a : alias == ALIAS_B ? b : out;
    int exact = 1;
    fill(left, dtype, n);
    fill(right, dtype, n);
    memcpy(a, left, bytes);
    memcpy(b, right, bytes);
    kernels_at(0)->reduce[dtype][op](want, left, right, n);
    set->reduce[dtype][op](dst, a, b, n);
    for (size_t i = 0; i < n; i++)
        exact &= payload_is_free(dtype, op, left, right, i) ||
                 memcmp((char *)dst + i * width, (char *)want + i * width, width) == 0;
    if (!CHECK(exact) || !CHECK(guard_holds(out, alias ? 0 : bytes)))
        CHECK_NOTE("  set %s dtype %d op %d n %zu offset %zu alias %d\n", set->name, dtype, op, n,
                   offset, alias);
    drop(a, skip[0]);
    drop(b, skip[1]);
    drop(out, skip[2]);
    drop(left, 0);
    drop(right, 0);
    drop(want, 0);
}

static void reduce_set(const kernel_set *set)
{
    for (rc_dtype dtype = RC_F32; dtype <= RC_I64; dtype++)
        for (rc_op op = RC_SUM; op <= RC_PROD; op++)
            for (size_t s = 0; op != RC_AVG && s < CHECK_COUNT(sizes); s++)
                for (size_t offset = 0; offset < 6; offset++)
                    for (enum alias alias = ALIAS_NONE; alias < ALIAS_COUNT; alias++)
                        reduce_case(set, dtype, op, sizes[s], offset, alias);
}

static void reductions(void)
{
    each_set(reduce_set);
}

static void min_max_rule_set(const kernel_set *set)
{
    enum { N = 40 };
    const uint32_t nan = 0x7fa12345;
    const uint32_t other_nan = 0xffc54321;
    const uint32_t one = 0x3f800000;
    const uint32_t zero = 0;
    const uint32_t minus_zero = 0x80000000;
    /* a, b, and the bits of either result */
    const uint32_t cases[][3] = {
        {nan, one, nan},
        {one, nan, nan},
        {nan, other_nan, nan},
        {other_nan, nan, other_nan},
        {zero, minus_zero, minus_zero},
        {minus_zero, zero, zero},
    };
    for (size_t c = 0; c < CHECK_COUNT(cases); c++) {
        float a[N], b[N], low[N], high[N];
        for (size_t i = 0; i < N; i++) {
            a[i] = float_of(cases[c][0]);
            b[i] = float_of(cases[c][1]);
        }
        set->reduce[RC_F32][RC_MIN](low, a, b, N);
        set->reduce[RC_F32][RC_MAX](high, a, b, N);
        for (size_t i = 0; i < N; i++) {
            CHECK_EQ(bits_of(low[i]), cases[c][2]);
            CHECK_EQ(bits_of(high[i]), cases[c][2]);
        }
    }
}

static void min_max_rule(void)
{
    each_set(min_max_rule_set);
}

/* ---- scaling and conversion ---- */

static void scale_case(const kernel_set *set, rc_dtype dtype, double factor, size_t n,
                       size_t offset, int in_place)
{
    const size_t width = size_of(dtype);
    const size_t skip = offset * width;
    void *src = make(0, n * width);
    void *in = make(skip, n * width);
    void *want = make(0, n * width);
    void *out = make(skip, n * width + GUARD);
    void *dst = in_place ? in : out;
    fill(src, dtype, n);
    memcpy(in, src, n * width);
    kernels_at(0)->scale[dtype](want, src, factor, n);
    set->scale[dtype](dst, in, factor, n);
    if (!CHECK(memcmp(dst, want, n * width) == 0) ||
        !CHECK(guard_holds(out, in_place ? 0 : n * width)))
        CHECK_NOTE("  set %s dtype %d factor %g n %zu\n", set->name, dtype, factor, n);
    drop(src, 0);
    drop(in, skip);
    drop(want, 0);
    drop(out, skip);
}

/* The bits of the scalar set's sum, scaled by the scalar set. */
static void average_case(const kernel_set *set, rc_dtype dtype, double factor, size_t n,
                         size_t offset, enum alias alias)
{
    const size_t width = size_of(dtype), skip = offset * width, bytes = n * width;
    void *a = make(skip, bytes);
    void *b = make(0, bytes);
    void *out = make(skip, bytes + GUARD);
    void *left = make(0, bytes);
    void *want = make(0, bytes);
    void *dst = alias == ALIAS_A ? a : alias == ALIAS_B ? b : out;
    int exact = 1;
    fill(left, dtype, n);
    fill(b, dtype, n);
    memcpy(a, left, bytes);
    void *right = make(0, bytes);
    memcpy(right, b, bytes);
    kernels_at(0)->reduce[dtype][RC_SUM](want, left, right, n);
    kernels_at(0)->scale[dtype](want, want, factor, n);
    set->average[dtype](dst, a, b, factor, n);
    for (size_t i = 0; i < n; i++)
        exact &= payload_is_free(dtype, RC_SUM, left, right, i) ||
                 memcmp((char *)dst + i * width, (char *)want + i * width, width) == 0;
    if (!CHECK(exact) || !CHECK(guard_holds(out, alias ? 0 : bytes)))
        CHECK_NOTE("  set %s dtype %d factor %g n %zu alias %d\n", set->name, dtype, factor, n,
                   alias);
    drop(a, skip);
    drop(b, 0);
    drop(out, skip);
    drop(left, 0);
    drop(right, 0);
    drop(want, 0);
}

static const double divisors[] = {1,   2,   3,    5,       7,          16,         127, 128,
                                  255, 256, 1000, 8388609, 2147483647, 4294967296, 1e18};

static void average_set(const kernel_set *set)
{
    for (rc_dtype dtype = RC_F32; dtype <= RC_I64; dtype++)
        for (size_t s = 0; s < CHECK_COUNT(sizes); s++)
            for (size_t f = 0; f < (is_float(dtype) ? CHECK_COUNT(factors) : CHECK_COUNT(divisors));
                 f++)
                for (enum alias alias = ALIAS_NONE; alias < ALIAS_COUNT; alias++)
                    average_case(set, dtype, is_float(dtype) ? (double)factors[f] : divisors[f],
                                 sizes[s], (s + f) % 4, alias);
}

static void averages(void)
{
    each_set(average_set);
}

static void scale_set(const kernel_set *set)
{
    for (rc_dtype dtype = RC_F32; dtype <= RC_I64; dtype++)
        for (size_t s = 0; s < CHECK_COUNT(sizes); s++)
            for (size_t f = 0; f < (is_float(dtype) ? CHECK_COUNT(factors) : CHECK_COUNT(divisors));
                 f++)
                for (int in_place = 0; in_place < 2; in_place++)
                    scale_case(set, dtype, is_float(dtype) ? (double)factors[f] : divisors[f],
                               sizes[s], (s + f) % 4, in_place);
}

static void scalings(void)
{
    each_set(scale_set);
}

/* Every dividend of 8 bits by every divisor up to 300. */
static void byte_division_set(const kernel_set *set)
{
    for (int divisor = 1; divisor <= 300; divisor++) {
        uint8_t all[256], out[256];
        for (int i = 0; i < 256; i++)
            all[i] = (uint8_t)i;
        set->scale[RC_U8](out, all, divisor, 256);
        for (int i = 0; i < 256; i++)
            CHECK_EQ(out[i], i / divisor);
        set->scale[RC_I8](out, all, divisor, 256);
        for (int i = 0; i < 256; i++)
            CHECK_EQ((int8_t)out[i], (int8_t)i / divisor);
    }
}

static void byte_division(void)
{
    each_set(byte_division_set);
}

/* Wherever the only NaN is. */
static void find_nans(const kernel_set *set)
{
    enum { MOST = 70 };
    float x[MOST + 1];
    for (size_t i = 0; i <= MOST; i++)
        x[i] = (float)i;
    for (size_t n = 0; n <= MOST; n++) {
        CHECK_EQ(set->has_nan(x, n), 0);
        for (size_t i = 0; i < n; i++) {
            x[i] = i % 2 ? NAN : -NAN;
            CHECK_EQ(set->has_nan(x, n), 1);
            x[i] = INFINITY;
        }
        x[n] = NAN; /* beyond */
        CHECK_EQ(set->has_nan(x, n), 0);
        x[n] = 0.0F;
    }
}

static void convert_set(const kernel_set *set)
{
    for (size_t s = 0; s < CHECK_COUNT(sizes); s++) {
        const size_t n = sizes[s];
        const size_t skip = s % 3 * sizeof(float);
        double *doubles = make(2 * skip, n * sizeof(double));
        float *floats = make(skip, n * sizeof(float) + GUARD);
        float *floats_want = make(0, n * sizeof(float));
        double *back = make(2 * skip, n * sizeof(double) + GUARD);
        double *back_want = make(0, n * sizeof(double));
        fill(doubles, RC_F64, n);
        set->f64_to_f32(floats, doubles, n);
        kernels_at(0)->f64_to_f32(floats_want, doubles, n);
        set->f32_to_f64(back, floats, n);
        kernels_at(0)->f32_to_f64(back_want, floats, n);
        CHECK(memcmp(floats, floats_want, n * sizeof *floats) == 0);
        CHECK(memcmp(back, back_want, n * sizeof *back) == 0);
        CHECK(guard_holds(floats, n * sizeof *floats) && guard_holds(back, n * sizeof *back));
        drop(doubles, 2 * skip);
        drop(floats, skip);
        drop(floats_want, 0);
        drop(back, 2 * skip);
        drop(back_want, 0);
    }
}

static void conversions(void)
{
    each_set(convert_set);
    each_set(find_nans);
}

/* ---- the table ---- */

static void table(void)
{
    CHECK(kernels_at(-1) == NULL);
    CHECK(strcmp(kernels_at(0)->name, "scalar") == 0);
    CHECK(kernels_at(0)->supported());
    CHECK(kernels_find("no such set") == NULL);
    CHECK(kernels_find("") == NULL);
    const kernel_set *last = NULL;
    int count = 0;
    for (; kernels_at(count); count++) {
        const kernel_set *set = kernels_at(count);
        const int supported = set->supported();
        CHECK(kernels_find(set->name) == (supported ? set : NULL));
        last = supported ? set : last;
        printf("     %s%s\n", set->name, supported ? "" : ": not on this CPU, not tested");
        for (int dtype = 0; dtype < RC_DTYPE_COUNT; dtype++) {
            const int half = dtype == RC_F16 || dtype == RC_BF16;
            for (int op = 0; op < RC_OP_COUNT; op++)
                CHECK((set->reduce[dtype][op] == NULL) == (half || op == RC_AVG));
            CHECK((set->scale[dtype] == NULL) == half);
            CHECK((set->average[dtype] == NULL) == half);
        }
    }
    CHECK(kernels_at(count + 1) == NULL);
    CHECK(kernels_find(NULL) == last);
}

int main(void)
{
    static const check_test tests[] = {
        {"table", table},       {"reductions", reductions},       {"min_max_rule", min_max_rule},
        {"scalings", scalings}, {"byte_division", byte_division}, {"conversions", conversions},
        {"averages", averages},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
