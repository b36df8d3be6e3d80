/* fake_streams.c - streams, events, and the thread that is the GPU; see fake_libcuda.h.
 *
 * A stream is a queue of items with numbers. An item needs what is before it on its stream, and the
 * items of other streams that events and the default stream make it wait for. The GPU's thread runs
 * only what is wanted, and of what that needs one item after the other, so the order is the same
 * every time.
 */
#include "fake.h"

#include <stdlib.h>
#include <unistd.h>

static cu_stream streams;
static cu_event events;
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER;   /* there is more to run */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER; /* an item has run */
static int has_thread, pending, pending_host_functions;

/* ---- the GPU ---- */

/* The first of a stream, or what it waits for. */
static fake_item *first_needed(cu_stream stream)
{
    fake_item *item = stream->first;
    for (int i = 0; i < item->need_count; i++)
        if (item->needs[i].stream->done < item->needs[i].number)
            return first_needed(item->needs[i].stream);
    return item;
}

static cu_stream stream_of(const fake_item *item)
{
    for (cu_stream s = streams; s != NULL; s = s->next)
        if (s->first == item)
            return s;
    abort();
}

static fake_item *next_item(void)
{
    for (cu_stream s = streams; s != NULL; s = s->next)
        if (s->done < s->wanted)
            return first_needed(s);
    return NULL;
}

static void run(fake_item *item)
{
    cu_stream stream = stream_of(item);
    int skipped = stream->context->broken != CU_OK;
    pthread_mutex_unlock(&fake_lock);
    fake_me.in_host_function = item->is_host_function;
    cu_result result = skipped ? CU_OK : item->run(item);
    fake_me.in_host_function = 0;
    pthread_mutex_lock(&fake_lock);
    if (result != CU_OK)
        stream->context->broken = result;
    stream->first = item->next;
    if (stream->first == NULL)
        stream->last = NULL;
    stream->done = item->number;
    pending--;
    pending_host_functions -= item->is_host_function;
    if (item->staged)
        free(item->host);
    free(item->needs);
    free(item);
    pthread_cond_broadcast(&progress);
}

static void *be_gpu(void *unused)
{
    pthread_mutex_lock(&fake_lock);
    for (;;) {
        fake_item *item = next_item();
        if (item != NULL)
            run(item);
        else
            pthread_cond_wait(&wanted, &fake_lock);
    }
    return unused;
}

static void want(cu_stream stream, uint64_t number)
{
    if (stream->wanted >= number)
        return;
    stream->wanted = number;
    pthread_cond_signal(&wanted);
}

static cu_result finish(cu_stream stream, uint64_t number)
{
    want(stream, number);
    while (stream->done < number)
        pthread_cond_wait(&progress, &fake_lock);
    return stream->context->broken;
}

/* Lets go of the lock meanwhile. */
static void linger(cu_stream stream, uint64_t number)
{
    if (stream->linger_ms == 0 || stream->done >= number)
        return;
    pthread_mutex_unlock(&fake_lock);
    usleep(stream->linger_ms * 1000);
    pthread_mutex_lock(&fake_lock);
}

void fake_cuda_linger(cu_stream stream, unsigned ms)
{
    pthread_mutex_lock(&fake_lock);
    stream->linger_ms = ms;
    pthread_mutex_unlock(&fake_lock);
}

cu_result fake_finish(cu_stream stream)
{
    return finish(stream, stream->queued);
}

cu_result fake_finish_all(void)
{
    cu_result result = CU_OK;
    for (cu_stream s = streams; s != NULL; s = s->next) {
        cu_result one = fake_finish(s);
        result = result != CU_OK ? result : one;
    }
    return result;
}

int fake_cuda_pending(void)
{
    pthread_mutex_lock(&fake_lock);
    int left = pending;
    pthread_mutex_unlock(&fake_lock);
    return left;
}

/* ---- queueing ---- */

static void need(fake_item *item, cu_stream stream, uint64_t number)
{
    if (stream == NULL || stream->done >= number)
        return;
    size_t bytes = (size_t)(item->need_count + 1) * sizeof *item->needs;
    item->needs = realloc(item->needs, bytes);
    if (item->needs == NULL)
        abort();
    item->needs[item->need_count++] = (struct fake_need){stream, number};
}

static int is_blocking(const struct CUstream_st *stream)
{
    return !(stream->flags & CU_NON_BLOCKING);
}

/* The legacy default stream and the blocking streams of its context wait for each other. */
static void need_default(fake_item *item, cu_stream stream)
{
    cu_context context = stream->context;
    if (!stream->legacy && is_blocking(stream) && context->legacy != NULL)
        need(item, context->legacy, context->legacy->queued);
    for (cu_stream s = stream->legacy ? streams : NULL; s != NULL; s = s->next)
        if (s != stream && s->context == context && is_blocking(s))
            need(item, s, s->queued);
}

