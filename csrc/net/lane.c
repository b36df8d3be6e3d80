/* lane.c - see lane.h. */
#include "lane.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../base/clock.h"
#include "../base/error.h"
#include "sender.h"

enum {
    READ_BUDGET = 1 << 20, /* bytes read before other lanes get their turn */
    /* Bytes that may be in the outbox of one of several lanes while the sender has it, so that it
     * need not wait for the driver after each frame: at most so many, and what the lane sends in 1
     * ms.
     */
    MOST_AHEAD = 512 << 10,
    /* Missing bytes of a payload from which on a system call pays that has the driver wake only
     * when all have come; not where FAST_BYTES come in FAST_NS (3.5 Gbit/s): there a driver hardly
     * sleeps.
     */
    LEAST_ASLEEP = 16 << 10,
    FAST_BYTES = 64 << 10,
    FAST_NS = 150 * 1000
};

static void fail_lane(lane *ln, rc_result code, int number, const char *what)
{
    if (number != 0)
        error_set(&ln->error, code, "%s (errno %d, %s)", what, number, strerror(number));
    else
        error_set(&ln->error, code, "%s", what);
    ln->error.sys_errno = number;
    ln->handler->dead(ln);
}

/* ---- sending ---- */

/* Releases the kept frames that have come. A handler may close the lane. */
static void release_kept(lane *ln)
{
    while (ln->acked_frames < ln->come_frames && ln->kept.head != NULL) {
        ln->acked_frames++;
        ln->handler->sent(ln, queue_pop(&ln->kept));
    }
}

/* Gives back the frames that are in the socket as a whole. A handler may push others, which are
 * given back in its midst: so a frame that is kept takes its place first. */
static void give_frames_back(lane *ln)
{
    out_frame *frame;
    while ((frame = queue_pop(&ln->out.back)) != NULL) {
        ln->out_bytes -= frame_bytes(frame);
        ln->sent_frames++;
        if (ln->keeps) {
            queue_push(&ln->kept, frame);
            ln->handler->left(ln, frame);
        } else {
            ln->handler->sent(ln, frame);
        }
    }
    release_kept(ln);
}

void lane_forget_kept(lane *ln)
{
    out_frame *frame;
    ln->keeps = 0;
    while ((frame = queue_pop(&ln->kept)) != NULL)
        ln->handler->sent(ln, frame);
}

static void watch_socket(lane *ln, int writable)
{
    engine_watch(ln->engine, &ln->source, (uint32_t)EPOLLIN | (writable ? (uint32_t)EPOLLOUT : 0U));
}

/* Takes the outbox back for good. */
static void leave_sender(lane *ln)
{
    if (ln->owned_by_sender)
        sender_take_back(ln->sender, &ln->out);
    if (ln->sender != NULL)
        sender_forget(ln->sender, &ln->out);
    ln->owned_by_sender = 0;
    ln->sender = NULL;
}

/* Empties the outbox, except for the frame `rest` (or NULL). */
static void drop_unsent(lane *ln, out_frame *rest)
{
    frame_queue dropped = ln->out.list;
    out_frame *frame;
    ln->out.list = (frame_queue){rest, rest};
    if (rest == NULL)
        ln->out.sent = 0;
    ln->out_bytes = rest != NULL ? frame_bytes(rest) : 0;
    ln->pushed = ln->out.sent_bytes + ln->out_bytes - ln->out.sent;
    while ((frame = queue_pop(&dropped)) != NULL)
        ln->handler->sent(ln, frame);
}

/* Ends sending: the peer takes nothing more. It may have left in order, with its goodbye still to
 * be read, so the reading side judges. If the socket itself is gone nothing can be read, and the
 * lane fails. */
static void close_tx(lane *ln)
{
    if (!engine_is_own(&ln->source)) {
        fail_lane(ln, RC_PEER_LOST, EBADF, "the connection broke");
        return;
    }
    ln->tx_closed = 1;
    leave_sender(ln);
    give_frames_back(ln);
    watch_socket(ln, 0);
    if (!ln->keeps)
        drop_unsent(ln, NULL);
}

