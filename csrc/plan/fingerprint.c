/* fingerprint.c - a call in 64 bits, and as text. See plan.h. */
#include "plan.h"

#include <stdio.h>

static const char *const collective_names[RC_COLLECTIVE_COUNT] = {
    "allreduce", "reduce_scatter", "allgather", "broadcast", "reduce",   "gather",
    "scatter",   "alltoall",       "barrier",   "send/recv", "send/recv"};
static const char *const dtype_names[RC_DTYPE_COUNT] = {"f16", "bf16", "f32", "f64",
                                                        "i8",  "u8",   "i32", "i64"};
static const char *const op_names[RC_OP_COUNT] = {"sum", "avg", "min", "max", "prod"};
static const char *const codec_names[RC_CODEC_COUNT] = {"none", "bf16",   "fp16", "int8",
                                                        "int4", "onebit", "fp8",  "int2"};

static const char *const caller_names[] = {
    "another call of ringcomm",
    "gather_state_dict()",
    "step()",
    "add_param_group()",
    "an optimizer's constructor",
    "attach() of OuterStep",
    "flush() of OuterStep",
    "detach() of OuterStep",
    "a round of OuterStep",
    "the exchange of gradients",
    "HierarchicalState()",
    "the agreement of HookState",
    "the comparison of shapes",
    "all_reduce() of a sparse tensor",
    "split()",
    "allreduce_many()",
};
enum { CALLERS = sizeof caller_names / sizeof *caller_names };

const char *rc_caller_name(int caller)
{
    return caller > 0 && caller <= CALLERS ? caller_names[caller - 1] : NULL;
}

const char *rc_codec_name(rc_codec codec)
{
    return (unsigned)codec < RC_CODEC_COUNT ? codec_names[codec] : "?";
}

static int reduces(rc_collective collective)
{
    return collective == RC_ALLREDUCE || collective == RC_REDUCE_SCATTER || collective == RC_REDUCE;
}

static int rooted(rc_collective collective)
{
    return collective == RC_BROADCAST || collective == RC_REDUCE || collective == RC_GATHER ||
           collective == RC_SCATTER;
}

static int has_caller(uint64_t fingerprint)
{
    return !rooted((rc_collective)(fingerprint & 15));
}

int fingerprint_matches(uint64_t one, uint64_t other)
{
    uint64_t callers = has_caller(one) ? (uint64_t)FINGERPRINT_MAX_ROOT << 16 : 0;
    return ((one ^ other) & ~callers) == 0;
}

uint64_t fingerprint_of(const rc_call *call)
{
    uint64_t collective = call->collective == RC_RECV ? RC_SEND : call->collective;
    uint64_t op = reduces(call->collective) ? call->op : 0;
    uint64_t dtype = call->collective == RC_BARRIER ? 0 : call->dtype;
    uint64_t root = rooted(call->collective) ? (uint64_t)call->root : call->caller;
    return collective | op << 4 | dtype << 8 | (uint64_t)call->codec << 12 | root << 16 |
           call->count << 28;
}

rc_op fingerprint_op(uint64_t fingerprint)
{
    return (rc_op)(fingerprint >> 4 & 15);
}

static const char *name_at(const char *const *names, int count, uint64_t index)
{
    return index < (uint64_t)count ? names[index] : "?";
}

void fingerprint_text(uint64_t fingerprint, char *text, size_t size)
{
    uint64_t collective = fingerprint & 15;
    const char *name = name_at(collective_names, RC_COLLECTIVE_COUNT, collective);
    char op[16] = "", root[24] = "", codec[32] = "", caller[40] = "";
    uint64_t caller_number = has_caller(fingerprint) ? fingerprint >> 16 & 4095 : 0;
    if (caller_number != 0)
        snprintf(caller, sizeof caller, " in %s",
                 name_at(caller_names, CALLERS, caller_number - 1));
    if (collective == RC_BARRIER) {
        snprintf(text, size, "%s()%s", name, caller);
        return;
    }
    if (reduces((rc_collective)collective))
        snprintf(op, sizeof op, ", op=%s", name_at(op_names, RC_OP_COUNT, fingerprint >> 4 & 15));
    if (rooted((rc_collective)collective))
        snprintf(root, sizeof root, ", root=%d", (int)(fingerprint >> 16 & 4095));
    if ((fingerprint >> 12 & 15) != RC_CODEC_NONE)
        snprintf(codec, sizeof codec, ", compression=%s",
                 name_at(codec_names, RC_CODEC_COUNT, fingerprint >> 12 & 15));
    snprintf(text, size, "%s(%s[%llu]%s%s%s)%s", name,
             name_at(dtype_names, RC_DTYPE_COUNT, fingerprint >> 8 & 15),
             (unsigned long long)(fingerprint >> 28), op, root, codec, caller);
}
