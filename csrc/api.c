/* api.c - the public functions: every argument is checked here, once, and nowhere below.
 *
 * The only file, with api_lanes.c, that implements rc_comm_*, rc_feedback_*, rc_submit and
 * rc_work_*. A check that fails changes nothing. Functions that may be called in a forked child
 * look at the engine's `forked` first and take no lock there.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "comm/comm.h"

#ifndef RINGCOMM_VERSION
#define RINGCOMM_VERSION "unknown"
#endif

const char *rc_version(void)
{
    return RINGCOMM_VERSION;
}

const char *rc_algorithm_name(rc_algorithm algorithm)
{
    return plan_algorithm_name(algorithm);
}

rc_algorithm rc_estimate(int world_size, uint64_t wire_bytes, uint32_t link_mbit, double *seconds)
{
    return plan_estimate(world_size, wire_bytes, link_mbit, seconds);
}

const char *rc_kernel_set_name(int index)
{
    const kernel_set *set = index < 0 ? NULL : kernels_at(index);
    return set != NULL ? set->name : NULL;
}

int rc_kernel_set_supported(int index)
{
    const kernel_set *set = index < 0 ? NULL : kernels_at(index);
    return set != NULL && set->supported();
}

static int is_forked(const rc_engine *engine)
{
    return atomic_load(&engine->forked);
}

/* ---- communicator ---- */

void rc_comm_config_init(rc_comm_config *config)
{
    *config = (rc_comm_config){.size = sizeof *config,
                               .rank = 0,
                               .world_size = 1,
                               .segment_bytes = 256 << 10,
                               .heartbeat_ms = 400,
                               .peer_timeout_ms = 10000};
}

static int config_ok(const rc_comm_config *config)
{
    return config->size == sizeof *config && config->world_size >= 1 &&
           config->world_size <= FINGERPRINT_MAX_ROOT + 1 && config->rank >= 0 &&
           config->rank < config->world_size && config->segment_bytes >= 4096 &&
           config->segment_bytes % 4096 == 0 && config->segment_bytes <= 4U << 20 &&
           config->heartbeat_ms > 0 && config->peer_timeout_ms > 0 &&
           (unsigned)config->algorithm < RC_ALGORITHM_COUNT && config->threads <= 2;
}

rc_result rc_comm_create(rc_comm **out, rc_engine *engine, const rc_comm_config *config)
{
    *out = NULL;
    if (engine == NULL || config == NULL || !config_ok(config))
        return RC_INVALID_ARGUMENT;
    if (is_forked(engine))
        return RC_INVALID_STATE;
    return comm_create(out, engine, config);
}

/* Returns 1 if all hosts have the same number of ranks, and enough to share. */
static int hosts_ok(const rc_comm *comm, const int32_t *hosts)
{
    int n = comm->env.world_size, ranks = 0;
    for (int rank = 0; rank < n; rank++) {
        int here = 0;
        for (int other = 0; other < n; other++)
            here += hosts[other] == hosts[rank];
        if (here < 2 || here > REGION_MAX_RANKS || (ranks != 0 && here != ranks))
            return 0;
        ranks = here;
    }
    return 1;
}

rc_result rc_comm_share(rc_comm *comm, const int32_t *hosts, int fd)
{
    int ok = comm != NULL && comm->state == COMM_NEW && comm->shared.hosts == 0 && hosts != NULL &&
             hosts_ok(comm, hosts);
    if (ok && fd >= 0)
        return comm_share(comm, hosts, fd);
    if (fd >= 0)
        close(fd);
    return RC_INVALID_ARGUMENT;
}

rc_result rc_comm_start(rc_comm *comm)
{
    if (comm == NULL || comm->state != COMM_NEW || is_forked(comm->engine))
        return RC_INVALID_STATE;
    for (int rank = 0; rank < comm->env.world_size; rank++)
        if (comm->env.links[rank] != NULL && comm->env.links[rank]->lane_count == 0)
            return RC_INVALID_STATE;
    return comm_start(comm);
}

void rc_comm_abort(rc_comm *comm, const char *reason)
{
    if (comm != NULL && !is_forked(comm->engine))
        comm_abort(comm, reason != NULL ? reason : "no reason given");
}

rc_result rc_comm_leave(rc_comm *comm, int timeout_ms)
{
    if (comm == NULL || is_forked(comm->engine))
        return RC_INVALID_STATE;
    return comm_leave(comm, timeout_ms < 0 ? 0 : timeout_ms);
}