/* Sends until the list is empty, the socket full, or a frame given back has led to a hand-over. */
static void flush(lane *ln)
{
    while (ln->out.list.head != NULL && lane_takes(ln) && !ln->owned_by_sender) {
        outbox_batch batch;
        outbox_gather(&ln->out, &batch, SIZE_MAX);
        ssize_t sent = outbox_send(&ln->out, ln->source.fd, &batch);
        if (sent < 0) {
            close_tx(ln);
            return;
        }
        outbox_advance(&ln->out, (size_t)sent);
        outbox_reclaim(&ln->out);
        if (sent < (ssize_t)batch.bytes)
            watch_socket(ln, 1);
        give_frames_back(ln);
        if (sent < (ssize_t)batch.bytes)
            return;
    }
    if (!ln->owned_by_sender && ln->source.fd >= 0)
        watch_socket(ln, 0);
}

/* Takes over what the sender has done with the outbox. */
static void settle_outbox(outbox *box, int returned)
{
    lane *ln = (lane *)((char *)box - offsetof(lane, out));
    if (returned)
        ln->owned_by_sender = 0;
    if (returned && box->broken)
        close_tx(ln);
    else
        give_frames_back(ln);
    if (ln->source.fd >= 0 && ln->state != LANE_DETACHED)
        ln->handler->room(ln);
}

/* Hands the outbox over to the sender if this frame is worth it. Returns 1 if the sender has it. */
static int hand_outbox_over(lane *ln, const out_frame *frame)
{
    if (ln->owned_by_sender || ln->sender == NULL || !sender_wants(ln->sender, frame))
        return ln->owned_by_sender;
    watch_socket(ln, 0);
    ln->out.settle = settle_outbox;
    ln->owned_by_sender = sender_hand_over(ln->sender, &ln->out, ln->source.fd);
    if (!ln->owned_by_sender)
        watch_socket(ln, ln->out.list.head != NULL);
    return ln->owned_by_sender;
}

void lane_push(lane *ln, out_frame *frame)
{
    if (ln->tx_closed || ln->source.fd < 0) {
        ln->handler->sent(ln, frame);
        return;
    }
    ln->out_bytes += frame_bytes(frame);
    ln->pushed += frame_bytes(frame);
    if (hand_outbox_over(ln, frame)) {
        sender_push(ln->sender, &ln->out, frame);
        return;
    }
    int idle = ln->out.list.head == NULL;
    frame_seal(frame);
    queue_push(&ln->out.list, frame);
    if (idle)
        flush(ln);
}

int lane_is_probed(const lane *ln)
{
    enum { LONGEST_MS = 2000 };
    return ln->health.acked < ln->probe_end && clock_ns() < ln->probed_at + LONGEST_MS * CLOCK_MS;
}

int lane_has_room(const lane *ln)
{
    if (!ln->owned_by_sender)
        return ln->out.list.head == NULL;
    double ahead = ln->rate * (double)CLOCK_MS;
    return ln->out_bytes == 0 || (!atomic_load(&ln->out.full) && ln->out_bytes < MOST_AHEAD &&
                                  (double)ln->out_bytes < ahead);
}

/* Returns the bytes that the kernel has and the peer's kernel has not acknowledged. */
static uint64_t in_socket(const lane *ln)
{
    int queued = 0;
    if (ln->source.fd < 0 || ioctl(ln->source.fd, SIOCOUTQ, &queued) != 0 || queued < 0)
        return 0;
    return (uint64_t)queued;
}

/* Reads the two counts in this order so that bytes sent meanwhile count twice rather than not at
 * all. */
uint64_t lane_unacked(const lane *ln)
{
    uint64_t unsent = ln->pushed - atomic_load(&ln->out.sent_bytes);
    return in_socket(ln) + unsent;
}

