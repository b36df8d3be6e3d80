/* link.c - see link.h. */
#include "link.h"

#include "../base/clock.h"

enum {
    /* Bytes that one lane may hold unsent when it is the only one: enough for one system call to
     * carry several small frames, few enough to keep memory hot. */
    SINGLE_LANE_BACKLOG = 1 << 20,
    /* Longest delay of acknowledgements: they wait behind what the peer sends. */
    ACKS_LATE_MS = 6,
    PROBED_SLOWER = 4, /* a lane that is slower is probed */
    RISKY_SLOWER = 16,
    /* Frames on other lanes before an idle lane of the same speed is given one. */
    LEAST_PASSED = 50,
    LEAST_TRIED = 16 << 10,
    NEARLY_IDLE_MS = 2
};

/* Factor by which a lane that is tried again is assumed to have become faster. */
static const double REPROBE_GAIN = 1.5;

/* ---- credit ---- */

static int peer_has_called(const peer_link *ln, const frame_header *h)
{
    if (!(h->flags & FRAME_P2P))
        return h->seq < ln->called;
    const tag_count *posted = tags_find(&ln->receives_posted, tags_tag(h->seq));
    return posted != NULL && tags_before(tags_number(h->seq), posted->receives);
}

static int has_credit_for(const peer_link *ln, const frame_header *h)
{
    return peer_has_called(ln, h) || (ln->sent - ln->peer_consumed) + link_cost(h) <= ln->credit;
}

/* Notes that all of a tag before this number is past. Numbers begin anew, and what was told of one
 * long ago would look like news. */
static void pass(uint32_t *told, uint32_t number)
{
    if (tags_before(*told, number))
        *told = number;
}

static void let_go(peer_link *ln, out_frame *frame)
{
    const frame_header *h = &frame->header;
    tag_count *posted =
        h->flags & FRAME_P2P ? tags_find(&ln->receives_posted, tags_tag(h->seq)) : NULL;
    if (posted != NULL)
        pass(&posted->receives, tags_number(h->seq));
    ln->sent += link_cost(&frame->header);
    ln->queued += link_cost(&frame->header);
    queue_push(&ln->queue, frame);
}

/* Learns that the peer has called receives; lets sends of this tag leave, wherever they stand. */
static void learn_receives(peer_link *ln, uint64_t name)
{
    tag_count *posted = tags_get_told(&ln->receives_posted, tags_tag(name));
    if (posted == NULL || tags_before(tags_number(name), posted->receives))
        return; /* without memory this tag's sends depend on the credit */
    posted->receives = tags_number(name) + 1;
    const out_frame *first;
    while ((first = held_first_of_tag(&ln->held, tags_tag(name))) != NULL &&
           peer_has_called(ln, &first->header))
        let_go(ln, held_pop_of_tag(&ln->held, tags_tag(name)));
}

/* Learns that the peer holds back a send, and so those of its tag before it that have not left. */
static void learn_sends(peer_link *ln, uint64_t name)
{
    tag_count *held = tags_get_told(&ln->sends_held, tags_tag(name));
    if (held != NULL && !tags_before(tags_number(name), held->sends))
        held->sends = tags_number(name) + 1;
}

void link_note_receive(peer_link *ln, uint64_t name)
{
    tag_count *held = tags_find(&ln->sends_held, tags_tag(name));
    if (held != NULL)
        pass(&held->sends, tags_number(name));
}

int link_awaits_send(const peer_link *ln, uint64_t name)
{
    const tag_count *held = tags_find(&ln->sends_held, tags_tag(name));
    return held != NULL && tags_before(tags_number(name), held->sends);
}

void link_learn(peer_link *ln, const frame_header *h)
{
    if (h->type == FRAME_PROBE) /* it may come so late that its count has wrapped */
        return;
    int32_t more = (int32_t)(h->consumed - (uint32_t)ln->peer_consumed);
    if (more > 0 && (uint32_t)more <= ln->sent - ln->peer_consumed) /* lanes overtake each other */
        ln->peer_consumed += (uint32_t)more;
    if (h->type == FRAME_CALL && (h->flags & FRAME_P2P)) {
        (h->flags & FRAME_ASKS ? learn_sends : learn_receives)(ln, h->seq);
    } else if (h->type <= FRAME_CALL && !(h->flags & FRAME_P2P)) {
        if (h->seq >= ln->called)
            ln->called = h->seq + 1;
    } else if (h->type == FRAME_HEARTBEAT) {
        ln->called = h->seq > ln->called ? h->seq : ln->called;
        ln->submitted = h->fingerprint > ln->submitted ? h->fingerprint : ln->submitted;
    }
    for (int send = 0; send < 2; send++)
        while (held_first(&ln->held, send) != NULL &&
               has_credit_for(ln, &held_first(&ln->held, send)->header))
            let_go(ln, held_pop(&ln->held, send));
}

int link_owes_credit(const peer_link *ln)
{
    return ln->consumed - ln->consumed_reported >= ln->credit / 4;
}

