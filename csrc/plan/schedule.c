/* schedule.c - what the files of schedules share. See schedule.h. */
#include "schedule.h"

uint32_t schedule_pair_count(const plan *p)
{
    return schedule_world(p) * schedule_world(p);
}

void schedule_pair_ends(const plan *p, uint32_t chunk, int *from, int *to)
{
    *from = (int)(chunk / schedule_world(p) % schedule_world(p));
    *to = (int)(chunk % schedule_world(p));
}

uint32_t schedule_pairs_from(const plan *p, uint32_t *first)
{
    *first = (uint32_t)p->rank * schedule_world(p);
    return schedule_world(p);
}

static uint64_t pair_frames(const plan *p, int from, int to)
{
    return plan_segments(p, (uint32_t)(from * p->world_size + to));
}

uint64_t schedule_pair_frames(const plan *p, int peer, int sends)
{
    return schedule_frames(p, peer, sends, pair_frames);
}

uint64_t schedule_frames(const plan *p, int peer, int sends,
                         uint64_t (*between)(const plan *p, int from, int to))
{
    uint64_t frames = 0;
    int first = peer < 0 ? 0 : peer, end = peer < 0 ? p->world_size : peer + 1;
    for (int other = first; other < end; other++)
        if (other != p->rank)
            frames += sends ? between(p, p->rank, other) : between(p, other, p->rank);
    return frames;
}

/* Counts the hops of a path that leave the rank `behind` places after its first. */
static uint64_t passes(uint32_t hops, uint32_t n, uint32_t behind)
{
    return behind < hops ? (hops - behind + n - 1) / n : 0;
}

uint64_t schedule_frames_around(const plan *p, int peer, int sends)
{
    int n = p->world_size, before = (p->rank + n - 1) % n;
    int sender = sends ? p->rank : before, neighbour = sends ? (p->rank + 1) % n : before;
    uint64_t frames = 0;
    if (n == 1 || (peer >= 0 && peer != neighbour))
        return 0;
    for (uint32_t chunk = 0; chunk < p->chunks; chunk++) {
        int behind = (sender + n - p->schedule->rank_at(p, chunk, 0)) % n;
        frames +=
            plan_segments(p, chunk) * passes(p->schedule->hops(p), (uint32_t)n, (uint32_t)behind);
    }
    return frames;
}
