/* lanes.c - the simulated system: lanes, what travels on them, and their faults. See os.h. */
#include "inside.h"

enum { MOST_PACKET = 9000 };

/* ---- life ---- */

int os_lane(int a, int b, const os_wire *wire, int fds[2])
{
    lane *l = calloc(1, sizeof *l);
    for (int i = 0; i < 2; i++) {
        int rank = i == 0 ? a : b;
        file f = {.kind = FILE_SOCKET, .rank = rank, .lane = os.lane_count, .end = i};
        fds[i] = new_file(f);
        l->ends[i] = (end){rank, fds[i], 1, 1, OS_NEVER, OS_NEVER, 0};
        uint64_t size = (uint64_t)wire->send_buffer + wire->receive_buffer;
        l->out[i] = (stream){.wire = *wire, .ring = malloc(size), .size = size};
    }
    os.lanes[os.lane_count] = l;
    return os.lane_count++;
}

int os_lanes(void)
{
    return os.lane_count;
}

int os_lane_rank(int lane_number, int which)
{
    return os.lanes[lane_number]->ends[which].rank;
}

/* ---- streams ---- */

void settle(stream *s)
{
    while (s->arrivals < s->count && s->packets[s->arrivals].at <= os.now)
        s->arrived = s->packets[s->arrivals++].end;
    while (s->acks < s->arrivals && s->packets[s->acks].acked_at <= os.now)
        s->acked = s->packets[s->acks++].end;
    if (s->acks == s->count)
        s->count = s->arrivals = s->acks = 0;
}

uint64_t readable(stream *s)
{
    settle(s);
    return least(s->arrived, s->read + s->wire.receive_buffer) - s->read;
}

uint64_t unacked(stream *s)
{
    settle(s);
    return s->written - least(s->acked, s->read + s->wire.receive_buffer);
}

uint64_t space(stream *s)
{
    uint64_t used = unacked(s);
    return used < s->wire.send_buffer ? s->wire.send_buffer - used : 0;
}

static uint64_t after_dark(const stream *s, uint64_t at)
{
    if (s->dark_until == OS_NEVER)
        return OS_NEVER;
    return s->dark_until > os.now ? most(at, s->dark_until + s->wire.delay) : at;
}

static void add_packet(lane *l, int from, uint64_t bytes)
{
    stream *s = &l->out[from], *back = &l->out[!from];
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 16;
        s->packets = realloc(s->packets, s->room * sizeof *s->packets);
    }
    s->wire_free = most(s->wire_free, os.now) + (uint64_t)((double)bytes * s->wire.ns_per_byte);
    uint64_t at = s->wire_free + s->wire.delay + os_draw(s->wire.jitter + 1);
    s->last_at = most(s->last_at, after_dark(s, at));
    uint64_t acked = s->last_at == OS_NEVER ? OS_NEVER : s->last_at + back->wire.delay;
    s->last_ack = most(s->last_ack, after_dark(back, acked));
    s->written += bytes;
    s->packets[s->count++] = (packet){s->written, s->last_at, s->last_ack};
    os_look_at(l->ends[!from].rank, s->last_at);
    os_look_at(l->ends[from].rank, s->last_ack);
    if (!l->ends[!from].is_open && acked != OS_NEVER) { /* nobody is there: RST comes back */
        l->ends[from].rst_at = least(l->ends[from].rst_at, acked);
        os_look_at(l->ends[from].rank, acked);
    }
}

static void put(stream *s, const uint8_t *from, uint64_t bytes, uint64_t at)
{
    for (uint64_t i = 0; i < bytes;) {
        uint64_t place = (at + i) % s->size, part = least(bytes - i, s->size - place);
        memcpy(s->ring + place, from + i, part);
        i += part;
    }
}

static void get(const stream *s, uint8_t *to, uint64_t bytes)
{
    for (uint64_t i = 0; i < bytes;) {
        uint64_t place = (s->read + i) % s->size, part = least(bytes - i, s->size - place);
        memcpy(to + i, s->ring + place, part);
        i += part;
    }
}

void send_packets(lane *l, int from, const uint8_t *bytes, uint64_t count)
{
    stream *s = &l->out[from];
    put(s, bytes, count, s->written);
    if (s->flip_next && count > 0) {
        uint64_t at = s->written + os_draw(count);
        s->ring[at % s->size] ^= (uint8_t)(1 << os_draw(8));
        s->flip_next = 0;
        os_trace(l->ends[from].rank, "flips byte %llu", (unsigned long long)at);
    }
    for (uint64_t left = count; left > 0;) {
        uint64_t part = least(left, 1 + os_draw(MOST_PACKET));
        add_packet(l, from, part);
        left -= part;
    }
}

