/* feedback.c - see feedback.h. */
#include "feedback.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../base/error.h"
#include "../base/float_mode.h"

enum { ALIGNMENT = 64, HUGE_BYTES = 2 << 20 };

/* ---- what is zero ---- */

static void make_zero(residual *r, feedback_range range)
{
    if (marks_zero(&r->marks, range))
        return;
    memset(r->data + range.start, 0, (range.end - range.start) * sizeof *r->data);
    marks_note_zero(&r->marks, range);
}

static int all_zero(const float *x, uint64_t count)
{
    float_mode mode = float_mode_enter(); /* subnormals are none */
    uint64_t i = 0;
    while (i < count && x[i] == 0.0F)
        i++;
    float_mode_leave(mode);
    return i == count;
}

int feedback_is_zero(rc_feedback *f, feedback_range range)
{
    residual *now = &f->worker[f->now];
    if (marks_zero(&now->marks, range))
        return 1;
    if (!all_zero(now->data + range.start, range.end - range.start))
        return 0;
    marks_note_zero(&now->marks, range);
    return 1;
}

int feedback_suits(rc_feedback *f, rc_op op)
{
    if (!f->has_op || f->op == op)
        return 1;
    return feedback_is_zero(f, (feedback_range){0, f->count}) &&
           (range_is_empty(f->owned) || all_zero(f->owner[f->now], f->owned.end - f->owned.start));
}

/* ---- life ---- */

/* Asks for large pages where whole ones fit: residuals pass by in three streams at once, and small
 * pages take long to find, and longer when they are first written to. Without them nothing but
 * speed changes. */