/* ---- striping ---- */

static int is_freer(const lane *l, const lane *other)
{
    int is_probed = lane_is_probed(l);
    return is_probed != lane_is_probed(other) ? !is_probed : l->out_bytes < other->out_bytes;
}

static lane *least_loaded(peer_link *ln)
{
    lane *best = NULL;
    for (int i = 0; i < ln->lane_count; i++) {
        lane *candidate = ln->lanes[i];
        if (lane_takes(candidate) && (best == NULL || is_freer(candidate, best)))
            best = candidate;
    }
    return best;
}

/* Returns 1 if the lane may be given a data frame. One that sends no more takes frames and drops
 * them, as a peer that has left needs none; but where frames are kept it may be lost, not left. */
static int may_get(const lane *l)
{
    return l->source.fd >= 0 && !(l->keeps && l->tx_closed);
}

/* Rates on which the choice of a lane rests; an unknown one counts as the fastest. */
typedef struct rates {
    double fastest; /* bytes per ns; 1 if none is known */
    int all_known;
} rates;

static rates rates_of(const peer_link *ln)
{
    rates r = {0.0, 1};
    for (int i = 0; i < ln->lane_count; i++) {
        const lane *l = ln->lanes[i];
        if (may_get(l) && l->rate == 0.0)
            r.all_known = 0;
        if (may_get(l) && l->rate > r.fastest)
            r.fastest = l->rate;
    }
    if (r.fastest == 0.0)
        r.fastest = 1.0;
    return r;
}

/* Returns 1 for a lane, of those whose frames are kept, that is known to be slower than the fastest
 * by more than so much. Others cannot be probed. */
static int is_slower(const lane *l, const rates *r, int by)
{
    return l->keeps && l->rate > 0.0 && r->fastest > by * l->rate;
}

static double rate_of(const lane *l, const rates *r)
{
    return l->rate > 0.0 ? l->rate : r->fastest;
}

/* Returns the time (ns) that so many bytes take on a lane, twice that on a very slow one: its rate
 * is known but roughly, and a frame that comes after all others costs more than it can gain. */
static double time_for(const lane *l, uint64_t bytes, const rates *r)
{
    return (is_slower(l, r, RISKY_SLOWER) ? 2.0 : 1.0) * (double)bytes / rate_of(l, r);
}

/* Returns how long (ns) the lane is still busy with what it was given: by free_at, within two
 * bounds. It has no more left than is unacknowledged, and no less except for late acknowledgements.
 */
static double busy_for(lane *l, double now, const rates *r)
{
    double most = (double)lane_unacked(l) / rate_of(l, r), left = l->free_at - now;
    double least = r->all_known ? most - ACKS_LATE_MS * (double)CLOCK_MS : most;
    left = left < least ? least : left;
    left = left < 0.0 ? 0.0 : left;
    left = left > most ? most : left;
    l->free_at = now + left;
    return left;
}

/* Returns 1 if a slow lane should be tried again: other lanes have sent so much since its last
 * frame that one frame here can delay them by a fiftieth at most. Its rate may have changed, and
 * shows only in use, and only by a large frame; small ones would raise the assumed rate without a
 * measurement that corrects it. A lane half as fast as the fastest is used anyway once a few frames
 * are queued. */
static int should_reprobe(const lane *l, uint64_t bytes, const rates *r)
{
    double slower = r->fastest / rate_of(l, r);
    return bytes >= LEAST_TRIED && slower > 2.0 && !is_slower(l, r, PROBED_SLOWER) &&
           (double)l->bytes_to_siblings >= LEAST_PASSED * slower * (double)bytes &&
           lane_unacked(l) == 0;
}

/* Returns the lane that would finish this many bytes first. */
static lane *earliest_finish(peer_link *ln, uint64_t bytes, const rates *r)
{
    lane *best = NULL;
    double best_time = 0.0, now = (double)clock_ns();
    for (int i = 0; i < ln->lane_count; i++) {
        lane *candidate = ln->lanes[i];
        if (!may_get(candidate))
            continue;
        if (should_reprobe(candidate, bytes, r)) {
            candidate->rate *= REPROBE_GAIN;
            return candidate;
        }
        double finish = busy_for(candidate, now, r) + time_for(candidate, bytes, r);
        if (best == NULL || finish < best_time) {
            best = candidate;
            best_time = finish;
        }
    }
    return best;
}

/* Returns a lane with room that would finish a frame before the others have finished all that is
 * queued: if the frame were left to the fastest, which has no room, a much slower lane would never
 * get any. */