rc_result rc_comm_close(rc_comm *comm, int timeout_ms)
{
    if (comm == NULL || is_forked(comm->engine))
        return RC_INVALID_STATE;
    return comm_close(comm, timeout_ms < 0 ? 0 : timeout_ms);
}

void rc_comm_free(rc_comm *comm)
{
    if (comm != NULL && !is_forked(comm->engine))
        comm_free(comm);
}

void rc_comm_error(rc_comm *comm, rc_error *out)
{
    if (is_forked(comm->engine)) {
        error_clear(out);
        error_set(out, RC_INVALID_STATE, "this is a forked child");
        return;
    }
    engine_lock(comm->engine);
    *out = comm->error;
    engine_unlock(comm->engine);
}

/* ---- error feedback ---- */

rc_result rc_feedback_create(rc_feedback **out, uint64_t count)
{
    *out = NULL;
    return count > FINGERPRINT_MAX_COUNT ? RC_INVALID_ARGUMENT : feedback_create(out, count);
}

void rc_feedback_free(rc_feedback *feedback)
{
    if (feedback != NULL)
        feedback_release(feedback);
}

uint64_t rc_feedback_count(const rc_feedback *feedback)
{
    return feedback->count;
}

int rc_feedback_busy(const rc_feedback *feedback)
{
    return atomic_load(&feedback->claimed);
}

float *rc_feedback_worker(rc_feedback *feedback)
{
    if (rc_feedback_busy(feedback))
        return NULL;
    return feedback_worker(feedback);
}

float *rc_feedback_owner(rc_feedback *feedback, uint64_t *start, uint64_t *count)
{
    *start = *count = 0;
    if (rc_feedback_busy(feedback))
        return NULL;
    *start = feedback->owned.start;
    *count = feedback->owned.end - feedback->owned.start;
    return feedback->owner[feedback->now];
}

rc_result rc_feedback_load(rc_feedback *feedback, const float *worker, const float *owner,
                           uint64_t start, uint64_t count)
{
    if (start > feedback->count || count > feedback->count - start || (owner == NULL && count > 0))
        return RC_INVALID_ARGUMENT;
    if (rc_feedback_busy(feedback))
        return RC_INVALID_STATE;
    return feedback_load(feedback, worker, owner, start, count);
}

rc_result rc_feedback_rescale(rc_feedback *feedback, double factor)
{
    if (!isfinite(factor))
        return RC_INVALID_ARGUMENT;
    if (rc_feedback_busy(feedback))
        return RC_INVALID_STATE;
    return feedback_rescale(feedback, factor);
}

rc_result rc_feedback_undo(rc_feedback *feedback)
{
    if (rc_feedback_busy(feedback))
        return RC_INVALID_STATE;
    feedback_undo(feedback);
    return RC_OK;
}

/* ---- works ---- */

/* Returns 1 if src and dst overlap so that memory would be written before it is read. They may be
 * the same memory or, where one buffer holds all ranks' parts, the other this rank's part of it. */
static int overlaps(const rc_comm *comm, const rc_call *call)
{
    uintptr_t src = (uintptr_t)call->src, dst = (uintptr_t)call->dst;
    uint64_t n = (uint64_t)comm->env.world_size, part = call->count * rc_dtype_size(call->dtype);
    uint64_t own = (uint64_t)comm->env.rank * part, src_bytes = part, dst_bytes = part;
    int in_place = src == dst;
    if (n == 1 || !plan_reads(call, comm->env.rank) || !plan_writes(call, comm->env.rank))
        return 0;
    switch (call->collective) {
    case RC_ALLGATHER:
    case RC_GATHER: dst_bytes *= n, in_place = src == dst + own; break;
    case RC_REDUCE_SCATTER:
    case RC_SCATTER: src_bytes *= n, in_place = dst == src + own; break;
    case RC_ALLTOALL: src_bytes *= n, dst_bytes *= n, in_place = 0; break;
    default: break;
    }
    return !in_place && src < dst + dst_bytes && dst < src + src_bytes;
}