fake_item *fake_item_make(cu_result (*run)(fake_item *item))
{
    fake_item *item = calloc(1, sizeof *item);
    if (item == NULL)
        abort();
    item->run = run;
    return item;
}

static void start_thread(void)
{
    pthread_t thread;
    if (has_thread)
        return;
    if (pthread_create(&thread, NULL, be_gpu, NULL) != 0 || pthread_detach(thread) != 0)
        abort();
    has_thread = 1;
}

static cu_result refuse(fake_item *item, cu_result result)
{
    if (item->staged)
        free(item->host);
    free(item->needs);
    free(item);
    return result;
}

cu_result fake_queue(cu_stream handle, fake_item *item)
{
    cu_stream stream = fake_stream(handle);
    if (stream == NULL)
        return refuse(item, CU_INVALID_HANDLE);
    if (stream->capturing) {
        fake_spoil_capture();
        return refuse(item, CU_STREAM_CAPTURE_UNSUPPORTED);
    }
    start_thread();
    need_default(item, stream);
    item->number = ++stream->queued;
    *(stream->last != NULL ? &stream->last->next : &stream->first) = item;
    stream->last = item;
    pending++;
    pending_host_functions += item->is_host_function;
    if (fake_set.early || item->is_host_function)
        want(stream, item->number);
    uint64_t number = item->number;
    while (fake_set.early && pending_host_functions == 0 && stream->done < number)
        pthread_cond_wait(&progress, &fake_lock);
    return CU_OK;
}

int fake_is_copied(const void *from, size_t bytes)
{
    const char *start = from;
    for (cu_stream s = streams; s != NULL; s = s->next)
        for (fake_item *item = s->context->broken ? NULL : s->first; item != NULL;
             item = item->next) /* on a broken GPU nothing runs any more */
            if (!item->staged && item->host != NULL && (char *)item->host < start + bytes &&
                start < (char *)item->host + item->bytes)
                return 1;
    return 0;
}

/* ---- streams ---- */

static cu_stream make_stream(cu_context context, unsigned flags)
{
    cu_stream stream = calloc(1, sizeof *stream);
    if (stream == NULL)
        abort();
    *stream = (struct CUstream_st){.context = context, .flags = flags, .next = streams};
    streams = stream;
    return stream;
}

static cu_stream legacy_of(cu_context context)
{
    if (context->legacy == NULL) {
        context->legacy = make_stream(context, 0);
        context->legacy->legacy = 1;
    }
    return context->legacy;
}

static cu_stream own_of(cu_context context)
{
    for (cu_stream s = streams; s != NULL; s = s->next)
        if (s->context == context && s->thread == &fake_me)
            return s;
    cu_stream made = make_stream(context, 0);
    made->thread = &fake_me;
    return made;
}

static cu_stream find_stream(cu_stream handle)
{
    for (cu_stream s = streams; s != NULL; s = s->next)
        if (s == handle && !s->given_back)
            return s;
    fake_blame("stream %p is used, which does not exist", (void *)handle);
    return NULL;
}

cu_stream fake_stream(cu_stream handle)
{
    cu_context context = fake_current();
    if (context == NULL)
        return NULL;
    if (handle == NULL || handle == CU_LEGACY_STREAM)
        return legacy_of(context);
    if (handle == CU_THREAD_STREAM)
        return own_of(context);
    cu_stream stream = find_stream(handle);
    return stream != NULL && stream->context == context ? stream : NULL;
}

cu_stream fake_cuda_foreign_stream(int ordinal)
{
    pthread_mutex_lock(&fake_lock);
    cu_stream stream = make_stream(fake_context(ordinal, 0), 0);
    pthread_mutex_unlock(&fake_lock);
    return stream;
}

cu_result cuStreamCreateWithPriority(cu_stream *stream, unsigned flags, int priority)
{
    FAKE_ENTER(cuStreamCreateWithPriority, FAKE_CONTEXT);
    (void)priority;
    if (flags > CU_NON_BLOCKING)
        FAKE_LEAVE(CU_INVALID_VALUE);
    *stream = make_stream(fake_current(), flags);
    FAKE_LEAVE(CU_OK);
}

cu_result cuStreamDestroy_v2(cu_stream handle)
{
    FAKE_ENTER(cuStreamDestroy_v2, FAKE_GIVES_BACK);
    cu_stream stream = find_stream(handle);
    if (stream == NULL)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    stream->given_back = 1;
    want(stream, stream->queued); /* it ends by itself */
    FAKE_LEAVE(CU_OK);
}

cu_result cuStreamGetCtx(cu_stream handle, cu_context *context)
{
    FAKE_ENTER(cuStreamGetCtx, FAKE_CONTEXT);
    *context = fake_current();
    if ((uintptr_t)handle <= (uintptr_t)CU_THREAD_STREAM)
        FAKE_LEAVE(CU_OK);
    cu_stream stream = find_stream(handle);
    if (stream == NULL)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    *context = stream->context;
    FAKE_LEAVE(CU_OK);
}

