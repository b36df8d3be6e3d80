/* test_error.c - errors as values: the first one stays, text is cut at the buffer, names are whole.
 */
#include <string.h>

#include "../../csrc/base/error.h"
#include "check.h"

static void every_result_has_its_own_name(void)
{
    for (int a = RC_OK; a <= RC_DEVICE; a++) {
        CHECK(strlen(rc_result_name((rc_result)a)) > 0);
        CHECK(strcmp(rc_result_name((rc_result)a), "unknown result") != 0);
        for (int b = RC_OK; b < a; b++)
            CHECK(strcmp(rc_result_name((rc_result)a), rc_result_name((rc_result)b)) != 0);
    }
    CHECK(strcmp(rc_result_name((rc_result)99), "unknown result") == 0);
    CHECK(strcmp(rc_result_name((rc_result)-1), "unknown result") == 0);
}

static void cleared_names_nobody(void)
{
    rc_error error;
    memset(&error, 0x5a, sizeof error);
    error_clear(&error);
    CHECK_EQ(error.code, RC_OK);
    CHECK_EQ(error.rank, -1);
    CHECK_EQ(error.rail, -1);
    CHECK_EQ(error.lane, -1);
    CHECK_EQ(error.seq, 0);
    CHECK_EQ(error.sys_errno, 0);
    CHECK_EQ(error.message[0], '\0');
}

static void first_failure_stays(void)
{
    rc_error error;
    error_clear(&error);
    CHECK_EQ(error_set(&error, RC_TIMEOUT, "first %d", 1), RC_TIMEOUT);
    CHECK_EQ(error_set(&error, RC_ABORTED, "second"), RC_ABORTED);
    CHECK_EQ(error.code, RC_TIMEOUT);
    CHECK(strcmp(error.message, "first 1") == 0);
    CHECK_EQ(error_set(NULL, RC_PROTOCOL, "nobody listens"), RC_PROTOCOL);
}

static void long_text_is_cut(void)
{
    rc_error error;
    char text[2 * sizeof error.message];
    memset(text, 'x', sizeof text);
    text[sizeof text - 1] = '\0';
    error_clear(&error);
    error_set(&error, RC_SYSTEM, "%s", text);
    CHECK_EQ(strlen(error.message), sizeof error.message - 1);
}

static rc_result passes(rc_result result)
{
    RC_TRY(result);
    return RC_INTERNAL;
}

static void try_passes_everything_but_ok(void)
{
    CHECK_EQ(passes(RC_OK), RC_INTERNAL);
    CHECK_EQ(passes(RC_AGAIN), RC_AGAIN);
    CHECK_EQ(passes(RC_PEER_LOST), RC_PEER_LOST);
}

int main(void)
{
    static const check_test tests[] = {
        {"every_result_has_its_own_name", every_result_has_its_own_name},
        {"cleared_names_nobody", cleared_names_nobody},
        {"first_failure_stays", first_failure_stays},
        {"long_text_is_cut", long_text_is_cut},
        {"try_passes_everything_but_ok", try_passes_everything_but_ok},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
