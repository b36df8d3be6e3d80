/* sender.c - see sender.h. */
#include "sender.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <time.h>
#include <unistd.h>

#include "../base/thread.h"

enum {
    /* Shortest payload that is worth the two hand-overs. */
    LEAST_BYTES = 32 << 10,
    /* Bytes sent at a time: what is sealed is then still in cache, and other lanes get their turn.
     */
    BYTES_PER_SEND = 256 << 10,
    EVENTS_PER_WAIT = 32,
    /* Longest sleep; bounds the shutdown if nothing can wake the sender any more, and the wait
     * after a write refused for want of memory. */
    LONGEST_SLEEP_MS = 250,
    /* Sleep between rounds where the epoll set is lost. */
    REFUSED_US = 10000
};

static void *run(void *arg);

/* ---- life ---- */

static void destroy_sender(sender *s)
{
    pollset_close(&s->set);
    pthread_cond_destroy(&s->rested);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

sender *sender_get(rc_engine *e)
{
    if (e->sender != NULL)
        return e->sender;
    sender *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->engine = e;
    s->least = LEAST_BYTES;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->rested, NULL);
    if (!pollset_open(&s->set) || !thread_start(&s->thread, run, s)) {
        destroy_sender(s);
        return NULL;
    }
    e->sender = s;
    return s;
}

void sender_stop(sender *s)
{
    if (s == NULL)
        return;
    pthread_mutex_lock(&s->lock);
    s->stopping = 1;
    pthread_mutex_unlock(&s->lock);
    pollset_ring(&s->set);
    pthread_join(s->thread, NULL);
    destroy_sender(s);
}

void sender_after_fork(sender *s)
{
    if (s != NULL)
        pollset_close(&s->set);
}

double sender_cpu_seconds(sender *s)
{
    clockid_t clock;
    struct timespec used;
    if (s == NULL || pthread_getcpuclockid(s->thread, &clock) != 0 ||
        clock_gettime(clock, &used) != 0)
        return 0.0;
    return (double)used.tv_sec + (double)used.tv_nsec * 1e-9;
}

/* ---- the list of outboxes handed over; under the lock ---- */

static void put_last(sender *s, outbox *box)
{
    box->next = NULL;
    box->prev = s->last;
    if (s->last != NULL)
        s->last->next = box;
    else
        s->first = box;
    s->last = box;
}

static void unlink_outbox(sender *s, outbox *box)
{
    if (box->prev != NULL)
        box->prev->next = box->next;
    else
        s->first = box->next;
    if (box->next != NULL)
        box->next->prev = box->prev;
    else
        s->last = box->prev;
}

static void set_outbox_state(outbox *box, outbox_state state)
{
    box->state = state;
    atomic_store(&box->full, state == OUTBOX_FULL);
}

/* Returns the ready outbox that has waited longest. */
static outbox *find_ready(const sender *s, int *some_full)
{
    outbox *found = NULL;
    *some_full = 0;
    for (outbox *box = s->first; box != NULL; box = box->next) {
        *some_full |= box->state == OUTBOX_FULL;
        if (found == NULL && box->state == OUTBOX_READY && !box->wanted)
            found = box;
    }
    return found;
}

/* ---- the driver's side ---- */

int sender_wants(const sender *s, const out_frame *frame)
{
    if (s->least == 0)
        return 1;
    return s->engine->large_works > 0 && frame->header.type == FRAME_DATA &&
           frame->header.length >= s->least;
}

/* Adds a socket to the sender's epoll set, edge-triggered and only once: room in a full socket is
 * reported to no thread but the sender, and costs nothing in between. */
static int add_to_epoll(const sender *s, outbox *box)
{
    struct epoll_event event = {.events = (uint32_t)EPOLLOUT | (uint32_t)EPOLLET,
                                .data.u64 = (uint64_t)box->fd};
    return box->known || epoll_ctl(s->set.epoll_fd, EPOLL_CTL_ADD, box->fd, &event) == 0;
}

int sender_hand_over(sender *s, outbox *box, int fd)
{
    pthread_mutex_lock(&s->lock);
    box->fd = fd;
    box->broken = 0; /* another socket may have been */
    box->known = add_to_epoll(s, box);
    if (box->known) {
        set_outbox_state(box, OUTBOX_EMPTY);
        put_last(s, box);
    }
    pthread_mutex_unlock(&s->lock);
    return box->known;
}

void sender_push(sender *s, outbox *box, out_frame *frame)
{
    pthread_mutex_lock(&s->lock);
    queue_push(&box->list, frame);
    if (box->state == OUTBOX_EMPTY && !box->broken)
        set_outbox_state(box, OUTBOX_READY);
    int rouse = s->asleep && box->state == OUTBOX_READY;
    if (rouse)
        s->asleep = 0;
    pthread_mutex_unlock(&s->lock);
    if (rouse)
        pollset_ring(&s->set);
}