static rc_result check_codec(const rc_call *call, rc_error *error)
{
    int is_float = call->dtype == RC_F32 || call->dtype == RC_F64;
    int adds = call->op == RC_SUM || call->op == RC_AVG || call->collective == RC_ALLGATHER;
    if (call->codec != RC_CODEC_NONE && !is_float)
        return error_set(error, RC_INVALID_ARGUMENT, "compression takes f32 and f64 tensors only");
    if (plan_quantises(call) || call->feedback != NULL) {
        const char *what = call->feedback != NULL ? "error feedback" : "compression that quantises";
        if (call->collective != RC_ALLREDUCE && call->collective != RC_REDUCE_SCATTER &&
            call->collective != RC_ALLGATHER)
            return error_set(error, RC_INVALID_ARGUMENT,
                             "%s works in all-reduces, reduce-scatters and all-gathers only", what);
        if (!adds || !is_float)
            return error_set(error, RC_INVALID_ARGUMENT,
                             "%s takes sums and averages of f32 and f64 tensors only", what);
    }
    return RC_OK;
}

static rc_result check_encoded(const rc_comm *comm, const rc_call *call, rc_error *error)
{
    int fits =
        call->dtype == RC_F32 && call->collective == RC_ALLREDUCE && call->codec >= RC_CODEC_BF16;
    if (!call->encoded)
        return RC_OK;
    if (!fits || comm->shared.hosts > 0 || call->feedback != NULL)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "what is encoded already goes into all-reduces of f32 tensors with a "
                         "compression only, without shared memory and without error feedback");
    if (plan_quantises(call) && (comm->env.world_size < 2 || call->src != call->dst))
        return error_set(error, RC_INVALID_ARGUMENT,
                         "payloads are given and taken in one memory, among two ranks or more");
    return RC_OK;
}

rc_result rc_comm_layout(rc_comm *comm, const rc_call *call, rc_layout *out)
{
    memset(out, 0, sizeof *out);
    if (call->count > FINGERPRINT_MAX_COUNT || !encoded_suits(call, &comm->env))
        return RC_INVALID_ARGUMENT;
    encoded_layout(out, &comm->env, call);
    return RC_OK;
}

static rc_result check_feedback(const rc_comm *comm, const rc_call *call, rc_error *error)
{
    rc_feedback *f = call->feedback;
    uint64_t parts = call->collective == RC_REDUCE_SCATTER ? (uint64_t)comm->env.world_size : 1;
    if (f == NULL)
        return RC_OK;
    RC_TRY(feedback_require_free(f, error));
    if (f->count != call->count * parts)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "error feedback for %llu elements does not fit a tensor of %llu",
                         (unsigned long long)f->count, (unsigned long long)(call->count * parts));
    if (!feedback_suits(f, fingerprint_op(fingerprint_of(call))))
        return error_set(error, RC_INVALID_ARGUMENT,
                         "this error feedback holds residuals of another op: sums and averages "
                         "have different units");
    return RC_OK;
}

static rc_result check_call(const rc_comm *comm, const rc_call *call, rc_error *error)
{
    unsigned collective = call->collective, op = call->op, dtype = call->dtype;
    unsigned codec = call->codec;
    if (call->size != sizeof *call || collective >= RC_COLLECTIVE_COUNT || op >= RC_OP_COUNT ||
        dtype >= RC_DTYPE_COUNT || codec >= RC_CODEC_COUNT || call->caller > FINGERPRINT_MAX_ROOT)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "an unknown collective, op, dtype, codec or caller");
    RC_TRY(check_codec(call, error));
    RC_TRY(check_encoded(comm, call, error));
    int any = collective == RC_RECV && call->root == RC_ANY_SOURCE && comm->env.world_size > 1;
    if (!any && (call->root < 0 || call->root >= comm->env.world_size))
        return error_set(error, RC_INVALID_ARGUMENT, "rank %d is not in a world of %d", call->root,
                         comm->env.world_size);
    if ((collective == RC_SEND || collective == RC_RECV) && call->root == comm->env.rank)
        return error_set(error, RC_INVALID_ARGUMENT,
                         "a rank cannot send to or receive from itself");
    if (call->count > FINGERPRINT_MAX_COUNT)
        return error_set(error, RC_INVALID_ARGUMENT, "more than 2^36 - 1 elements");
    if (collective == RC_BARRIER && call->count > 0)
        return error_set(error, RC_INVALID_ARGUMENT, "a barrier has no elements");
    if (call->count > 0 && ((plan_reads(call, comm->env.rank) && call->src == NULL) ||
                            (plan_writes(call, comm->env.rank) && call->dst == NULL)))
        return error_set(error, RC_INVALID_ARGUMENT, "a buffer is missing");
    if (overlaps(comm, call))
        return error_set(error, RC_INVALID_ARGUMENT, "the source and the result overlap");
    if (call->timeout_ms == 0)
        return error_set(error, RC_INVALID_ARGUMENT, "a timeout of 0 would fail at once");
    return check_feedback(comm, call, error);
}

