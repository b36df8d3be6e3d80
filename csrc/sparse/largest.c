/* largest.c - see largest.h. */
#include "largest.h"

#include <string.h>

/* TOP is more than any size, FIRST_STEP half an octave. */
static const uint32_t TOP = 0x80000000, FIRST_STEP = 1u << 22;

static uint32_t size_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

/* Returns the next size to count, between low and high: at first away from the one that is known,
 * by steps that double, then half-way. */
static uint32_t between(uint32_t low, uint32_t high, uint32_t *step)
{
    uint32_t gap = high - low, by = *step;
    if ((high != TOP && low != 0) || gap / 2 <= by)
        return low + gap / 2;
    *step = by * 2;
    return high == TOP ? low + by : high - by;
}

/* Returns a size that at least k of n reach, and at most k + slack unless many are of that very
 * size: then it is the largest that k reach. 0 if fewer than k are not zero. */
static uint32_t threshold(const largest *l, const float *x, size_t n, size_t k, size_t slack)
{
    uint32_t low = 0, high = TOP, step = FIRST_STEP, at = l->guess;
    while (high - low > 1) {
        size_t count = l->kernels->sparse.count(x, at, n);
        if (count < k) {
            high = at;
        } else {
            low = at;
            if (count <= k + slack)
                break;
        }
        at = between(low, high, &step);
    }
    return low;
}

/* Takes all numbers that are not zero, which are fewer than k, and the first zeros. */
static void with_zeros(uint16_t *index, const float *x, size_t n, size_t k, size_t nonzero)
{
    size_t zeros = k - nonzero, count = 0;
    for (size_t i = 0; count < k && i < n; i++) {
        if (size_of(x[i]) == 0 && zeros == 0)
            continue;
        zeros -= size_of(x[i]) == 0;
        index[count++] = (uint16_t)i;
    }
}

/* Keeps the k largest of count that were picked. Zeros lie behind them, as counts are fastest over
 * whole registers. */
static void narrow(largest *l, uint16_t *index, size_t count, size_t k)
{
    size_t whole = (count + LARGEST_SPARE - 1) / LARGEST_SPARE * LARGEST_SPARE;
    uint32_t least = threshold(l, l->values, whole, k, 0);
    size_t larger = 0, kept = 0;
    for (size_t i = 0; i < count; i++)
        larger += size_of(l->values[i]) > least;
    size_t equal = k - larger; /* numbers of that very size to take */
    for (size_t i = 0; i < count; i++) {
        uint32_t size = size_of(l->values[i]);
        int takes = size > least || (size == least && equal > 0);
        index[kept] = index[i];
        kept += (size_t)takes;
        equal -= size == least && takes;
    }
}

void largest_find(largest *l, uint16_t *index, const float *x, size_t n, size_t k)
{
    for (size_t i = 0; k == n && i < n; i++)
        index[i] = (uint16_t)i;
    if (k == n)
        return;
    uint32_t least = threshold(l, x, n, k, k / 2 + 16);
    if (least == 0) {
        with_zeros(index, x, n, k, l->kernels->sparse.count(x, 1, n));
        return;
    }
    size_t count = l->kernels->sparse.pick(index, l->values, x, least, n);
    l->guess = least;
    if (count > k) {
        memset(l->values + count, 0, LARGEST_SPARE * sizeof *l->values);
        narrow(l, index, count, k);
    }
}