void take(lane *l, int to, uint8_t *bytes, uint64_t count)
{
    stream *in = &l->out[!to];
    int was_full = in->acked > in->read + in->wire.receive_buffer;
    get(in, bytes, count);
    in->read += count;
    if (was_full) /* the sender has room again */
        os_look_at(l->ends[!to].rank, os.now + in->wire.delay);
}

/* ---- faults ---- */

/* Forgets the packets that have not arrived by then. */
static void lose_after(stream *s, uint64_t at)
{
    settle(s);
    for (size_t i = s->arrivals; i < s->count; i++)
        if (s->packets[i].at > at)
            s->packets[i].at = s->packets[i].acked_at = OS_NEVER;
    s->last_at = s->last_ack = s->dark_until = OS_NEVER;
}

void os_cut_lane(int number, os_cut how, int ends)
{
    lane *l = os.lanes[number];
    for (int i = 0; i < 2; i++) {
        lose_after(&l->out[i], os.now);
        if (!(ends >> i & 1))
            continue;
        if (how == OS_RST)
            l->ends[i].rst_at = least(l->ends[i].rst_at, os.now);
        else
            l->ends[i].fin_at = least(l->ends[i].fin_at, os.now);
        os_look_at(l->ends[i].rank, os.now);
    }
}

void os_silence(int number, int from, uint64_t until)
{
    stream *s = &os.lanes[number]->out[from], *back = &os.lanes[number]->out[!from];
    settle(s);
    settle(back);
    s->dark_until = most(s->dark_until, until);
    for (size_t i = s->arrivals; i < s->count; i++) {
        packet *p = &s->packets[i];
        s->last_at = p->at = after_dark(s, p->at);
        uint64_t acked = p->at == OS_NEVER ? OS_NEVER : p->at + back->wire.delay;
        s->last_ack = p->acked_at = most(p->acked_at, acked);
        os_look_at(os.lanes[number]->ends[!from].rank, p->at);
        os_look_at(os.lanes[number]->ends[from].rank, p->acked_at);
    }
    for (size_t i = back->acks; i < back->count; i++) {
        packet *p = &back->packets[i];
        back->last_ack = p->acked_at = after_dark(s, p->acked_at);
        os_look_at(os.lanes[number]->ends[!from].rank, p->acked_at);
    }
}

void os_slow_down(int number, double factor)
{
    for (int i = 0; i < 2; i++)
        os.lanes[number]->out[i].wire.ns_per_byte *= factor;
}

void os_flip(int number, int from)
{
    os.lanes[number]->out[from].flip_next = 1;
}

/* Closes an end as the kernel does: with RST if something was not read, else with FIN. */
static void close_end(file *f)
{
    lane *l = os.lanes[f->lane];
    stream *s = &l->out[f->end], *in = &l->out[!f->end];
    end *mine = &l->ends[f->end], *other = &l->ends[!f->end];
    int unread = readable(in) > 0;
    mine->is_open = 0;
    f->kind = FILE_CLOSED;
    f->is_watched = 0;
    settle(s);
    uint64_t at = after_dark(s, os.now + s->wire.delay), back = after_dark(s, at);
    if (unread)
        lose_after(s, at);
    else
        other->fin_at = least(other->fin_at, most(at, s->last_at));
    if (unread || in->arrivals < in->count)
        other->rst_at = least(other->rst_at, unread ? at : most(back, in->last_ack));
    os_look_at(other->rank, other->fin_at);
    os_look_at(other->rank, other->rst_at);
}

void close_file(file *f)
{
    if (f->kind == FILE_SOCKET)
        close_end(f);
    f->kind = FILE_CLOSED;
    f->is_watched = 0;
}

void os_close_end(int number, int which)
{
    file *f = file_of(os.lanes[number]->ends[which].fd);
    if (f != NULL)
        close_file(f);
}

void os_close_fd(int fd)
{
    file *f = file_of(fd);
    if (f != NULL)
        close_file(f);
}

void os_kill(int rank)
{
    process *p = &os.processes[rank];
    if (p->is_dead)
        return;
    os_trace(rank, "is killed");
    p->is_dead = 1;
    for (int i = 0; i < p->count; i++)
        if (os.files[p->files[i]].kind != FILE_CLOSED)
            close_file(&os.files[p->files[i]]);
}

int os_is_dead(int rank)
{
    return os.processes[rank].is_dead;
}

void os_stop(int rank, uint64_t until)
{
    os.processes[rank].stopped_until = until;
    os_look_at(rank, until);
}