cu_result cuStreamSynchronize(cu_stream handle)
{
    FAKE_ENTER(cuStreamSynchronize, FAKE_CONTEXT | FAKE_UNSAFE);
    cu_stream stream = fake_stream(handle);
    if (stream != NULL)
        linger(stream, stream->queued);
    FAKE_LEAVE(stream != NULL ? fake_finish(stream) : CU_INVALID_HANDLE);
}

cu_result cuStreamIsCapturing(cu_stream handle, unsigned *status)
{
    FAKE_ENTER(cuStreamIsCapturing, FAKE_CONTEXT);
    int is_legacy = handle == NULL || handle == CU_LEGACY_STREAM;
    if (is_legacy && fake_captured != NULL && is_blocking(fake_captured))
        FAKE_LEAVE(CU_STREAM_CAPTURE_IMPLICIT);
    cu_stream stream = (uintptr_t)handle <= (uintptr_t)CU_THREAD_STREAM ? fake_stream(handle)
                                                                        : find_stream(handle);
    *status = stream != NULL && stream->capturing;
    FAKE_LEAVE(stream != NULL ? CU_OK : CU_INVALID_HANDLE);
}

static cu_result nothing(fake_item *item)
{
    (void)item;
    return CU_OK;
}

int fake_stream_leaks(void)
{
    int left = 0;
    for (cu_stream s = streams; s != NULL; s = s->next)
        left += !s->given_back && !s->legacy && s->thread == NULL && s->context->primary;
    return left;
}

/* ---- events ---- */

static cu_event find_event(cu_event handle)
{
    for (cu_event e = events; e != NULL; e = e->next)
        if (e == handle && !e->given_back)
            return e;
    fake_blame("event %p is used, which does not exist", (void *)handle);
    return NULL;
}

cu_result cuEventCreate(cu_event *event, unsigned flags)
{
    FAKE_ENTER(cuEventCreate, FAKE_CONTEXT);
    if (flags > (CU_BLOCKING_SYNC | CU_NO_TIMING))
        FAKE_LEAVE(CU_INVALID_VALUE);
    *event = calloc(1, sizeof **event);
    if (*event == NULL)
        abort();
    **event = (struct CUevent_st){.context = fake_current(), .next = events};
    events = *event;
    FAKE_LEAVE(CU_OK);
}

cu_result cuEventDestroy_v2(cu_event handle)
{
    FAKE_ENTER(cuEventDestroy_v2, FAKE_GIVES_BACK);
    cu_event event = find_event(handle);
    if (event == NULL)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    event->given_back = 1;
    FAKE_LEAVE(CU_OK);
}

cu_result cuEventRecord(cu_event handle, cu_stream on)
{
    FAKE_ENTER(cuEventRecord, FAKE_CONTEXT);
    cu_event event = find_event(handle);
    if (event == NULL)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    cu_stream stream = fake_stream(on);
    if (stream == NULL || stream->context != event->context)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    cu_result result = fake_queue(on, fake_item_make(nothing));
    if (result == CU_OK) {
        event->stream = stream;
        event->number = stream->queued;
    }
    FAKE_LEAVE(result);
}

cu_result cuEventQuery(cu_event handle)
{
    FAKE_ENTER(cuEventQuery, FAKE_UNSAFE);
    cu_event event = find_event(handle);
    if (event == NULL)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    if (event->stream == NULL || event->stream->done >= event->number)
        FAKE_LEAVE(event->context->broken);
    want(event->stream, event->number);
    FAKE_LEAVE(CU_NOT_READY);
}

cu_result cuEventSynchronize(cu_event handle)
{
    FAKE_ENTER(cuEventSynchronize, FAKE_UNSAFE);
    cu_event event = find_event(handle);
    if (event == NULL)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    if (event->stream != NULL)
        linger(event->stream, event->number);
    FAKE_LEAVE(event->stream != NULL ? finish(event->stream, event->number) : CU_OK);
}

cu_result cuStreamWaitEvent(cu_stream handle, cu_event event_handle, unsigned flags)
{
    FAKE_ENTER(cuStreamWaitEvent, FAKE_CONTEXT);
    cu_event event = find_event(event_handle);
    if (event == NULL || flags != 0)
        FAKE_LEAVE(CU_INVALID_HANDLE);
    fake_item *item = fake_item_make(nothing);
    need(item, event->stream, event->number);
    FAKE_LEAVE(fake_queue(handle, item));
}

int fake_event_leaks(void)
{
    int left = 0;
    for (cu_event e = events; e != NULL; e = e->next)
        left += !e->given_back;
    return left;
}

/* ---- the end ---- */

void fake_streams_drop(void)
{
    for (cu_event e = events, next; e != NULL; e = next) {
        next = e->next;
        free(e);
    }
    for (cu_stream s = streams, next; s != NULL; s = next) {
        next = s->next;
        free(s);
    }
    events = NULL;
    streams = NULL;
}
