/* test_sender.c - lanes whose frames are sent by the second thread: order, changes of hands, and
 * every way of taking the memory back from it while it works.
 */
#include "../../csrc/net/sender.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#include "lane_stream.h"

enum { LARGE = 1000 }; /* payloads from here on are handed over, where a test says so */

/* A lane with a sender for frames of at least so many bytes; 0: for all. While a long work is in
 * flight, as far as the engine knows. */
static fixture *open_with_sender(int send_buffer, uint32_t least)
{
    fixture *f = open_fixture(send_buffer);
    f->ln.sender = sender_get(f->engine);
    CHECK(f->ln.sender != NULL);
    f->ln.sender->least = least;
    f->engine->large_works = 1;
    return f;
}

/* Without driving: the sender needs nobody. */
static void wait_for_bytes(const fixture *f, uint64_t bytes)
{
    uint64_t deadline = clock_ns() + LONG_MS * CLOCK_MS;
    while (f->ln.out.sent_bytes < bytes && clock_ns() < deadline)
        usleep(50);
    CHECK(f->ln.out.sent_bytes >= bytes);
}

static void wait_for_sleep(const fixture *f)
{
    sender *s = f->ln.sender;
    uint64_t deadline = clock_ns() + LONG_MS * CLOCK_MS;
    int asleep = 0;
    for (; !asleep && clock_ns() < deadline; usleep(50)) {
        pthread_mutex_lock(&s->lock);
        asleep = s->asleep;
        pthread_mutex_unlock(&s->lock);
    }
    CHECK(asleep);
}

static uint8_t *random_bytes(uint64_t *seed, size_t count)
{
    uint8_t *bytes = malloc(count);
    for (size_t i = 0; i < count; i++)
        bytes[i] = (uint8_t)draw(seed);
    return bytes;
}

/* ---- order ---- */

/* Small frames go by the driver, large ones and what is behind them by the sender; now and then all
 * is sent, and the lane changes hands. */
static void frames_in_order(int send_buffer, uint32_t least)
{
    enum { FRAMES = 300 };
    uint64_t seed = 5u + least, total = 0;
    uint8_t *payload = random_bytes(&seed, MAX_LENGTH);
    fixture *f = open_with_sender(send_buffer, least);
    reader r;
    start_reading(&r, f, (size_t)FRAMES * (FRAME_HEADER_BYTES + MAX_LENGTH), 0);
    int handed = 0;
    for (int i = 0; i < FRAMES; i++) {
        uint32_t length = (uint32_t)draw_below(&seed, draw_below(&seed, 3) ? LARGE : MAX_LENGTH);
        push(f, i, payload, length);
        total += FRAME_HEADER_BYTES + length;
        handed += f->ln.owned_by_sender;
        CHECK(!(f->ln.owned_by_sender && least > 0 && f->ln.out_bytes == 0));
        if (draw_below(&seed, 20) == 0)
            expect_sent(f, i + 1);
    }
    expect_sent(f, FRAMES);
    CHECK(handed > 0);
    CHECK(least == 0 || handed < FRAMES);
    CHECK(f->rooms > 0);
    CHECK_EQ(f->ln.owned_by_sender, 0);
    CHECK_EQ(f->ln.out.sent_bytes, total);
    CHECK_EQ(f->ln.sent_frames, FRAMES);
    CHECK_EQ(f->ln.out_bytes, 0);
    CHECK_EQ(finish_reading(&r, f), FRAMES);
    free(payload);
    close_fixture(f);
}

static void order_is_kept(void)
{
    frames_in_order(1, 0);
    frames_in_order(1, LARGE);
    frames_in_order(0, 0);
    frames_in_order(0, LARGE);
}

