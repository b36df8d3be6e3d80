/* held.c - see held.h. */
#include "held.h"

#include "tags.h"

static int is_send(const frame_header *h)
{
    return (h->flags & FRAME_P2P) != 0;
}

/* ---- collectives: a pairing heap ---- */

static int is_before(const out_frame *a, const out_frame *b)
{
    if (a->header.seq != b->header.seq)
        return a->header.seq < b->header.seq;
    return a->held.order < b->held.order;
}

static out_frame *merge(out_frame *a, out_frame *b)
{
    if (a == NULL || b == NULL)
        return a != NULL ? a : b;
    out_frame *first = is_before(b, a) ? b : a, *second = first == a ? b : a;
    second->held.sibling = first->held.child;
    first->held.child = second;
    return first;
}

/* Merges the children of a frame that is taken out, in pairs, then the pairs. */
static out_frame *merge_all(out_frame *child)
{
    out_frame *pairs = NULL, *merged = NULL;
    while (child != NULL) {
        out_frame *a = child, *b = a->held.sibling;
        child = b != NULL ? b->held.sibling : NULL;
        a->held.sibling = NULL;
        if (b != NULL)
            b->held.sibling = NULL;
        a = merge(a, b);
        a->held.sibling = pairs;
        pairs = a;
    }
    while (pairs != NULL) {
        out_frame *rest = pairs->held.sibling;
        pairs->held.sibling = NULL;
        merged = merge(merged, pairs);
        pairs = rest;
    }
    return merged;
}

/* ---- sends: a list, and a queue for each tag ---- */

static out_frame *frame_of(keyed_entry *entry)
{
    return entry == NULL ? NULL : (out_frame *)((char *)entry - offsetof(out_frame, held.of_tag));
}

static void append_send(held_frames *held, out_frame *frame)
{
    frame->next = NULL;
    frame->held.before = held->newest;
    if (held->newest != NULL)
        held->newest->next = frame;
    else
        held->oldest = frame;
    held->newest = frame;
    keyed_push(&held->by_tag, &frame->held.of_tag, tags_tag(frame->header.seq));
}

static void unlink_send(held_frames *held, out_frame *frame)
{
    if (frame->held.before != NULL)
        frame->held.before->next = frame->next;
    else
        held->oldest = frame->next;
    if (frame->next != NULL)
        frame->next->held.before = frame->held.before;
    else
        held->newest = frame->held.before;
}

out_frame *held_pop_of_tag(held_frames *held, uint32_t tag)
{
    out_frame *frame = frame_of(keyed_pop(&held->by_tag, tag));
    if (frame == NULL)
        return NULL;
    unlink_send(held, frame);
    held->count--;
    return frame;
}

const out_frame *held_first_of_tag(held_frames *held, uint32_t tag)
{
    return frame_of(keyed_first(&held->by_tag, tag));
}

/* ---- both ---- */

void held_push(held_frames *held, out_frame *frame)
{
    frame->held = (held_place){.order = held->order++};
    held->count++;
    if (is_send(&frame->header))
        append_send(held, frame);
    else
        held->lowest = merge(held->lowest, frame);
}

const out_frame *held_first(const held_frames *held, int send)
{
    return send ? held->oldest : held->lowest;
}

out_frame *held_pop(held_frames *held, int send)
{
    if (held_first(held, send) == NULL)
        return NULL;
    if (send) /* the oldest of all is the oldest of its tag */
        return held_pop_of_tag(held, tags_tag(held->oldest->header.seq));
    held->count--;
    out_frame *frame = held->lowest;
    held->lowest = merge_all(frame->held.child);
    return frame;
}

int held_before(held_frames *held, const frame_header *h)
{
    if (is_send(h))
        return held_first_of_tag(held, tags_tag(h->seq)) != NULL;
    return held->lowest != NULL && held->lowest->header.seq <= h->seq;
}

void held_destroy(held_frames *held)
{
    keyed_destroy(&held->by_tag);
}
