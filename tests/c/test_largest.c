/* test_largest.c - the k largest of some numbers: which these are, and that how they were looked
 * for does not matter.
 */
#include <math.h>

#include "../../csrc/sparse/largest.h"
#include "check.h"
#include "sparse_values.h"

enum { N = 3000 };

/* As largest.h says it, one by one: few are larger, or equal and before it. */
static void are_those_of_the_definition(void)
{
    float values[N + LARGEST_SPARE], *x = sparse_fill(N);
    uint16_t got[N];
    x[5] = INFINITY;
    x[6] = NAN;
    for (size_t k = 1; k <= N; k = k * 3 + 1) {
        largest l = {kernels_find(NULL), values, 1};
        largest_find(&l, got, x, N, k);
        size_t taken = 0;
        for (size_t i = 0; i < N; i++) {
            size_t before = 0;
            for (size_t j = 0; j < N; j++) {
                uint32_t other = sparse_size_of(x[j]), own = sparse_size_of(x[i]);
                before += other > own || (other == own && j < i);
            }
            if (before < k && CHECK(taken < k))
                CHECK_EQ(got[taken++], i);
        }
        CHECK_EQ(taken, k);
    }
    free(x);
}

/* Behind them are all that are larger. */
static void takes_the_first_of_equals(void)
{
    enum { LARGER = 5 };
    float values[N + LARGEST_SPARE], x[N];
    uint16_t got[N];
    for (size_t i = 0; i < N; i++)
        x[i] = i + LARGER < N ? 1.0F : 2.0F;
    for (size_t k = LARGER; k <= N; k += 71) {
        largest l = {kernels_find(NULL), values, 1};
        largest_find(&l, got, x, N, k);
        for (size_t i = 0; i < k; i++)
            CHECK_EQ(got[i], i + LARGER < k ? i : N - k + i);
    }
}

/* Whatever was looked for before. */
static void does_not_depend_on_the_guess(void)
{
    static const uint32_t guesses[] = {1, 2, 0x3f800000, 0x7f7fffff, 0x7fffffff};
    float values[N + LARGEST_SPARE], *x = sparse_fill(N);
    uint16_t want[N], got[N];
    x[5] = INFINITY;
    x[6] = NAN;
    for (size_t k = 1; k <= N; k = k * 2 + 1) {
        largest l = {kernels_find(NULL), values, 0x3f800000};
        largest_find(&l, want, x, N, k);
        for (size_t g = 0; g < CHECK_COUNT(guesses); g++) {
            l.guess = guesses[g];
            largest_find(&l, got, x, N, k);
            CHECK(memcmp(want, got, k * sizeof *got) == 0);
        }
    }
    free(x);
}

int main(void)
{
    const check_test tests[] = {
        {"the k largest, in order of place", are_those_of_the_definition},
        {"of equals the first, and all that are larger", takes_the_first_of_equals},
        {"the guess changes the way, not the result", does_not_depend_on_the_guess},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
