/* error.c - see error.h. */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *rc_result_name(rc_result result)
{
    switch (result) {
    case RC_OK: return "ok";
    case RC_AGAIN: return "in flight";
    case RC_TIMEOUT: return "timed out";
    case RC_INVALID_ARGUMENT: return "invalid argument";
    case RC_INVALID_STATE: return "invalid state";
    case RC_MISMATCH: return "mismatched collectives";
    case RC_PEER_LOST: return "peer lost";
    case RC_PROTOCOL: return "protocol violation";
    case RC_SYSTEM: return "system error";
    case RC_NO_MEMORY: return "out of memory";
    case RC_ABORTED: return "aborted";
    case RC_INTERNAL: return "internal error";
    case RC_DEVICE: return "GPU error";
    }
    return "unknown result";
}

void error_clear(rc_error *error)
{
    error->code = RC_OK;
    error->sys_errno = 0;
    error->rank = error->rail = error->lane = -1;
    error->seq = 0;
    error->elapsed_s = 0.0;
    error->message[0] = '\0'; /* not the whole text: it is long, and each frame clears an error */
}

rc_result error_set(rc_error *error, rc_result code, const char *format, ...)
{
    if (error == NULL || error->code != RC_OK)
        return code;
    error_clear(error);
    error->code = code;
    va_list args;
    va_start(args, format);
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
    return code;
}
