/* unexpected.c - frames that come before their collective or receive has been called here. See
 * inside.h.
 *
 * Data frames, as far as the peer's credit goes, and announced calls are copied and kept, for each
 * peer and kind (collectives, sends), in queues found by seq. So neither keeping nor finding one
 * depends on how many are kept.
 */
#include <stdlib.h>
#include <string.h>

#include "../base/error.h"
#include "inside.h"

typedef struct early_frame {
    keyed_entry of_seq; /* must be first */
    frame_header header;
    uint8_t payload[];
} early_frame;

rc_result comm_unexpected_begin(rc_comm *c, peer_link *ln, const frame_header *h, rx_place *place)
{
    if (ln->early_bytes + link_cost(h) > ln->credit)
        return comm_fail_text(c, RC_PROTOCOL, ln->peer,
                              "rank %d sent more ahead than its credit allows", ln->peer);
    if ((place->buffer = pool_take(c->env.buffers)) == NULL)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for a segment of %u bytes",
                              c->env.segment_bytes);
    place->data = place->buffer->data;
    int was_far_ahead = comm_is_far_ahead(ln);
    ln->early_bytes += link_cost(h);
    if (!was_far_ahead && comm_is_far_ahead(ln))
        comm_announce_all(c, ln);
    return RC_OK;
}

/* Keeps a copy of the frame's own size: segments may be small, and many. */
rc_result comm_unexpected_keep(rc_comm *c, peer_link *ln, const frame_header *h,
                               const uint8_t *payload)
{
    int is_call = h->type == FRAME_CALL;
    const rc_work *waiting = comm_active_find(c, h, ln->peer); /* to go on links (memory.c) */
    if (waiting != NULL)
        RC_TRY(comm_check_work(c, waiting, h, ln->peer));
    if (is_call && c->early_calls >= COMM_MAX_EARLY_CALLS)
        return RC_OK; /* a kept announcement only helps to find mismatches sooner */
    early_frame *early = malloc(sizeof *early + h->length);
    if (early == NULL)
        return comm_fail_text(c, RC_NO_MEMORY, c->env.rank, "no memory for an early frame");
    early->header = *h;
    if (h->length > 0)
        memcpy(early->payload, payload, h->length);
    c->early_calls += is_call;
    keyed_push(&ln->early[(h->flags & FRAME_P2P) != 0], &early->of_seq, h->seq);
    return RC_OK;
}

int comm_unexpected_has_send(peer_link *ln, uint64_t name)
{
    return keyed_first(&ln->early[1], name) != NULL;
}

static rc_result replay_link(rc_comm *c, rc_work *w, peer_link *ln)
{
    int is_send = (w->flags & FRAME_P2P) != 0;
    int mine = !is_send || (w->call.collective == RC_RECV && w->call.root == ln->peer);
    early_frame *early;
    rc_result result = RC_OK;
    while (result == RC_OK && mine &&
           (early = (early_frame *)keyed_pop(&ln->early[is_send], w->seq)) != NULL) {
        c->early_calls -= early->header.type == FRAME_CALL;
        result = comm_deliver(c, w, ln, &early->header, early->payload);
        free(early);
    }
    return result;
}

rc_result comm_unexpected_replay(rc_comm *c, rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        if (c->env.links[rank] != NULL)
            RC_TRY(replay_link(c, w, c->env.links[rank]));
    return RC_OK;
}

rc_result comm_unexpected_check(rc_comm *c, const rc_work *w)
{
    for (int rank = 0; rank < c->env.world_size; rank++) {
        keyed_entry *entry = keyed_first(&c->link_storage[rank].early[0], w->seq);
        for (; entry != NULL; entry = entry->next)
            RC_TRY(comm_check_work(c, w, &((early_frame *)entry)->header, rank));
    }
    return RC_OK;
}

void comm_unexpected_drop(rc_comm *c)
{
    for (int rank = 0; rank < c->env.world_size; rank++)
        for (int kind = 0; kind < 2; kind++) {
            keyed_entry *entry;
            while ((entry = keyed_pop_any(&c->link_storage[rank].early[kind])) != NULL)
                free(entry);
        }
    c->early_calls = 0;
}
