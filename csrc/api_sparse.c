/* api_sparse.c - the public functions of sparse payloads (ringcomm_sparse.h): they check arguments,
 * allocate working memory, and see to the mode of what computes.
 */
#include <stdlib.h>

#include "base/float_mode.h"
#include "include/ringcomm_sparse.h"
#include "sparse/payload.h"

uint64_t rc_sparse_record_bytes(const rc_sparse_format *format)
{
    if (!sparse_format_ok(format))
        return 0;
    return sparse_chunk_at(format, format->chunk, 0).bytes;
}

uint64_t rc_sparse_bytes(const rc_sparse_format *format, uint64_t count)
{
    uint64_t whole = rc_sparse_record_bytes(format) == 0 ? 0 : count / format->chunk;
    uint64_t bytes = whole * rc_sparse_record_bytes(format);
    if (rc_sparse_record_bytes(format) == 0 || whole * format->chunk == count)
        return bytes;
    return bytes + sparse_chunk_at(format, count, whole * format->chunk).bytes;
}

uint64_t rc_sparse_most(const rc_sparse_format *format, uint64_t count, int payloads)
{
    if (!sparse_format_ok(format) || payloads < 1)
        return 0;
    uint64_t units = format->chunk / format->block, most = format->kept * (uint64_t)payloads;
    return (count + format->chunk - 1) / format->chunk * (most < units ? most : units);
}

rc_result rc_sparse_select(const rc_sparse_format *format, const char *kernel_set, uint8_t *wire,
                           float *left, const float *residual, const float *delta, float decay,
                           uint64_t count, int *poisoned)
{
    const struct kernel_set *kernels = kernels_find(kernel_set);
    if (kernels == NULL || !sparse_format_ok(format) || !(decay >= 0.0f && decay <= 1.0f))
        return RC_INVALID_ARGUMENT;
    void *room = malloc(sparse_select_room(format));
    if (room == NULL)
        return RC_NO_MEMORY;
    float_mode mode = float_mode_enter();
    *poisoned = sparse_select(format, kernels, room, wire, left, residual, delta, decay, count);
    float_mode_leave(mode);
    free(room);
    return RC_OK;
}

rc_result rc_sparse_join(const rc_sparse_format *format, const char *kernel_set,
                         const uint8_t *const *wires, int payloads, float factor, uint64_t count,
                         rc_sparse_entries *out, uint64_t *total, int *poisoned, int *wrong)
{
    const struct kernel_set *kernels = kernels_find(kernel_set);
    if (kernels == NULL || !sparse_format_ok(format) || payloads < 1 || payloads > UINT16_MAX)
        return RC_INVALID_ARGUMENT;
    void *room = malloc(sparse_join_room(format));
    if (room == NULL)
        return RC_NO_MEMORY;
    float_mode mode = float_mode_enter();
    *total =
        sparse_join(format, kernels, room, wires, payloads, factor, count, out, poisoned, wrong);
    float_mode_leave(mode);
    free(room);
    return *wrong >= 0 ? RC_PROTOCOL : RC_OK;
}

rc_result rc_sparse_scatter(const rc_sparse_format *format, const char *kernel_set,
                            const rc_sparse_entries *entries, float *dense, uint64_t count)
{
    const struct kernel_set *kernels = kernels_find(kernel_set);
    if (kernels == NULL || !sparse_format_ok(format))
        return RC_INVALID_ARGUMENT;
    sparse_scatter(format, kernels, entries, dense, count);
    return RC_OK;
}

rc_result rc_sparse_add(const rc_sparse_format *format, const rc_sparse_entries *entries,
                        float factor, float *dense, uint64_t count)
{
    if (!sparse_format_ok(format))
        return RC_INVALID_ARGUMENT;
    float_mode mode = float_mode_enter();
    sparse_add(format, entries, factor, dense, count);
    float_mode_leave(mode);
    return RC_OK;
}

rc_result rc_sparse_sgd(const rc_sparse_format *format, const char *kernel_set,
                        const rc_sparse_entries *entries, const rc_sparse_sgd_step *step,
                        float *weights, uint64_t count, float *buffer, uint32_t *last)
{
    const struct kernel_set *kernels = kernels_find(kernel_set);
    if (kernels == NULL || !sparse_format_ok(format))
        return RC_INVALID_ARGUMENT;
    if ((buffer == NULL) != (last == NULL) || (buffer == NULL && step->momentum != 0.0f))
        return RC_INVALID_ARGUMENT;
    float_mode mode = float_mode_enter();
    sparse_sgd_step(format, kernels, entries, step, weights, count, buffer, last);
    float_mode_leave(mode);
    return RC_OK;
}

rc_result rc_sparse_adam(const rc_sparse_format *format, const char *kernel_set,
                         const rc_sparse_entries *entries, const rc_sparse_adam_step *step,
                         float *weights, uint64_t count, float *first, float *second)
{
    const struct kernel_set *kernels = kernels_find(kernel_set);
    if (kernels == NULL || !sparse_format_ok(format) || step->number < 1)
        return RC_INVALID_ARGUMENT;
    float_mode mode = float_mode_enter();
    sparse_adam_step(format, kernels, entries, step, weights, count, first, second);
    float_mode_leave(mode);
    return RC_OK;
}

rc_result rc_sparse_take(const rc_sparse_format *format, const rc_sparse_entries *entries,
                         const float *dense, uint64_t count)
{
    if (!sparse_format_ok(format))
        return RC_INVALID_ARGUMENT;
    sparse_take(format, entries, dense, count);
    return RC_OK;
}

rc_result rc_sparse_put(const rc_sparse_format *format, const char *kernel_set,
                        const rc_sparse_entries *entries, void *dense, rc_dtype dtype,
                        uint64_t count)
{
    const struct kernel_set *kernels = kernels_find(kernel_set);
    int known = dtype == RC_F32 || dtype == RC_BF16;
    if (kernels == NULL || !sparse_format_ok(format) || !known)
        return RC_INVALID_ARGUMENT;
    sparse_put(format, kernels, entries, dense, dtype, count);
    return RC_OK;
}
