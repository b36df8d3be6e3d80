/* check.h - the test macros of tests/c.
 *
 * A test is a function without arguments; every program lists its tests in one table and ends with
 * `return check_run(tests, CHECK_COUNT(tests));`. A failed check is reported and counted, and the
 * test goes on. Checks may be made from several threads at once.
 */
#ifndef RINGCOMM_CHECK_H
#define RINGCOMM_CHECK_H

#include <stddef.h>
#include <stdio.h>

typedef struct check_test {
    const char *name;
    void (*run)(void);
} check_test;

#define CHECK_COUNT(array) (sizeof(array) / sizeof((array)[0]))
/* Each gives 1 if it holds. CHECK_EQ is for integers. */
#define CHECK(expr) check_that((expr) ? 1 : 0, #expr, __FILE__, __LINE__)
#define CHECK_EQ(got, want)                                                                        \
    check_equal((long long)(got), (long long)(want), #got " == " #want, __FILE__, __LINE__)

/* Says more about the failure just reported, as printf does. */
#define CHECK_NOTE(...)                                                                            \
    (check_failures <= CHECK_SHOWN ? (void)fprintf(stderr, __VA_ARGS__) : (void)0)

/* How much of something under a sanitizer, where it takes up to ten times as long: what fails there
 * does so in the first rounds. All of it in the plain build, where time is counted. */
#if defined __SANITIZE_THREAD__ || defined __SANITIZE_ADDRESS__
#define CHECK_LESS(all, less) (less)
#else
#define CHECK_LESS(all, less) (all)
#endif

/* The calloc that finds no memory, by its bytes; 0: none. In main.c. */
extern _Atomic size_t check_scarce;

enum { CHECK_SHOWN = 20 }; /* failures reported per test; all are counted */
static int check_failures; /* of the running test */

static inline int check_that(int holds, const char *text, const char *file, int line)
{
    if (!holds && __atomic_fetch_add(&check_failures, 1, __ATOMIC_RELAXED) < CHECK_SHOWN)
        fprintf(stderr, "%s:%d: failed: %s\n", file, line, text);
    return holds;
}

static inline int check_equal(long long got, long long want, const char *text, const char *file,
                              int line)
{
    if (got != want && __atomic_fetch_add(&check_failures, 1, __ATOMIC_RELAXED) < CHECK_SHOWN)
        fprintf(stderr, "%s:%d: failed: %s: got %lld (0x%llx), want %lld (0x%llx)\n", file, line,
                text, got, (unsigned long long)got, want, (unsigned long long)want);
    return got == want;
}

/* Runs the tests in order. The exit status of the program: 1 if any failed. */
static inline int check_run(const check_test *tests, size_t count)
{
    int failed = 0;
    for (size_t i = 0; i < count; i++) {
        check_failures = 0;
        tests[i].run();
        printf("%-4s %s\n", check_failures ? "FAIL" : "ok", tests[i].name);
        fflush(stdout);
        failed += check_failures != 0;
    }
    printf("%d passed, %d failed\n", (int)count - failed, failed);
    return failed != 0;
}

#endif