void sender_take_back(sender *s, outbox *box)
{
    pthread_mutex_lock(&s->lock);
    box->wanted = 1;
    while (box->state == OUTBOX_SENDING)
        pthread_cond_wait(&s->rested, &s->lock);
    box->wanted = box->news = 0;
    outbox_reclaim(box);
    unlink_outbox(s, box);
    set_outbox_state(box, OUTBOX_DRIVERS);
    pthread_mutex_unlock(&s->lock);
}

void sender_forget(sender *s, outbox *box)
{
    if (box->known)
        epoll_ctl(s->set.epoll_fd, EPOLL_CTL_DEL, box->fd, NULL);
    box->known = 0;
}

int sender_has_news(const sender *s)
{
    return s != NULL && atomic_load(&s->news);
}

static outbox *next_with_news(sender *s, int *returned)
{
    pthread_mutex_lock(&s->lock);
    outbox *box = s->first;
    while (box != NULL && !box->news)
        box = box->next;
    *returned = box != NULL && box->state == OUTBOX_EMPTY;
    if (box != NULL) {
        box->news = 0;
        outbox_reclaim(box);
    }
    if (*returned) {
        unlink_outbox(s, box);
        set_outbox_state(box, OUTBOX_DRIVERS);
    }
    pthread_mutex_unlock(&s->lock);
    return box;
}

void sender_settle(sender *s)
{
    int returned;
    outbox *box;
    if (s == NULL || !atomic_exchange(&s->news, 0))
        return;
    while ((box = next_with_news(s, &returned)) != NULL)
        box->settle(box, returned);
}

/* ---- the sender's side ---- */

/* Sends by one system call. Under the lock, which is released meanwhile. */
static void send_some(sender *s, outbox *box)
{
    outbox_batch batch;
    outbox_gather(box, &batch, BYTES_PER_SEND);
    set_outbox_state(box, OUTBOX_SENDING);
    unlink_outbox(s, box);
    put_last(s, box);
    pthread_mutex_unlock(&s->lock);
    for (int i = 0; i < batch.count; i++)
        frame_seal(batch.frames[i]);
    ssize_t sent = outbox_send(box, box->fd, &batch);
    pthread_mutex_lock(&s->lock);
    if (sent > 0)
        outbox_advance(box, (size_t)sent);
    box->broken = sent < 0;
    if (box->broken || box->list.head == NULL)
        set_outbox_state(box, OUTBOX_EMPTY);
    else
        set_outbox_state(box, (size_t)sent < batch.bytes ? OUTBOX_FULL : OUTBOX_READY);
    box->news |= box->broken || box->gone.head != NULL;
    if (box->wanted)
        pthread_cond_broadcast(&s->rested);
    if (!box->news)
        return;
    pthread_mutex_unlock(&s->lock);
    if (!atomic_exchange(&s->news, 1) && s->engine->sleeping)
        pollset_ring(&s->engine->set);
    pthread_mutex_lock(&s->lock);
}

/* Marks the full outbox of a descriptor as ready. The number may be the bell's, stale or reused; a
 * needless try is harmless. */
static void has_room(const sender *s, uint64_t number)
{
    outbox *box = s->first;
    while (box != NULL && (uint64_t)box->fd != number)
        box = box->next;
    if (box != NULL && box->state == OUTBOX_FULL)
        set_outbox_state(box, OUTBOX_READY);
}

/* Marks every full outbox as ready, after a sleep without an event: a write that the kernel has
 * refused for want of memory is followed by none. */
static void try_all_again(const sender *s)
{
    for (outbox *box = s->first; box != NULL; box = box->next)
        if (box->state == OUTBOX_FULL)
            set_outbox_state(box, OUTBOX_READY);
}

/* Looks for sockets that have room again; with block waits until one has or the sender is woken.
 * Under the lock, which is released meanwhile. */
static void poll_for_room(sender *s, int block)
{
    struct epoll_event events[EVENTS_PER_WAIT];
    s->asleep = block;
    pthread_mutex_unlock(&s->lock);
    int count = epoll_wait(s->set.epoll_fd, events, EVENTS_PER_WAIT, block ? LONGEST_SLEEP_MS : 0);
    if (count < 0 && errno != EINTR)
        usleep(REFUSED_US);
    pthread_mutex_lock(&s->lock);
    s->asleep = 0;
    for (int i = 0; i < count; i++)
        has_room(s, events[i].data.u64);
    if (block && count == 0)
        try_all_again(s);
}

static void *run(void *arg)
{
    sender *s = arg;
    pthread_mutex_lock(&s->lock);
    while (!s->stopping) {
        int some_full;
        outbox *box = find_ready(s, &some_full);
        if (box != NULL)
            send_some(s, box);
        if (box == NULL || some_full)
            poll_for_room(s, box == NULL);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
