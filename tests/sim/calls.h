/* calls.h - the calls of a simulated job: how they are drawn, what each rank gives, and what must
 * come of it, by plain arithmetic.
 *
 * All values are small whole numbers, chosen so that no codec rounds and no order of adding
 * matters: 0 to 15 in sums and extremes, 1 and 2 in products, averages of 2, 4 or 8 ranks. A
 * quantising codec gets one magnitude per rank, a multiple of its largest code, with a sign per
 * element: then every scale is a whole number of at most 8 bits, and every code its largest. int2,
 * which rotates blocks, gets what codes of 3 and 10 are rotated to, times a number per rank; blocks
 * that are cut short are zeros.
 *
 * Calls that feed residuals back lose something: every 64th element is as those above, which makes
 * the scale, and the others are whole numbers between the codes; but int2 loses nothing. What holds
 * then is in ledger.h.
 */
#ifndef RINGCOMM_SIM_CALLS_H
#define RINGCOMM_SIM_CALLS_H

#include "../c/collective.h"

enum { CALLS_MOST_ELEMENTS = 40000 };

typedef struct sim_call {
    rc_call call; /* of a send: as the sender calls it, root being the receiver */
    uint64_t salt;
    int from;            /* the sender of a send */
    int any;             /* its receiver takes a send of any rank */
    int in_place;        /* allreduce, broadcast and reduce only */
    uint32_t encoded_by; /* bits of ranks that encode and decode by themselves */
    int feeds;           /* takes the residuals of all calls of its group that do */
    rc_codec fed;        /* the codec of most of these; this one may have none */
    uint64_t fed_salt;
} sim_call;

static inline int call_takes_part(const sim_call *c, int rank)
{
    return !collective_is_p2p(c->call.collective) || rank == c->from || rank == c->call.root;
}

/* What a rank calls. */
static inline rc_call call_of_rank(const sim_call *c, int rank)
{
    rc_call call = c->call;
    call.size = sizeof call;
    if (collective_is_p2p(call.collective)) {
        call.collective = rank == c->from ? RC_SEND : RC_RECV;
        if (rank != c->from)
            call.root = c->any ? RC_ANY_SOURCE : c->from;
    }
    return call;
}

/* Element i of what a rank gives. */
static inline int64_t call_value(const sim_call *c, int rank, uint64_t i)
{
    static const int64_t largest[RC_CODEC_COUNT] = {
        [RC_CODEC_INT8] = 127, [RC_CODEC_INT4] = 7, [RC_CODEC_ONEBIT] = 1, [RC_CODEC_FP8] = 448};
    rc_codec codec = c->feeds ? c->fed : c->call.codec;
    uint64_t bits = mix(c->salt + ((uint64_t)rank << 40) + i);
    if (codec < RC_CODEC_INT8)
        return c->call.op == RC_PROD ? 1 + (int64_t)(bits & 1) : (int64_t)(bits & 15);
    uint64_t salt = c->feeds ? c->fed_salt : c->salt;
    int64_t own = 1 + (int64_t)(mix(salt + (uint64_t)rank) % 31), top = own * largest[codec];
    uint64_t at =
        c->call.collective == RC_REDUCE_SCATTER && c->call.count > 0 ? i % c->call.count : i;
    if (codec == RC_CODEC_INT2)
        return own * draw_rotated(c->salt, at, c->call.count);
    if (c->feeds && at % 64 != 0)
        return (int64_t)(bits % (uint64_t)(top + top / 2 + 1)) - top * 3 / 4;
    return mix(c->salt ^ i) & 1 ? top : -top;
}

static inline void call_store(void *data, rc_dtype dtype, uint64_t i, double value)
{
    float single = (float)value;
    uint64_t bits = (uint64_t)(int64_t)value;
    size_t bytes = rc_dtype_size(dtype);
    switch (dtype) {
    case RC_F16: kernels_at(0)->fp16.encode((uint16_t *)data + i, &single, 1.0F, 1); break;
    case RC_BF16: kernels_at(0)->bf16.encode((uint16_t *)data + i, &single, 1.0F, 1); break;
    case RC_F32: ((float *)data)[i] = single; break;
    case RC_F64: ((double *)data)[i] = value; break;
    default: memcpy((char *)data + i * bytes, &bits, bytes);
    }
}

