/* comm_shared.c - drives the works that go through the memory of one host. See comm.h,
 * coll/shared.h.
 *
 * A rank that has nothing to do there polls, with the engine, or dozes in the engine's wait for
 * events; then whoever brings what it waits for rings with a heartbeat on their link. A futex could
 * not be waited for together with sockets, on which the news of a failure comes.
 */
#include "base/error.h"
#include "comm.h"

static void ring(rc_comm *c)
{
    for (int i = 0; i < c->shared.region.ranks && c->state == COMM_RUNNING; i++)
        if (i != c->shared.region.self && region_must_ring(&c->shared.region, i))
            comm_send_control(c, c->env.links[c->shared.rank_at[i]], FRAME_HEARTBEAT, c->called, 0,
                              0, -1);
}

int comm_pump_shared(engine_member *member)
{
    rc_comm *c = (rc_comm *)member;
    int more = 0;
    while (c->state == COMM_RUNNING && c->shared.head != NULL) {
        rc_work *w = c->shared.head;
        rc_error why;
        error_clear(&why);
        if (shared_pump(&c->shared, &more, &why) != RC_OK) {
            comm_fail(c, &why);
            break;
        }
        if (!work_complete(w))
            break;
        comm_finish_complete(c, w);
    }
    ring(c);
    c->member.polling = c->shared.head != NULL;
    return more && c->member.polling;
}

int comm_shared_stirred(const engine_member *member)
{
    return shared_stirred(&((const rc_comm *)member)->shared);
}

void comm_doze_shared(engine_member *member, int dozing)
{
    region_doze(&((rc_comm *)member)->shared.region, dozing);
}
