/* outbox.c - see outbox.h. */
#include "outbox.h"

#include <errno.h>
#include <sys/socket.h>

#include "../base/clock.h"

void queue_push(frame_queue *q, out_frame *frame)
{
    frame->next = NULL;
    if (q->tail != NULL)
        q->tail->next = frame;
    else
        q->head = frame;
    q->tail = frame;
}

out_frame *queue_pop(frame_queue *q)
{
    out_frame *frame = q->head;
    if (frame != NULL) {
        q->head = frame->next;
        if (q->head == NULL)
            q->tail = NULL;
    }
    return frame;
}

void frame_seal(out_frame *frame)
{
    if (!frame->sealed)
        frame_encode(frame->header_bytes, &frame->header, frame->payload);
    frame->sealed = 1;
}

static void add_part(outbox_batch *batch, const uint8_t *bytes, size_t count)
{
    batch->iov[batch->iovs++] = (struct iovec){(void *)bytes, count};
    batch->bytes += count;
}

void outbox_gather(const outbox *box, outbox_batch *batch, size_t most)
{
    size_t skip = box->sent;
    batch->iovs = batch->count = 0;
    batch->bytes = 0;
    for (out_frame *f = box->list.head; f != NULL && batch->count < OUTBOX_FRAMES; f = f->next) {
        if (batch->count > 0 && batch->bytes + frame_bytes(f) > most)
            return;
        if (skip < FRAME_HEADER_BYTES) {
            add_part(batch, f->header_bytes + skip, FRAME_HEADER_BYTES - skip);
            skip = FRAME_HEADER_BYTES;
        }
        size_t done = skip - FRAME_HEADER_BYTES;
        if (f->header.length > done)
            add_part(batch, f->payload + done, f->header.length - done);
        batch->frames[batch->count++] = f;
        skip = 0;
    }
}

ssize_t outbox_send(outbox *box, int fd, const outbox_batch *batch)
{
    struct msghdr message = {.msg_iov = (struct iovec *)batch->iov,
                             .msg_iovlen = (size_t)batch->iovs};
    ssize_t sent;
    do
        sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    if (sent > 0)
        atomic_store(&box->last_tx, clock_ns());
    int is_full = errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM;
    return sent < 0 && is_full ? 0 : sent;
}

void outbox_advance(outbox *box, size_t bytes)
{
    atomic_fetch_add(&box->sent_bytes, bytes);
    box->sent += bytes;
    while (box->list.head != NULL && box->sent >= frame_bytes(box->list.head)) {
        box->sent -= frame_bytes(box->list.head);
        queue_push(&box->gone, queue_pop(&box->list));
    }
}

void outbox_reclaim(outbox *box)
{
    out_frame *frame;
    while ((frame = queue_pop(&box->gone)) != NULL)
        queue_push(&box->back, frame);
}