static struct tcp_info ask_tcp(const lane *ln)
{
    struct tcp_info info;
    socklen_t size = sizeof info;
    memset(&info, 0, sizeof info); /* an old kernel fills less */
    if (ln->source.fd < 0 || getsockopt(ln->source.fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0)
        memset(&info, 0, sizeof info);
    return info;
}

uint64_t lane_acked(const lane *ln, int *in_flight)
{
    uint64_t sent = atomic_load(&ln->out.sent_bytes), queued = in_socket(ln);
    *in_flight = queued > 0 && ask_tcp(ln).tcpi_unacked > 0;
    return sent > queued ? sent - queued : 0;
}

void lane_ask_tcp(const lane *ln, uint64_t *retransmits, double *rtt)
{
    struct tcp_info info = ask_tcp(ln);
    *retransmits = info.tcpi_total_retrans;
    *rtt = info.tcpi_rtt * 1e-6;
}

/* Limits the unsent bytes that the kernel takes: enough for a driver that is not scheduled at once,
 * few enough to correct a wrong choice of lane. */
static void set_backlog(lane *ln)
{
    enum { LEAST = 64 << 10, MOST = 4 << 20, AHEAD_MS = 5 };
    double wanted = ln->rate * AHEAD_MS * (double)CLOCK_MS;
    int bytes = wanted < LEAST ? LEAST : wanted > MOST ? MOST : (int)wanted;
    if (bytes < ln->backlog + ln->backlog / 4 && bytes > ln->backlog - ln->backlog / 4)
        return;
    ln->backlog = bytes;
    /* Not every kind of stream socket has it; striping is then coarser, not wrong. */
    (void)setsockopt(ln->source.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &bytes, sizeof bytes);
}

void lane_stripe(lane *ln)
{
    ln->striped = 1;
    meter_init(&ln->arrivals, ln->rate);
    set_backlog(ln);
}

void lane_set_rate(lane *ln, double rate)
{
    ln->rate = rate;
    if (ln->striped)
        set_backlog(ln);
}

/* ---- receiving ---- */

static int begin_frame(lane *ln)
{
    const uint8_t *bytes = ln->rbuf + ln->rbuf_start;
    ln->rbuf_start += FRAME_HEADER_BYTES;
    rc_error why;
    error_clear(&why);
    if (frame_decode(bytes, ln->epoch, ln->max_length, &ln->rx, &ln->rx_crc, &why) != RC_OK) {
        fail_lane(ln, why.code, 0, why.message);
        return 0;
    }
    ln->rx_have = 0;
    ln->rx_place = (rx_place){.data = ln->rx_text};
    ln->in_payload = 1;
    if (!frame_is_long(&ln->rx))
        return 1;
    return ln->handler->begin(ln, &ln->rx, &ln->rx_place) == RC_OK && ln->source.fd >= 0;
}

static int end_frame(lane *ln)
{
    if (!frame_check(ln->rx_place.data, ln->rx.length, ln->rx_crc)) {
        fail_lane(ln, RC_PROTOCOL, 0,
                  "the payload of a frame arrived damaged (its CRC32C does not match)");
        return 0;
    }
    ln->in_payload = 0;
    ln->received_frames++;
    ln->untold_bytes += FRAME_HEADER_BYTES + ln->rx.length;
    return ln->handler->end(ln, &ln->rx, &ln->rx_place) == RC_OK && ln->source.fd >= 0;
}

/* Handles what the buffer holds. Returns 0 if the lane died. */
static int parse(lane *ln)
{
    for (;;) {
        size_t held = ln->rbuf_end - ln->rbuf_start;
        if (!ln->in_payload) {
            if (held < FRAME_HEADER_BYTES)
                return 1;
            if (!begin_frame(ln))
                return 0;
            held = ln->rbuf_end - ln->rbuf_start;
        }
        size_t missing = ln->rx.length - ln->rx_have, part = held < missing ? held : missing;
        if (part > 0) {
            memcpy(ln->rx_place.data + ln->rx_have, ln->rbuf + ln->rbuf_start, part);
            ln->rbuf_start += part;
            ln->rx_have += (uint32_t)part;
        }
        if (ln->rx_have < ln->rx.length)
            return 1;
        if (!end_frame(ln))
            return 0;
    }
}

static void set_low_water(lane *ln, int bytes)
{
    if (bytes == ln->low_water)
        return;
    ln->low_water = bytes;
    /* Other kinds of stream sockets may wake sooner. */
    (void)setsockopt(ln->source.fd, SOL_SOCKET, SO_RCVLOWAT, &bytes, sizeof bytes);
}

/* Has a sleeping driver wake for the whole rest of a payload, not for each few packets, which costs
 * it as much as to copy them. */
static void sleep_well(lane *ln)
{
    uint32_t missing = ln->in_payload && !ln->is_fast ? ln->rx.length - ln->rx_have : 0;
    set_low_water(ln, missing >= LEAST_ASLEEP ? (int)missing : 1);
}

void lane_stir(lane *ln)
{
    if (ln->source.fd >= 0)
        set_low_water(ln, 1);
}

/* Reads by one system call: the rest of the payload, then into the buffer. By recv, which fails on
 * another file that may have the number by now. */
static ssize_t read_socket(lane *ln, size_t *wanted)
{
    memmove(ln->rbuf, ln->rbuf + ln->rbuf_start, ln->rbuf_end - ln->rbuf_start);
    ln->rbuf_end -= ln->rbuf_start;
    ln->rbuf_start = 0;
    size_t missing = ln->in_payload ? ln->rx.length - ln->rx_have : 0;
    struct iovec iov[2] = {{NULL, missing},
                           {ln->rbuf + ln->rbuf_end, LANE_RBUF_BYTES - ln->rbuf_end}};
    if (missing > 0)
        iov[0].iov_base = ln->rx_place.data + ln->rx_have;
    *wanted = missing + iov[1].iov_len;
    ssize_t got = missing > 0
                      ? recvmsg(ln->source.fd, &(struct msghdr){.msg_iov = iov, .msg_iovlen = 2}, 0)
                      : recv(ln->source.fd, iov[1].iov_base, iov[1].iov_len, 0);
    if (got > 0) {
        size_t direct = (size_t)got < missing ? (size_t)got : missing;
        ln->rx_have += (uint32_t)direct;
        ln->rbuf_end += (size_t)got - direct;
        ln->received_bytes += (uint64_t)got;
    }
    return got;
}

/* Reads what has come, as far as the budget goes. Returns 0 if the lane died. */
static int read_within_budget(lane *ln)
{
    size_t budget = READ_BUDGET;
    for (;;) {
        size_t wanted;
        int between_frames = !ln->in_payload && ln->rbuf_start == ln->rbuf_end;
        ssize_t got = read_socket(ln, &wanted);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 1;
        if (got < 0) {
            fail_lane(ln, RC_PEER_LOST, errno, "the connection broke");
            return 0;
        }
        if (got == 0) {
            fail_lane(ln, RC_PEER_LOST, 0, "the connection was closed without a goodbye");
            return 0;
        }
        ln->last_rx = clock_ns();
        if (ln->striped)
            meter_arrived(&ln->arrivals, ln->last_rx, (size_t)got, between_frames);
        if (!parse(ln))
            return 0;
        if ((size_t)got < wanted || (size_t)got >= budget)
            return 1;
        budget -= (size_t)got;
    }
}

static void receive(lane *ln)
{
    uint64_t bytes = ln->received_bytes, since = ln->last_rx;
    if (!read_within_budget(ln))
        return;
    bytes = ln->received_bytes - bytes;
    if (bytes > 0)
        ln->is_fast = bytes * FAST_NS > (ln->last_rx - since) * FAST_BYTES;
    sleep_well(ln);
}

/* Reads and throws away. A peer whose data nobody reads could not send its abort either, nor close
 * before its timeout is over. */
static void discard(lane *ln)
{
    size_t budget = READ_BUDGET;
    while (budget > LANE_RBUF_BYTES) {
        ssize_t got = recv(ln->source.fd, ln->rbuf, LANE_RBUF_BYTES, 0);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (got <= 0) {
            lane_close(ln);
            return;
        }
        budget -= (size_t)got;
    }
}

static void socket_ready(engine_source *source, uint32_t events)
{
    lane *ln = (lane *)source;
    if ((events & EPOLLOUT) && !ln->owned_by_sender) {
        flush(ln);
        if (ln->source.fd >= 0 && !ln->owned_by_sender && ln->out.list.head == NULL &&
            ln->state != LANE_DETACHED)
            ln->handler->room(ln);
    }
    if (ln->source.fd < 0)
        return;
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return;
    if (ln->state == LANE_DETACHED)
        discard(ln);
    else
        receive(ln);
}

static int poll_socket(engine_source *source)
{
    lane *ln = (lane *)source;
    uint64_t before = ln->received_bytes;
    if (ln->state == LANE_DETACHED)
        return 0;
    receive(ln);
    return ln->received_bytes != before || ln->source.fd < 0;
}

/* ---- life ---- */

rc_result lane_open(lane *ln, int fd, uint32_t max_length, uint32_t epoch)
{
    ln->source = (engine_source){.fd = fd, .ready = socket_ready, .look = poll_socket};
    ln->max_length = max_length;
    ln->epoch = epoch;
    ln->last_rx = clock_ns();
    ln->out.last_tx = ln->last_rx;
    ln->low_water = 1;
    error_clear(&ln->error);
    int flags = fcntl(fd, F_GETFL);
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 ||
        engine_add(ln->engine, &ln->source, EPOLLIN, &ln->error) != RC_OK) {
        close(fd);
        ln->source.fd = -1;
        lane_move(ln, LANE_CLOSED);
        return error_set(&ln->error, RC_SYSTEM, "lane_open: not a usable socket (errno %d)", errno);
    }
    lane_move(ln, LANE_OPEN);
    return RC_OK;
}

