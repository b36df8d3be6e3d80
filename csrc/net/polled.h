/* polled.h - the members in whose memory the driver looks while it waits. Part of engine.c.
 *
 * Invariants. The list is made under the lock and used without it: members stay until the driver is
 * back (engine_quiesce). Those for which there is no room doze all along, and are not roused again:
 * one bell too many is all that comes of it.
 */
#ifndef RINGCOMM_POLLED_H
#define RINGCOMM_POLLED_H

#include "engine.h"

enum { MOST_POLLED = 16 };

typedef struct polled_members {
    engine_member *member[MOST_POLLED];
    int count;
    int others_stirred; /* one for which there was no room can go on */
    int briefly;        /* what is waited for, there or at sockets, is worth polling for where ranks
                           outnumber cores */
} polled_members;

static inline polled_members polled_list(const rc_engine *e)
{
    polled_members polled = {.briefly = e->active > 0 && e->lengthy == 0};
    for (engine_member *member = e->members; member != NULL; member = member->next) {
        if (member->expects && polled.count < MOST_POLLED) {
            polled.member[polled.count++] = member;
            polled.briefly |= member->briefly;
        } else if (member->expects) {
            member->doze(member, 1);
            polled.others_stirred |= member->stirred(member);
        }
    }
    return polled;
}

/* 1 if one of them can go on. */
static inline int polled_stirred(const polled_members *polled)
{
    for (int i = 0; i < polled->count; i++)
        if (polled->member[i]->stirred(polled->member[i]))
            return 1;
    return 0;
}

static inline void polled_doze(const polled_members *polled, int dozing)
{
    for (int i = 0; i < polled->count; i++)
        polled->member[i]->doze(polled->member[i], dozing);
}

#endif
