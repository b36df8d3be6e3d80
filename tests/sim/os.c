/* os.c - the simulated system: time, chance, the trace, files and turns. See os.h. */
#include <stdarg.h>
#include <sys/epoll.h>

#include "inside.h"

enum {
    LEAST_RUN_NS = 2000,
    MOST_RUN_NS = 40000
}; /* between two turns of a rank that has more to do */

os_state os;

/* ---- time, chance, trace ---- */

uint64_t os_now(void)
{
    return os.now;
}

uint64_t os_draw(uint64_t bound)
{
    os.random ^= os.random << 13;
    os.random ^= os.random >> 7;
    os.random ^= os.random << 17;
    return ((os.random * 2685821657736338717u) >> 16) % bound;
}

void os_trace(int rank, const char *format, ...)
{
    va_list args;
    if (os.trace == NULL)
        return;
    fprintf(os.trace, "%llu ", (unsigned long long)os.now);
    fprintf(os.trace, rank >= 0 ? "%d " : "- ", rank);
    va_start(args, format);
    vfprintf(os.trace, format, args);
    va_end(args);
    fputc('\n', os.trace);
}

/* ---- wishes: a heap, the earliest first, equal ones in an order that is drawn ---- */

static int is_before(const wish *a, const wish *b)
{
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void swap_wishes(size_t a, size_t b)
{
    wish kept = os.wishes[a];
    os.wishes[a] = os.wishes[b];
    os.wishes[b] = kept;
}

void os_look_at(int rank, uint64_t at)
{
    if (at == OS_NEVER)
        return;
    if (os.wish_count == os.wish_room) {
        os.wish_room = os.wish_room ? 2 * os.wish_room : 256;
        os.wishes = realloc(os.wishes, os.wish_room * sizeof *os.wishes);
    }
    size_t i = os.wish_count++;
    os.wishes[i] = (wish){at, os_draw(1U << 20) << 40 | ++os.orders, rank};
    for (; i > 0 && is_before(&os.wishes[i], &os.wishes[(i - 1) / 2]); i = (i - 1) / 2)
        swap_wishes(i, (i - 1) / 2);
}

int os_next(void)
{
    if (os.wish_count == 0)
        return -1;
    wish first = os.wishes[0];
    os.wishes[0] = os.wishes[--os.wish_count];
    for (size_t i = 0, child; (child = 2 * i + 1) < os.wish_count; i = child) {
        if (child + 1 < os.wish_count && is_before(&os.wishes[child + 1], &os.wishes[child]))
            child++;
        if (is_before(&os.wishes[i], &os.wishes[child]))
            break;
        swap_wishes(i, child);
    }
    if (first.at > os.now)
        os.now = first.at;
    return first.rank;
}

/* ---- life ---- */

void os_open(uint64_t seed, FILE *trace)
{
    memset(&os, 0, sizeof os);
    os.now = 1000000000;
    os.random = (seed + 1) * 0x9e3779b97f4a7c15u;
    os.random = os.random ? os.random : 1;
    os.trace = trace;
}

int os_close(void)
{
    int left = 0;
    for (int i = 0; i < os.file_count; i++)
        left += os.files[i].kind != FILE_CLOSED;
    for (int i = 0; i < os.lane_count; i++) {
        for (int from = 0; from < 2; from++) {
            free(os.lanes[i]->out[from].ring);
            free(os.lanes[i]->out[from].packets);
        }
        free(os.lanes[i]);
    }
    free(os.wishes);
    return left;
}

void os_set_mood(os_mood mood)
{
    os.mood = mood;
}

void os_set_pace(os_pace pace)
{
    os.pace = pace;
}

void os_kill_at(int rank, uint64_t event)
{
    os.to_kill = rank;
    os.kill_at = event;
}

uint64_t os_events(void)
{
    return os.events;
}

void count_event(void)
{
    if (++os.events == os.kill_at)
        os_kill(os.to_kill);
}

int new_file(file f)
{
    process *p = &os.processes[f.rank];
    if (os.file_count == MOST_FILES)
        abort();
    p->files[p->count++] = os.file_count;
    os.files[os.file_count] = f;
    return FIRST_FD + os.file_count++;
}

file *file_of(int fd)
{
    file *f = fd >= FIRST_FD && fd < FIRST_FD + os.file_count ? &os.files[fd - FIRST_FD] : NULL;
    return f != NULL && f->kind != FILE_CLOSED ? f : NULL;
}

/* ---- turns ---- */

void os_enter(int rank)
{
    os.rank = rank;
}

uint32_t events_of(const file *f)
{
    if (f->kind == FILE_BELL)
        return f->rung ? (uint32_t)EPOLLIN : 0U;
    lane *l = os.lanes[f->lane];
    const end *e = &l->ends[f->end];
    uint64_t there = readable(&l->out[!f->end]), room = space(&l->out[f->end]);
    int is_reset = e->rst_at <= os.now, ends = e->fin_at <= os.now || is_reset;
    uint32_t events = 0;
    if (ends ||
        (there > 0 && there >= least((uint64_t)e->low_water, l->out[!f->end].wire.receive_buffer)))
        events |= EPOLLIN;
    if (is_reset || room > l->out[f->end].wire.send_buffer / 3)
        events |= EPOLLOUT;
    return (events & f->wanted) | (is_reset ? (uint32_t)EPOLLHUP | (uint32_t)EPOLLERR : 0U);
}

int os_is_due(int rank, uint64_t wanted_at)
{
    process *p = &os.processes[rank];
    if (p->is_dead)
        return 0;
    if (p->stopped_until > os.now) {
        os_look_at(rank, p->stopped_until);
        return 0;
    }
    if (p->wakes_at <= os.now || wanted_at <= os.now)
        return 1;
    for (int i = 0; i < p->count; i++) {
        const file *f = &os.files[p->files[i]];
        if (f->is_watched && events_of(f) != 0)
            return 1;
    }
    return 0;
}

void os_begin_turn(int rank, int rounds)
{
    os.rank = rank;
    os.processes[rank].rounds = rounds;
    os.processes[rank].wakes_at = OS_NEVER;
}

void os_end_turn(int rank)
{
    process *p = &os.processes[rank];
    uint64_t soon = os.now + LEAST_RUN_NS + os_draw(MOST_RUN_NS);
    os_look_at(rank, soon);
    if (p->wakes_at > soon)
        os_look_at(rank, p->wakes_at);
}