/* Makes a control frame of the unsent bytes of a half-sent frame. */
static out_frame *copy_rest(const lane *ln, const out_frame *frame)
{
    out_frame *copy = malloc(sizeof *copy + frame->header.length);
    if (copy == NULL)
        return NULL;
    *copy = *frame;
    copy->next = NULL;
    copy->buffer = NULL;
    copy->copy = NULL;
    copy->is_recycled = 0;
    copy->owner = NULL;
    copy->encode_src = NULL;
    copy->payload = copy->text;
    size_t done = ln->out.sent > FRAME_HEADER_BYTES ? ln->out.sent - FRAME_HEADER_BYTES : 0;
    if (frame->header.length > done)
        memcpy(copy->text + done, frame->payload + done, frame->header.length - done);
    return copy;
}

void lane_detach(lane *ln)
{
    if (!engine_is_own(&ln->source)) {
        lane_close(ln);
        return;
    }
    leave_sender(ln);
    lane_forget_kept(ln);
    give_frames_back(ln);
    const out_frame *head = ln->out.list.head;
    int half_sent = head != NULL && ln->out.sent > 0;
    out_frame *rest = half_sent ? copy_rest(ln, head) : NULL;
    drop_unsent(ln, rest);
    lane_stir(ln);
    lane_move(ln, LANE_DETACHED);
    watch_socket(ln, rest != NULL);
    if (half_sent && rest == NULL)
        lane_close(ln); /* no memory: a stream cut within a frame can only be closed */
}