static void want_huge_pages(uintptr_t start, uintptr_t end)
{
    start = (start + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
    end = end / HUGE_BYTES * HUGE_BYTES;
    if (start < end)
        (void)madvise((void *)start, end - start, MADV_HUGEPAGE);
}

/* Allocates aligned zeros. Pages that are never written to cost nothing. */
static float *allocate(uint64_t count, void **memory)
{
    if (count > SIZE_MAX / sizeof(float) - ALIGNMENT)
        return NULL;
    *memory = calloc(1, count * sizeof(float) + ALIGNMENT);
    uintptr_t aligned = ((uintptr_t)*memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (*memory == NULL)
        return NULL;
    want_huge_pages(aligned, aligned + count * sizeof(float));
    return (float *)aligned;
}

rc_result feedback_create(rc_feedback **out, uint64_t count)
{
    rc_feedback *f = calloc(1, sizeof *f);
    *out = NULL;
    if (f == NULL)
        return RC_NO_MEMORY;
    atomic_init(&f->references, 1);
    atomic_init(&f->claimed, 0);
    f->count = count;
    for (int i = 0; i < 2; i++)
        if ((f->worker[i].data = allocate(count, &f->worker[i].memory)) == NULL) {
            feedback_release(f);
            return RC_NO_MEMORY;
        }
    *out = f;
    return RC_OK;
}

void feedback_release(rc_feedback *f)
{
    if (atomic_fetch_sub(&f->references, 1) > 1)
        return;
    free(f->worker[0].memory);
    free(f->worker[1].memory);
    free(f->owner_memory);
    free(f->folded.values);
    free(f);
}

static rc_result refuse_second_use(rc_error *error)
{
    return error_set(error, RC_INVALID_STATE,
                     "this error feedback is in use by a collective in flight; wait for that one "
                     "first, or give each tensor its own");
}

rc_result feedback_require_free(const rc_feedback *f, rc_error *error)
{
    return atomic_load(&f->claimed) ? refuse_second_use(error) : RC_OK;
}

static void drop_folded(rc_feedback *f)
{
    free(f->folded.values);
    f->folded = (folded){0};
}

/* Takes a fold back, if there was one. The owner's buffers have become no smaller since. */
static void unfold(rc_feedback *f)
{
    const folded *was = &f->folded;
    if (was->values == NULL)
        return;
    uint64_t count = was->owned.end - was->owned.start;
    residual *now = &f->worker[f->now];
    memcpy(now->data + was->owned.start, was->values, count * sizeof(float));
    memcpy(f->owner[f->now], was->values + count, count * sizeof(float));
    now->marks = was->marks;
    f->owned = was->owned;
    drop_folded(f);
}

rc_result feedback_claim(rc_feedback *f, rc_error *error)
{
    int free_now = 0;
    if (f == NULL)
        return RC_OK;
    if (!atomic_compare_exchange_strong(&f->claimed, &free_now, 1))
        return refuse_second_use(error);
    atomic_fetch_add(&f->references, 1);
    f->undoable = 0;
    drop_folded(f);
    return RC_OK;
}

void feedback_unclaim(rc_feedback *f)
{
    if (f == NULL)
        return;
    if (!f->undoable)
        unfold(f);
    atomic_store(&f->claimed, 0);
    feedback_release(f);
}

/* ---- the owner's ---- */

static rc_result make_owner_room(rc_feedback *f, uint64_t count)
{
    if (count <= f->owner_room)
        return RC_OK;
    void *memory;
    uint64_t room = (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    float *data = room <= UINT64_MAX / 2 ? allocate(2 * room, &memory) : NULL;
    if (data == NULL)
        return RC_NO_MEMORY;
    free(f->owner_memory);
    f->owner_memory = memory;
    f->owner[0] = data;
    f->owner[1] = data + room;
    f->owner_room = room;
    return RC_OK;
}

rc_result feedback_fold(rc_feedback *f, double factor)
{
    residual *now = &f->worker[f->now];
    const float *owner = f->owner[f->now];
    float by = (float)factor, *worker = now->data + f->owned.start;
    if (range_is_empty(f->owned))
        return RC_OK;
    uint64_t count = f->owned.end - f->owned.start;
    float *values = malloc(2 * count * sizeof *values);
    if (values == NULL)
        return RC_NO_MEMORY;
    drop_folded(f);
    f->folded = (folded){.values = values, .owned = f->owned, .marks = now->marks};
    memcpy(values, worker, count * sizeof *values);
    memcpy(values + count, owner, count * sizeof *values);
    for (uint64_t i = 0; i < count; i++)
        worker[i] += owner[i] * by;
    marks_note_written(&now->marks, f->owned);
    f->owned = (feedback_range){0};
    return RC_OK;
}

/* ---- a work ---- */

/* Makes the next buffer zero wherever the work does not write it. */
static void prepare_next(rc_feedback *f, const feedback_use *use)
{
    residual *next = &f->worker[!f->now];
    feedback_range whole = use->worker;
    make_zero(next, (feedback_range){0, whole.start});
    make_zero(next, (feedback_range){whole.end, f->count});
    make_zero(next, use->exact);
    next->marks = (feedback_marks){.live = whole};
    marks_note_zero(&next->marks, use->exact);
}

/* Prepares the owner's residuals for a work: owner_in and owner_out of view. */
static rc_result begin_owner(rc_feedback *f, feedback_range owner, feedback_view *view)
{
    RC_TRY(make_owner_room(f, range_is_empty(owner) ? 0 : owner.end - owner.start));
    f->next_owned = owner;
    if (!range_is_empty(owner)) {
        view->owner_in = range_is_empty(f->owned) ? NULL : f->owner[f->now];
        view->owner_out = f->owner[!f->now];
    }
    return RC_OK;
}

rc_result feedback_begin(rc_feedback *f, const feedback_use *use, feedback_view *view)
{
    if (f->owned.start != use->owner.start || f->owned.end != use->owner.end)
        RC_TRY(feedback_fold(f, use->fold));
    *view = (feedback_view){0};
    RC_TRY(begin_owner(f, use->owner, view));
    prepare_next(f, use);
    const residual *now = &f->worker[f->now];
    view->worker_out = f->worker[!f->now].data + use->worker.start;
    view->exact_is_zero = marks_zero(&now->marks, use->exact);
    if (!marks_zero(&now->marks, use->worker))
        view->worker_in = now->data + use->worker.start;
    return RC_OK;
}

void feedback_commit(rc_feedback *f, rc_op op)
{
    f->now = !f->now;
    f->prev_owned = f->owned;
    f->owned = f->next_owned;
    f->undoable = 1;
    f->has_op = 1;
    f->op = op;
}

rc_result feedback_add_residual(rc_feedback *f, rc_dtype dtype, const void *src, void **out)
{
    size_t elem_bytes = rc_dtype_size(dtype);
    const float *residual = f->worker[f->now].data;
    *out = f->count <= SIZE_MAX / elem_bytes - 1 ? malloc((f->count + 1) * elem_bytes) : NULL;
    if (*out == NULL)
        return RC_NO_MEMORY;
    for (uint64_t i = 0; i < f->count; i++)
        if (dtype == RC_F64)
            ((double *)*out)[i] = ((const double *)src)[i] + (double)residual[i];
        else
            ((float *)*out)[i] = ((const float *)src)[i] + residual[i];
    return RC_OK;
}

void feedback_clear(rc_feedback *f)
{
    make_zero(&f->worker[f->now], (feedback_range){0, f->count});
    f->owned = (feedback_range){0};
    f->has_op = 0;
    f->undoable = 0;
    drop_folded(f);
}

/* ---- the caller's ---- */

float *feedback_worker(rc_feedback *f)
{
    marks_note_written(&f->worker[f->now].marks, (feedback_range){0, f->count});
    return f->worker[f->now].data;
}

rc_result feedback_load(rc_feedback *f, const float *worker, const float *owner, uint64_t start,
                        uint64_t count)
{
    RC_TRY(make_owner_room(f, count));
    feedback_clear(f);
    if (worker != NULL && f->count > 0)
        memcpy(feedback_worker(f), worker, f->count * sizeof *worker);
    if (count > 0) {
        memcpy(f->owner[f->now], owner, count * sizeof *owner);
        f->owned = (feedback_range){start, start + count};
    }
    return RC_OK;
}

/* Multiplies values; returns 1 if all products are finite. */
static int scaled_by(float *to, const float *values, uint64_t count, float by)
{
    float most = 0.0f;
    for (uint64_t i = 0; i < count; i++) {
        float product = values[i] * by;
        most = fabsf(product) > most ? fabsf(product) : most;
        if (to != NULL)
            to[i] = product;
    }
    return isfinite(most);
}

rc_result feedback_rescale(rc_feedback *f, double factor)
{
    const feedback_range live = f->worker[f->now].marks.live;
    float by = (float)factor, *worker = f->worker[f->now].data + live.start;
    float *owner = f->owner[f->now];
    uint64_t count = range_is_empty(live) ? 0 : live.end - live.start;
    uint64_t owned = range_is_empty(f->owned) ? 0 : f->owned.end - f->owned.start;
    float_mode mode = float_mode_enter();
    int is_finite =
        isfinite(by) && scaled_by(NULL, worker, count, by) && scaled_by(NULL, owner, owned, by);
    if (is_finite) {
        f->undoable = 0;
        scaled_by(worker, worker, count, by);
        scaled_by(owner, owner, owned, by);
    }
    float_mode_leave(mode);
    return is_finite ? RC_OK : RC_INVALID_ARGUMENT;
}

void feedback_undo(rc_feedback *f)
{
    if (!f->undoable)
        return;
    f->now = !f->now;
    f->owned = f->prev_owned;
    f->undoable = 0;
    unfold(f);
}