static void only_long_works_are_worth_it(void)
{
    static uint8_t payload[MAX_LENGTH];
    fixture *f = open_with_sender(0, LARGE);
    f->engine->large_works = 0;
    push(f, 0, payload, LARGE);
    CHECK_EQ(f->ln.owned_by_sender, 0);
    f->engine->large_works = 1;
    push(f, 1, payload, LARGE - 1);
    CHECK_EQ(f->ln.owned_by_sender, 0);
    CHECK_EQ(f->sent, 2);
    push(f, 2, payload, LARGE);
    CHECK_EQ(f->ln.owned_by_sender, 1);
    expect_sent(f, 3);
    CHECK_EQ(f->ln.owned_by_sender, 0);
    close_fixture(f);
}

/* The sender goes on while nobody drives, and its news are there for the next who does. */
static void sends_while_nobody_drives(void)
{
    enum { FRAMES = 20 };
    static uint8_t payload[MAX_LENGTH];
    fixture *f = open_with_sender(1, 0);
    reader r;
    start_reading(&r, f, (size_t)FRAMES * (FRAME_HEADER_BYTES + MAX_LENGTH), 0);
    for (int i = 0; i < FRAMES; i++)
        push(f, i, payload, MAX_LENGTH);
    CHECK(lane_unacked(&f->ln) > 0);
    wait_for_bytes(f, (uint64_t)FRAMES * (FRAME_HEADER_BYTES + MAX_LENGTH));
    CHECK_EQ(f->sent, 0);
    expect_sent(f, FRAMES);
    CHECK_EQ(finish_reading(&r, f), FRAMES);
    close_fixture(f);
}

static atomic_int refusals; /* writes that the kernel is to refuse for want of memory */

/* In place of libc's, for all tests that are linked with these. */
ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    if (atomic_load(&refusals) > 0) {
        atomic_fetch_sub(&refusals, 1);
        errno = ENOBUFS;
        return -1;
    }
    return syscall(SYS_sendmsg, fd, message, flags);
}

/* By the driver and by the sender, which hears of no room in a socket that has always had some. */
static void a_refused_write_is_tried_again(void)
{
    static uint8_t payload[MAX_LENGTH];
    for (int by_sender = 0; by_sender < 2; by_sender++) {
        fixture *f = by_sender ? open_with_sender(0, 0) : open_fixture(0);
        reader r;
        start_reading(&r, f, FRAME_HEADER_BYTES + MAX_LENGTH, 0);
        if (by_sender)
            wait_for_sleep(f); /* what epoll says of a new socket must not come behind the write */
        atomic_store(&refusals, 1);
        push(f, 0, payload, MAX_LENGTH);
        CHECK_EQ(f->ln.owned_by_sender, by_sender);
        expect_sent(f, 1);
        CHECK_EQ(atomic_load(&refusals), 0);
        CHECK_EQ(finish_reading(&r, f), 1);
        close_fixture(f);
    }
}

/* Another lane of the same engine. */
static fixture *open_sibling(const fixture *first)
{
    int pair[2];
    fixture *f = calloc(1, sizeof *f);
    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    f->far = pair[1];
    f->ln.engine = f->engine = first->engine;
    f->ln.handler = first->ln.handler;
    f->ln.sender = first->ln.sender;
    CHECK_EQ(lane_open(&f->ln, pair[0], MAX_LENGTH, EPOCH), RC_OK);
    return f;
}