void lane_lose(lane *ln)
{
    leave_sender(ln);
    engine_remove(ln->engine, &ln->source); /* first: no more frames are pushed */
    lane_move(ln, LANE_LOST);
    ln->lost_at = clock_ns();
    give_frames_back(ln);
}

int lane_acknowledge(lane *ln, uint32_t received)
{
    uint32_t count = received - (uint32_t)(ln->acked_frames - ln->sent_before);
    if (!ln->keeps)
        return 1;
    if (count > ln->sent_frames - ln->acked_frames && !ln->owned_by_sender)
        return 0; /* what the sender has put into the socket is not counted yet */
    ln->come_frames = ln->acked_frames + count;
    release_kept(ln);
    return 1;
}

int lane_settle(lane *ln, uint32_t received, frame_queue *rest)
{
    out_frame *frame;
    if (!lane_acknowledge(ln, received))
        return 0;
    *rest = ln->kept;
    ln->kept = (frame_queue){0};
    while ((frame = queue_pop(&ln->out.list)) != NULL)
        queue_push(rest, frame);
    ln->out.sent = 0;
    ln->out_bytes = 0;
    return 1;
}

void lane_reset(lane *ln, uint32_t made)
{
    ln->made = made;
    ln->sent_before = ln->acked_frames = ln->come_frames = ln->sent_frames;
    ln->received_before = ln->told_frames = ln->received_frames;
    ln->untold_bytes = 0;
    ln->pushed = ln->out.sent_bytes;
    ln->beat_end = ln->probe_end = 0;
    ln->free_at = 0.0;
    ln->rbuf_start = ln->rbuf_end = 0;
    ln->in_payload = ln->tx_closed = ln->is_fast = 0;
    ln->is_settled = ln->is_told = 0;
    error_clear(&ln->error);
    uint64_t sent = ln->out.sent_bytes, now = clock_ns(); /* what was given up counts as acked */
    ln->health = (lane_health){.port = ln->health.port, .marks = {sent, sent}, .times = {now, now}};
    ln->backlog = 0;
}

/* Returns 1 unless it would not matter if none of these frames came. */
static int has_what_matters(const frame_queue *queue)
{
    const out_frame *frame = queue->head;
    while (frame != NULL &&
           (frame->header.type == FRAME_HEARTBEAT || frame->header.type == FRAME_PROBE))
        frame = frame->next;
    return frame != NULL;
}

int lane_is_owed(const lane *ln)
{
    if (ln->owned_by_sender && ln->out_bytes > 0)
        return 1;
    return has_what_matters(&ln->kept) || (!ln->owned_by_sender && has_what_matters(&ln->out.list));
}

void lane_close(lane *ln)
{
    leave_sender(ln);
    lane_forget_kept(ln);
    give_frames_back(ln);
    drop_unsent(ln, NULL);
    engine_remove(ln->engine, &ln->source);
    if (ln->state != LANE_CLOSED)
        lane_move(ln, LANE_CLOSED);
}