rc_result rc_check(rc_comm *comm, const rc_call *call, rc_error *error)
{
    if (error != NULL)
        error_clear(error);
    if (is_forked(comm->engine))
        return error_set(error, RC_INVALID_STATE,
                         "a forked child cannot use its parent's communicator; start workers "
                         "with spawn, or make a communicator in the child");
    if (comm->state == COMM_NEW || comm->state == COMM_CLOSED)
        return error_set(error, RC_INVALID_STATE, "the communicator is %s",
                         comm->state == COMM_NEW ? "not started" : "closed");
    return check_call(comm, call, error);
}

rc_result rc_submit(rc_comm *comm, const rc_call *call, rc_work **out, rc_error *error)
{
    *out = NULL;
    RC_TRY(rc_check(comm, call, error));
    RC_TRY(feedback_claim(call->feedback, error));
    rc_result result = comm_submit(comm, call, out);
    if (result == RC_OK)
        return RC_OK;
    feedback_unclaim(call->feedback);
    return error_set(error, result, "no memory for a work");
}

static int is_done(const void *arg)
{
    return atomic_load(&((const rc_work *)arg)->result) != RC_AGAIN;
}

rc_result rc_work_wait(rc_work *work, int timeout_ms)
{
    if (timeout_ms > 0 && !is_done(work)) {
        if (is_forked(work->engine))
            return RC_INVALID_STATE;
        uint64_t deadline = clock_ns() + (uint64_t)timeout_ms * CLOCK_MS;
        engine_lock(work->engine);
        engine_drive(work->engine, is_done, work, deadline, work->spin);
        engine_unlock(work->engine);
    }
    return (rc_result)atomic_load(&work->result);
}

rc_result rc_run(rc_comm *comm, const rc_call *call, uint64_t count, const void *src, void *dst,
                 int timeout_ms, rc_work **out)
{
    rc_call whole = *call;
    whole.count = count;
    whole.src = src;
    whole.dst = dst;
    RC_TRY(rc_submit(comm, &whole, out, NULL));
    rc_result result = rc_work_wait(*out, timeout_ms);
    if (result == RC_OK) {
        rc_work_free(*out);
        *out = NULL;
    }
    return result;
}

void rc_work_error(rc_work *work, rc_error *out)
{
    error_clear(out);
    out->seq = rc_work_seq(work);
    if (is_done(work))
        *out = work->error;
}

uint64_t rc_work_seq(const rc_work *work)
{
    return work->matched_later && !is_done(work) ? 0 : work_number(work);
}

int rc_work_root(const rc_work *work)
{
    return work->matched_later && !is_done(work) ? RC_ANY_SOURCE : work->call.root;
}

rc_result rc_work_notify(rc_work *work)
{
    if (is_forked(work->engine))
        return RC_INVALID_STATE;
    engine_lock(work->engine);
    if (is_done(work) && !work->call.notify) {
        work_retain(work);
        engine_push_done(work->engine, &work->done_entry);
    }
    work->call.notify = 1;
    engine_unlock(work->engine);
    return RC_OK;
}

double rc_work_elapsed(const rc_work *work)
{
    return is_done(work) ? clock_seconds(work->submitted, work->finished) : 0.0;
}

void rc_work_stats_get(const rc_work *work, rc_work_stats *out)
{
    *out = is_done(work) ? work->stats : (rc_work_stats){.submitted_ns = work->submitted};
}

void rc_work_free(rc_work *work)
{
    if (work != NULL)
        work_release(work);
}

rc_result rc_engine_take_done(rc_engine *engine, int timeout_ms, rc_work **out)
{
    *out = NULL;
    if (is_forked(engine))
        return RC_INVALID_STATE;
    *out = (rc_work *)engine_pop_done(engine, timeout_ms < 0 ? 0 : timeout_ms);
    return *out != NULL ? RC_OK : RC_AGAIN;
}