/* Of three lanes one has nobody to read from it, for a while: the others go on. */
static void one_sender_for_several_lanes(void)
{
    enum { LANES = 3, FRAMES = 40, BYTES = FRAMES * (FRAME_HEADER_BYTES + MAX_LENGTH) };
    static uint8_t payload[MAX_LENGTH];
    fixture *f[LANES] = {open_with_sender(1, 0)};
    reader r[LANES];
    for (int i = 1; i < LANES; i++)
        f[i] = open_sibling(f[0]);
    for (int i = 1; i < LANES; i++)
        start_reading(&r[i], f[i], BYTES, 0);
    for (int n = 0; n < FRAMES; n++)
        for (int i = 0; i < LANES; i++)
            push(f[i], n, payload, MAX_LENGTH);
    for (int i = 1; i < LANES; i++)
        wait_for_bytes(f[i], BYTES);
    CHECK(f[0]->ln.out.sent_bytes < BYTES / 2);
    start_reading(&r[0], f[0], BYTES, 0);
    for (int i = 0; i < LANES; i++) {
        expect_sent(f[i], FRAMES);
        CHECK_EQ(finish_reading(&r[i], f[i]), FRAMES);
    }
    engine_quiesce(f[0]->engine);
    for (int i = 1; i < LANES; i++) {
        close(f[i]->far);
        free(f[i]);
    }
    close_fixture(f[0]);
}

/* Reads so many bytes, however long the sender takes, within reason. */
static int read_some(reader *r, size_t count)
{
    struct timeval most = {.tv_sec = LONG_MS / 1000};
    setsockopt(r->fd, SOL_SOCKET, SO_RCVTIMEO, &most, sizeof most);
    for (size_t wanted = r->n + count; r->n < wanted;) {
        ssize_t got = recv(r->fd, r->bytes + r->n, wanted - r->n, 0);
        if (!CHECK(got > 0))
            return 0;
        r->n += (size_t)got;
    }
    return 1;
}

/* Who reads gets what was pushed for it, in whatever order others read, and however little: no lane
 * waits for another, neither one beside a slow one nor the slow one itself. */
static void each_lane_moves_by_itself(void)
{
    enum { LANES = 4, FRAMES = 30, BYTES = FRAMES * (FRAME_HEADER_BYTES + MAX_LENGTH) };
    static uint8_t payload[MAX_LENGTH];
    for (int slow = 0; slow < LANES; slow++) {
        uint64_t seed = 77u + (uint64_t)slow;
        fixture *f[LANES] = {open_with_sender(1, 0)};
        reader r[LANES];
        for (int i = 0; i < LANES; i++) {
            f[i] = i > 0 ? open_sibling(f[0]) : f[0];
            r[i] = (reader){.fd = f[i]->far, .most = BYTES, .bytes = malloc(BYTES)};
        }
        for (int i = 0; i < LANES; i++) /* all of one lane's before any of the next */
            for (int n = 0; n < FRAMES; n++)
                push(f[i], n, payload, MAX_LENGTH);
        for (int busy = LANES - 1, ok = 1; busy > 0 && ok;) {
            int i = (int)draw_below(&seed, LANES);
            size_t left = BYTES - r[i].n, some = draw_below(&seed, i == slow ? 2000 : 200000);
            some = some < left ? some : left;
            ok = read_some(&r[i], some);
            busy -= i != slow && some > 0 && some == left;
        }
        CHECK(r[slow].n < BYTES / 4);
        for (int i = 0; i < LANES; i++) {
            read_some(&r[i], BYTES - r[i].n);
            CHECK_EQ(check_stream(r[i].bytes, r[i].n), FRAMES);
            expect_sent(f[i], FRAMES);
            free(r[i].bytes);
        }
        for (int i = 1; i < LANES; i++)
            lane_close(&f[i]->ln);
        engine_quiesce(f[0]->engine);
        for (int i = 1; i < LANES; i++) {
            close(f[i]->far);
            free(f[i]);
        }
        close_fixture(f[0]);
    }
}