static inline double call_load(const void *data, rc_dtype dtype, uint64_t i)
{
    return dtype == RC_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

static inline double call_join(rc_op op, double a, double b)
{
    switch (op) {
    case RC_MIN: return a < b ? a : b;
    case RC_MAX: return a > b ? a : b;
    case RC_PROD: return a * b;
    default: return a + b;
    }
}

/* Element i of a rank's result. */
static inline double call_result(const sim_call *c, int rank, int world_size, uint64_t i)
{
    rc_call call = call_of_rank(c, rank);
    int first, is_float = call.dtype <= RC_F64;
    uint64_t at;
    call.root = collective_is_p2p(call.collective) ? c->from : call.root;
    trace(&call, rank, world_size, i, &first, &at);
    if (!collective_reduces(call.collective))
        return (double)call_value(c, first, at);
    double sum = (double)call_value(c, 0, at);
    for (int other = 1; other < world_size; other++)
        sum = call_join(call.op, sum, (double)call_value(c, other, at));
    if (call.op == RC_AVG)
        sum /= world_size;
    return is_float ? sum : (double)(int64_t)sum;
}

/* Returns the first element of a rank's result that is wrong, or -1. */
static inline int64_t call_first_wrong(const sim_call *c, int rank, int world_size,
                                       const uint8_t *dst)
{
    rc_call call = call_of_rank(c, rank);
    size_t bytes = rc_dtype_size(call.dtype);
    uint64_t want;
    for (uint64_t i = 0; has_result(&call, rank) && i < result_count(&call, world_size); i++) {
        call_store(&want, call.dtype, 0, call_result(c, rank, world_size, i));
        if (memcmp(dst + i * bytes, &want, bytes) != 0)
            return (int64_t)i;
    }
    return -1;
}

/* Keeps a call within what is exact, and what the core takes. */
static inline void call_restrict(rc_call *call, int world_size)
{
    int is_float = call->dtype == RC_F32 || call->dtype == RC_F64;
    int quantises = call->collective == RC_ALLREDUCE || call->collective == RC_REDUCE_SCATTER ||
                    call->collective == RC_ALLGATHER;
    if (!is_float)
        call->codec = RC_CODEC_NONE;
    if (call->codec >= RC_CODEC_INT8 && !quantises)
        call->codec = RC_CODEC_BF16;
    if (call->codec >= RC_CODEC_INT8 && call->op != RC_AVG)
        call->op = RC_SUM;
    if (call->op == RC_AVG && call->dtype <= RC_F64 && (world_size & (world_size - 1)) != 0)
        call->op = RC_SUM;
    if (call->collective == RC_BARRIER)
        call->count = 0;
}

static inline int call_may_be_encoded(const rc_call *call)
{
    return call->collective == RC_ALLREDUCE && call->dtype == RC_F32 &&
           call->codec >= RC_CODEC_BF16;
}

/* Draws the number of elements: often few, now and then many segments of them. */
static inline uint64_t call_draw_count(uint64_t *seed, uint64_t most)
{
    uint64_t bound = 1ULL << draw_below(seed, 17);
    bound = draw_below(seed, bound + 1);
    return bound < most ? bound : most;
}

static inline sim_call call_draw(uint64_t *seed, int world_size, uint32_t number)
{
    enum { ALLREDUCES = 5 }; /* as often as any five others */
    uint64_t pick = draw_below(seed, RC_RECV + ALLREDUCES);
    sim_call c = {.salt = draw(seed)};
    c.call.collective = pick < RC_RECV ? (rc_collective)pick : RC_ALLREDUCE;
    c.call.dtype = (rc_dtype)draw_below(seed, RC_DTYPE_COUNT);
    c.call.op = (rc_op)draw_below(seed, RC_OP_COUNT);
    c.call.codec = draw_below(seed, 2) ? (rc_codec)draw_below(seed, RC_CODEC_COUNT) : RC_CODEC_NONE;
    c.call.count = call_draw_count(seed, CALLS_MOST_ELEMENTS);
    c.call.root = (int)draw_below(seed, (uint64_t)world_size);
    c.from = (c.call.root + 1 + (int)draw_below(seed, (uint64_t)world_size - 1)) % world_size;
    c.any = draw_below(seed, 3) == 0;
    c.call.tag = c.any ? 100 + number : (uint32_t)draw_below(seed, 3);
    c.in_place = (c.call.collective == RC_ALLREDUCE || c.call.collective == RC_BROADCAST ||
                  c.call.collective == RC_REDUCE) &&
                 draw_below(seed, 2);
    call_restrict(&c.call, world_size);
    uint64_t parts = source_count(&c.call, world_size) + result_count(&c.call, world_size);
    if (parts > 2 * CALLS_MOST_ELEMENTS)
        c.call.count /= (uint64_t)world_size;
    uint32_t encoded_by = draw_below(seed, 2) ? (uint32_t)draw_below(seed, 1 << 16) : 0;
    c.encoded_by = call_may_be_encoded(&c.call) ? encoded_by : 0;
    return c;
}

/* Draws one that is as another, of other values. */
static inline sim_call call_again(const sim_call *other, uint64_t *seed)
{
    sim_call c = *other;
    c.salt = draw(seed);
    return c;
}

/* Draws what calls that feed residuals back have in common. */
static inline sim_call call_draw_feeding(uint64_t *seed, int world_size)
{
    static const rc_collective some[] = {RC_ALLREDUCE, RC_ALLREDUCE, RC_REDUCE_SCATTER,
                                         RC_ALLGATHER};
    sim_call c = {.feeds = 1, .fed_salt = draw(seed)};
    c.fed = RC_CODEC_INT8 + (rc_codec)draw_below(seed, RC_CODEC_COUNT - RC_CODEC_INT8);
    c.call.collective = some[draw_below(seed, sizeof some / sizeof *some)];
    c.call.op = draw_below(seed, 2) && (world_size & (world_size - 1)) == 0 ? RC_AVG : RC_SUM;
    c.call.count = call_draw_count(seed, CALLS_MOST_ELEMENTS / (uint64_t)world_size);
    return c;
}

/* Draws one of them. */
static inline sim_call call_feed(const sim_call *feeding, uint64_t *seed)
{
    sim_call c = call_again(feeding, seed);
    c.call.dtype = draw_below(seed, 4) ? RC_F32 : RC_F64;
    c.call.codec = draw_below(seed, 4) ? c.fed : RC_CODEC_NONE;
    c.in_place = c.call.collective == RC_ALLREDUCE && draw_below(seed, 2);
    return c;
}

#endif
