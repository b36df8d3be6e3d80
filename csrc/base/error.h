/* error.h - failures as values.
 *
 * Every fallible function returns an rc_result; the text is made where the facts are at hand, into
 * an rc_error that the caller owns. The first failure written to an rc_error stays.
 */
#ifndef RINGCOMM_ERROR_H
#define RINGCOMM_ERROR_H

#include "../include/ringcomm.h"

/* Passes a failure on to the caller. RC_AGAIN passes too: "not yet" needs no second path. */
#define RC_TRY(expr)                                                                               \
    do {                                                                                           \
        rc_result try_result = (expr);                                                             \
        if (try_result != RC_OK)                                                                   \
            return try_result;                                                                     \
    } while (0)

/* Clears an error to RC_OK with no rank, rail or lane. */
void error_clear(rc_error *error);
/* Sets code and message unless error holds a failure already. error may be NULL. Returns code. */
rc_result error_set(rc_error *error, rc_result code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