/* One of several lanes, with the sender, takes what it sends in the next millisecond. */
static void room_for_what_leaves_soon(void)
{
    static uint8_t payload[MAX_LENGTH];
    fixture *f = open_with_sender(0, 0);
    CHECK(lane_has_room(&f->ln));
    push(f, 0, payload, MAX_LENGTH);
    CHECK_EQ(f->ln.owned_by_sender, 1);
    CHECK(!lane_has_room(&f->ln)); /* its rate is not known */
    f->ln.rate = MAX_LENGTH * 0.9 / (double)CLOCK_MS;
    CHECK(!lane_has_room(&f->ln));
    f->ln.rate = MAX_LENGTH * 1.1 / (double)CLOCK_MS;
    CHECK(lane_has_room(&f->ln));
    f->ln.rate = 1e3;
    for (int i = 1; i < 20; i++)
        push(f, i, payload, MAX_LENGTH);
    CHECK(!lane_has_room(&f->ln)); /* half a megabyte is enough for any */
    uint64_t deadline = clock_ns() + LONG_MS * CLOCK_MS;
    while (!f->ln.out.full && clock_ns() < deadline)
        drive(f, never, 1);
    CHECK(f->ln.out.full);
    CHECK(!lane_has_room(&f->ln));
    close_fixture(f);
}

/* ---- taking it back ---- */

/* At any moment of its work, with memory that is gone right after. */
static void detach_at_any_moment(void)
{
    enum { TRIALS = 150, FRAMES = 6, LENGTH = 60000 };
    uint64_t seed = 31u;
    for (int trial = 0; trial < TRIALS; trial++) {
        fixture *f = open_with_sender(trial % 2, 0);
        uint8_t *payload = random_bytes(&seed, LENGTH), abort_text[20] = {0};
        reader r;
        start_reading(&r, f, 1 << 20, 0);
        for (int i = 0; i < FRAMES; i++)
            push(f, i, payload, LENGTH - (uint32_t)draw_below(&seed, 5000));
        for (uint64_t until = clock_ns() + draw_below(&seed, 150000); clock_ns() < until;)
            ;
        lane_detach(&f->ln);
        CHECK_EQ(f->ln.owned_by_sender, 0);
        CHECK_EQ(f->sent, FRAMES); /* all given back */
        memset(payload, 0xee, LENGTH);
        free(payload);
        int rest = f->ln.out.list.head != NULL;
        int whole = (int)f->ln.sent_frames;
        lane_push(&f->ln,
                  new_frame(FRAME_ABORT, (uint64_t)(whole + rest), abort_text, sizeof abort_text));
        expect_sent(f, FRAMES + rest + 1);
        CHECK_EQ(finish_reading(&r, f), whole + rest + 1);
        close_fixture(f);
    }
}

static void detach_with_a_half_sent_frame(void)
{
    enum { LENGTH = 60000 };
    fixture *f = open_with_sender(1, 0);
    uint8_t *payload = calloc(1, LENGTH);
    for (int i = 0; i < 3; i++)
        push(f, i, payload, LENGTH);
    wait_for_bytes(f, 1);
    lane_detach(&f->ln);
    CHECK_EQ(f->sent, 3);
    CHECK(f->ln.out.sent > 0);
    free(payload);
    reader r;
    start_reading(&r, f, 1 << 20, 0);
    expect_sent(f, 4); /* the copy, by the driver */
    CHECK(finish_reading(&r, f) >= 1);
    close_fixture(f);
}

static void close_at_any_moment(void)
{
    enum { TRIALS = 100, FRAMES = 10 };
    uint64_t seed = 32u;
    for (int trial = 0; trial < TRIALS; trial++) {
        fixture *f = open_with_sender(trial % 2, 0);
        uint8_t *payload = random_bytes(&seed, MAX_LENGTH);
        reader r;
        start_reading(&r, f, 1 << 20, 0);
        for (int i = 0; i < FRAMES; i++)
            push(f, i, payload, MAX_LENGTH);
        for (uint64_t until = clock_ns() + draw_below(&seed, 150000); clock_ns() < until;)
            ;
        lane_close(&f->ln);
        CHECK_EQ(f->sent, FRAMES);
        free(payload);
        push(f, FRAMES, NULL, 0);
        CHECK_EQ(f->sent, FRAMES + 1);
        CHECK_EQ(lane_unacked(&f->ln), 0);
        pthread_join(r.thread, NULL);
        free(r.bytes);
        close_fixture(f);
    }
}

