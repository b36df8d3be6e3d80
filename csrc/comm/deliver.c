/* deliver.c - a frame and its work: whether the two belong together, and the payload's way into it.
 * See inside.h. */
#include <stdio.h>
#include <string.h>

#include "../base/error.h"
#include "inside.h"

/* ---- whether they belong together ---- */

static rc_result fail_mismatch(rc_comm *c, const frame_header *h, int from, uint64_t ours)
{
    char here[FINGERPRINT_TEXT], there[FINGERPRINT_TEXT], what[40] = "collective";
    const char *advice = comm_is_p2p(h) ? "" : "; " FINGERPRINT_ADVICE;
    uint64_t number = comm_is_p2p(h) ? tags_number(h->seq) : h->seq;
    fingerprint_text(ours, here, sizeof here);
    fingerprint_text(h->fingerprint, there, sizeof there);
    if (comm_is_p2p(h) && tags_tag(h->seq) == 0)
        snprintf(what, sizeof what, "send/recv");
    else if (comm_is_p2p(h))
        snprintf(what, sizeof what, "send/recv of tag %u", tags_tag(h->seq));
    return comm_fail_text(c, RC_MISMATCH, from,
                          "ranks differ in %s #%llu: rank %d called %s, rank %d called %s%s", what,
                          (unsigned long long)number, c->env.rank, here, from, there, advice);
}

rc_result comm_check_history(rc_comm *c, const frame_header *h, int from)
{
    if (comm_is_p2p(h) || c->called - h->seq > COMM_HISTORY)
        return RC_OK;
    uint64_t ours = c->history[h->seq % COMM_HISTORY];
    return fingerprint_matches(ours, h->fingerprint) ? RC_OK : fail_mismatch(c, h, from, ours);
}

rc_result comm_check_work(rc_comm *c, const rc_work *w, const frame_header *h, int from)
{
    int is_same = fingerprint_matches(w->fingerprint, h->fingerprint);
    return is_same ? RC_OK : fail_mismatch(c, h, from, w->fingerprint);
}

/* ---- the payload ---- */

rc_result comm_begin_data(rc_comm *c, rc_work *w, const frame_header *h, int from, rx_place *place)
{
    RC_TRY(comm_check_work(c, w, h, from));
    rc_error why;
    why.code = RC_OK; /* the rest is set with an error */
    if (work_begin(w, h, from, place, &why) != RC_OK)
        return comm_fail_text(c, why.code, from, "rank %d: %s", from, why.message);
    return RC_OK;
}

rc_result comm_end_data(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                        rx_place *place)
{
    ln->consumed += link_cost(h);
    if (link_owes_credit(ln))
        comm_send_control(c, ln, FRAME_HEARTBEAT, c->called, 0, 0, -1);
    rc_result result = work_end(w, h, place);
    if (result == RC_PROTOCOL)
        return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                              "rank %d: the payload of segment %u of chunk %u is none of its codec",
                              ln->peer, h->segment, h->chunk);
    if (result != RC_OK)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a frame");
    return RC_OK;
}

rc_result comm_deliver(rc_comm *c, rc_work *w, peer_link *ln, const frame_header *h,
                       const uint8_t *payload)
{
    if (h->type == FRAME_CALL)
        return comm_check_work(c, w, h, ln->peer);
    rx_place place = {0};
    RC_TRY(comm_begin_data(c, w, h, ln->peer, &place));
    if (h->length > 0)
        memcpy(place.data, payload, h->length);
    ln->early_bytes -= link_cost(h);
    return comm_end_data(c, w, ln, h, &place);
}