static lane *slower_lane_that_helps(peer_link *ln, uint64_t bytes, const rates *r)
{
    double now = (double)clock_ns(), all_rates = 0.0, all_bytes = (double)ln->queued;
    for (int i = 0; i < ln->lane_count; i++)
        if (may_get(ln->lanes[i])) {
            all_rates += rate_of(ln->lanes[i], r);
            all_bytes += busy_for(ln->lanes[i], now, r) * rate_of(ln->lanes[i], r);
        }
    for (int i = 0; i < ln->lane_count; i++) {
        lane *l = ln->lanes[i];
        double rate = rate_of(l, r), busy = l->free_at - now;
        if (!may_get(l) || !lane_has_room(l) || busy > NEARLY_IDLE_MS * (double)CLOCK_MS)
            continue;
        if (busy + time_for(l, bytes, r) < (all_bytes - busy * rate) / (all_rates - rate))
            return l;
    }
    return NULL;
}

/* A probe is so much that a meter has something to measure behind what a shaper may have saved up,
 * and, the faster the lane seems, the more, so that two or three are enough. */
uint64_t link_probe(peer_link *ln, lane *l)
{
    enum { EVERY_MS = 800, LONG_MS = 500, LEAST = 384 << 10, MOST = 2 << 20 };
    uint64_t now = clock_ns();
    rates r = rates_of(ln);
    int is_due = is_slower(l, &r, PROBED_SLOWER) && l->bytes_to_siblings >= LEAST &&
                 now >= l->probed_at + EVERY_MS * CLOCK_MS;
    if (!is_due || l->state != LANE_OPEN || !lane_takes(l) || l->owned_by_sender ||
        lane_unacked(l) > 0)
        return 0;
    double wanted = l->rate * LONG_MS * (double)CLOCK_MS;
    uint64_t bytes = wanted < LEAST ? LEAST : wanted > MOST ? MOST : (uint64_t)wanted;
    l->probed_at = now;
    l->bytes_to_siblings = 0;
    l->free_at = (double)now + (double)bytes / l->rate;
    return bytes;
}

/* Returns the lane for the next frame; NULL if the frame is to wait. */
static lane *choose(peer_link *ln, uint64_t bytes)
{
    if (ln->lane_count == 1) {
        lane *only = ln->lanes[0];
        return may_get(only) && only->out_bytes < SINGLE_LANE_BACKLOG ? only : NULL;
    }
    rates r = rates_of(ln);
    lane *best = earliest_finish(ln, bytes, &r);
    if (best != NULL && !lane_has_room(best))
        best = r.all_known ? slower_lane_that_helps(ln, bytes, &r) : NULL;
    if (best == NULL)
        return NULL;
    for (int i = 0; i < ln->lane_count; i++)
        ln->lanes[i]->bytes_to_siblings += bytes;
    best->bytes_to_siblings = 0;
    best->probe_end = 0; /* data is not to wait behind it */
    best->free_at += (double)bytes / rate_of(best, &r);
    return best;
}

void link_queue(peer_link *ln, out_frame *frame)
{
    if (held_before(&ln->held, &frame->header) || !has_credit_for(ln, &frame->header))
        held_push(&ln->held, frame);
    else
        let_go(ln, frame);
}

void link_send_again(peer_link *ln, frame_queue *frames)
{
    if (frames->head == NULL)
        return;
    for (const out_frame *frame = frames->head; frame != NULL; frame = frame->next)
        ln->queued += link_cost(&frame->header);
    frames->tail->next = ln->queue.head;
    if (ln->queue.tail == NULL)
        ln->queue.tail = frames->tail;
    ln->queue.head = frames->head;
    *frames = (frame_queue){0};
}

int link_is_left(const peer_link *ln)
{
    int open = 0, keeps = 0;
    for (int i = 0; i < ln->lane_count; i++) {
        open += ln->lanes[i]->state == LANE_OPEN;
        keeps |= ln->lanes[i]->keeps;
    }
    return ln->goodbyes > 0 && (open == 0 || (keeps && !ln->owes));
}

int link_has_lost(const peer_link *ln)
{
    int lost = 0;
    for (int i = 0; i < ln->lane_count; i++)
        lost += ln->lanes[i]->state == LANE_LOST;
    return lost > 0;
}

void link_send(peer_link *ln, out_frame *frame)
{
    link_queue(ln, frame);
    link_pump(ln);
}

void link_pump(peer_link *ln)
{
    while (ln->queue.head != NULL) {
        lane *chosen = choose(ln, link_cost(&ln->queue.head->header));
        if (chosen == NULL)
            return;
        out_frame *frame = queue_pop(&ln->queue);
        ln->queued -= link_cost(&frame->header);
        if (!ln->prepare(ln, frame))
            return;
        lane_push(chosen, frame);
    }
}

int link_control(peer_link *ln, out_frame *frame, int lane_index)
{
    lane *chosen = lane_index >= 0 ? ln->lanes[lane_index] : least_loaded(ln);
    int usable = chosen != NULL && lane_takes(chosen);
    if (!usable || !ln->prepare(ln, frame)) {
        if (chosen == NULL)
            chosen = ln->lanes[0];
        chosen->handler->sent(chosen, frame);
        return 0;
    }
    lane_push(chosen, frame);
    return 1;
}