/* A peer that takes nothing more is judged by what it sent before, as without a sender. */
static void broken_lane_still_reads(void)
{
    static uint8_t payload[MAX_LENGTH];
    for (int trial = 0; trial < 20; trial++) {
        fixture *f = open_with_sender(1, 0);
        uint8_t wire[FRAME_HEADER_BYTES];
        make_frame(wire, FRAME_GOODBYE, 3, 0);
        put(f, wire, sizeof wire);
        for (int i = 0; i < 3; i++)
            push(f, i, payload, MAX_LENGTH);
        hang_up(f);
        drive(f, has_died, LONG_MS);
        CHECK_EQ(f->ended, 1);
        CHECK_EQ(f->deaths, 1);
        CHECK_EQ(f->sent, 3);
        push(f, 3, payload, MAX_LENGTH);
        CHECK_EQ(f->sent, 4);
        close_fixture(f);
    }
}

static int is_mute(const void *arg)
{
    return ((const fixture *)arg)->ln.tx_closed;
}

/* It is the sender that finds out. */
static void sender_meets_a_peer_that_is_gone(void)
{
    static uint8_t payload[MAX_LENGTH];
    fixture *f = open_with_sender(0, 0);
    hang_up(f);
    push(f, 0, payload, MAX_LENGTH);
    push(f, 1, payload, MAX_LENGTH);
    drive(f, is_mute, 200); /* or the end of the stream is seen first */
    drive(f, has_died, LONG_MS);
    CHECK_EQ(f->deaths, 1);
    CHECK_EQ(f->sent, 2);
    CHECK_EQ(f->ln.owned_by_sender, 0);
    close_fixture(f);
}

/* ---- the thread ---- */

static void idle_sender_costs_nothing(void)
{
    enum { MS = 200 };
    static uint8_t payload[MAX_LENGTH];
    fixture *f = open_with_sender(0, 0);
    push(f, 0, payload, 100);
    expect_sent(f, 1);
    usleep(10000);
    double before = sender_cpu_seconds(f->ln.sender), least = 1.0, enough = MS * 1e-3 / 50;
    CHECK(before > 0.0);
    CHECK(engine_cpu_seconds(f->engine) >= before);
    for (int look = 0; look < 5 && least >= enough; look++) {
        before = sender_cpu_seconds(f->ln.sender);
        drive(f, never, MS);
        double used = sender_cpu_seconds(f->ln.sender) - before;
        least = used < least ? used : least;
    }
    CHECK(least < enough);
    close_fixture(f);
}

static void nothing_is_left_behind(void)
{
    int before = open_fds();
    fixture *f = open_with_sender(0, 0);
    CHECK(sender_get(f->engine) == f->ln.sender); /* one for all */
    CHECK(open_fds() > before);
    close_fixture(f);
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {
        {"order_is_kept", order_is_kept},
        {"only_long_works_are_worth_it", only_long_works_are_worth_it},
        {"sends_while_nobody_drives", sends_while_nobody_drives},
        {"a_refused_write_is_tried_again", a_refused_write_is_tried_again},
        {"one_sender_for_several_lanes", one_sender_for_several_lanes},
        {"each_lane_moves_by_itself", each_lane_moves_by_itself},
        {"room_for_what_leaves_soon", room_for_what_leaves_soon},
        {"detach_at_any_moment", detach_at_any_moment},
        {"detach_with_a_half_sent_frame", detach_with_a_half_sent_frame},
        {"close_at_any_moment", close_at_any_moment},
        {"broken_lane_still_reads", broken_lane_still_reads},
        {"sender_meets_a_peer_that_is_gone", sender_meets_a_peer_that_is_gone},
        {"idle_sender_costs_nothing", idle_sender_costs_nothing},
        {"nothing_is_left_behind", nothing_is_left_behind},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
