/* world.c - see world.h. */
#include "world.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "../../csrc/comm.h"
#include "calls.h"
#include "os.h"

enum {
    MOST_CALLS = 12,
    MOST_IN_FLIGHT = 4,
    MOST_FAULTS = 3,
    FAULT_TURNS = 6000, /* no fault comes later */
    MOST_TURNS = 400000,
    CALL_TIMEOUT_MS = 300000,
    LEAVE_MS = 1000,
    LATE_MS = 2000 /* after what the silence of a peer takes to end it: docs/RELIABILITY.md */
};

#define MS 1000000ULL

typedef enum fault_kind {
    FAULT_PAUSE, /* a lane is silent for a while */
    FAULT_SLOW,
    FAULT_NAP, /* a rank is stopped for a while */
    FAULT_HARMLESS,
    FAULT_RST = FAULT_HARMLESS, /* from here on a communicator may end */
    FAULT_FIN,
    FAULT_DARK_ONE,
    FAULT_DARK_BOTH,
    FAULT_FLIP,
    FAULT_KILL,
    FAULT_VANISH, /* a host, with all its lanes */
    FAULT_STOP,
    FAULT_ABORT, /* a rank's program gives up */
    FAULT_KINDS
} fault_kind;

static const char *const fault_names[FAULT_KINDS] = {
    [FAULT_PAUSE] = "pause",    [FAULT_SLOW] = "slow", [FAULT_NAP] = "nap",
    [FAULT_RST] = "rst",        [FAULT_FIN] = "fin",   [FAULT_DARK_ONE] = "dark one way",
    [FAULT_DARK_BOTH] = "dark", [FAULT_FLIP] = "flip", [FAULT_KILL] = "kill",
    [FAULT_VANISH] = "vanish",  [FAULT_STOP] = "stop", [FAULT_ABORT] = "abort"};

typedef struct fault {
    fault_kind kind;
    int turn, lane, end, rank;
} fault;

/* A call of a rank in flight. */
typedef struct task {
    rc_work *work;
    const sim_call *what;
    uint8_t *src, *dst;
} task;

/* A rank in a group: one communicator. */
typedef struct member {
    enum { WORKS, LEAVES, GONE } state;
    rc_comm *comm;
    int next, in_flight;
    task tasks[MOST_IN_FLIGHT];
    rc_error error;
    uint64_t leave_until;
} member;

/* Ranks with a communicator, and their calls. */
typedef struct group {
    rc_comm_config config;
    int calls, in_flight;
    sim_call call[MOST_CALLS];
    member members[OS_MOST_RANKS];
} group;

typedef struct world {
    uint64_t seed, random, began, quiet_at;
    uint64_t calls_at[OS_MOST_RANKS]; /* its next call, at the earliest */
    uint64_t pace[OS_MOST_RANKS];     /* ns between calls, at most */
    uint64_t due[OS_MOST_RANKS];      /* when its program wants a turn */
    int ranks, groups, faults, turn, failed;
    unsigned suspects, confused; /* ranks that may be blamed; ranks that may blame anyone */
    unsigned dead;
    unsigned codes;       /* bits of the results with which calls may fail */
    uint64_t befallen_at; /* when the last fault came, or the last rank went */
    uint64_t bound;       /* ns that everything may take once there are no more faults */
    rc_engine *engines[OS_MOST_RANKS];
    group group[WORLD_MOST_GROUPS];
    fault fault[MOST_FAULTS];
} world;

static void fails(world *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void fails(world *w, const char *format, ...)
{
    va_list args;
    if (w->failed++)
        return;
    fprintf(stderr, "seed %llu: at %.6f s, turn %d: ", (unsigned long long)w->seed,
            (double)(os_now() - w->began) * 1e-9, w->turn);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    os_trace(-1, "FAILS");
}

static uint64_t pick(world *w, uint64_t bound)
{
    return draw_below(&w->random, bound);
}

#define PICK(w, array) ((array)[pick(w, sizeof(array) / sizeof(*(array)))])

static void want_turn(world *w, int rank, uint64_t at)
{
    if (at < w->due[rank])
        w->due[rank] = at;
    os_look_at(rank, at);
}

/* ---- what is drawn ---- */

static rc_comm_config draw_config(world *w)
{
    static const uint32_t segments[] = {4096, 8192, 16384, 65536, 262144};
    static const uint32_t beats[] = {100, 200, 500, 1000};
    static const uint32_t patience[] = {5, 10, 20};
    rc_comm_config config;
    rc_comm_config_init(&config);
    config.world_size = w->ranks;
    config.epoch = (uint32_t)pick(w, 1000);
    config.algorithm = (rc_algorithm)pick(w, RC_ALGORITHM_COUNT);
    config.segment_bytes = PICK(w, segments);
    config.heartbeat_ms = PICK(w, beats);
    config.peer_timeout_ms = config.heartbeat_ms * PICK(w, patience);
    return config;
}

/* Draws a wire whose buffers it carries within a tenth of the silence that ends a peer. */
static os_wire draw_wire(world *w, const rc_comm_config *config)
{
    static const uint32_t buffers[] = {4096, 20000, 100000, 400000};
    os_wire wire = {.send_buffer = PICK(w, buffers), .receive_buffer = PICK(w, buffers)};
    double fastest = 0.5, slowest = config->peer_timeout_ms * 1e6 / 10 / wire.send_buffer;
    slowest = slowest < 2000 ? slowest : 2000;
    wire.delay = 1000 + pick(w, pick(w, 2) ? 100000 : 10000000);
    wire.jitter = pick(w, 2) ? 0 : wire.delay;
    wire.ns_per_byte = fastest + pow((double)pick(w, 1000) / 1000, 3) * (slowest - fastest);
    return wire;
}

static void draw_faults(world *w)
{
    static const int counts[] = {0, 1, 1, 1, 1, 1, 2, 3};
    static const fault_kind often[] = {FAULT_FLIP, FAULT_FLIP, FAULT_RST, FAULT_DARK_ONE};
    w->faults = PICK(w, counts);
    int gentle = pick(w, 3) == 0;
    for (int i = 0; i < w->faults; i++) {
        fault *f = &w->fault[i];
        f->kind = (fault_kind)pick(w, gentle ? FAULT_HARMLESS : FAULT_KINDS);
        if (!gentle && pick(w, 4) == 0)
            f->kind = PICK(w, often);
        f->turn = (int)pick(w, 1ULL << pick(w, 13)) % FAULT_TURNS;
        f->lane = (int)pick(w, (uint64_t)os_lanes());
        f->end = (int)pick(w, 2);
        f->rank = os_lane_rank(f->lane, f->end);
    }
}

static os_mood draw_mood(world *w)
{
    static const unsigned often[] = {0, 0, 10, 100, 400};
    return (os_mood){.interrupted = PICK(w, often) / 2,
                     .refused = PICK(w, often) / 2,
                     .partial = PICK(w, often) * 2};
}

/* ---- bring-up ---- */

static void check(world *w, rc_result result, const char *what)
{
    if (result != RC_OK)
        fails(w, "%s: %s", what, rc_result_name(result));
}

static void join_ranks(world *w, group *g, int a, int b, int rails, int lanes)
{
    for (int rail = 0; rail < rails; rail++) {
        os_wire wire = draw_wire(w, &g->config);
        for (int i = 0; i < lanes; i++) {
            int fds[2];
            os_lane(a, b, &wire, fds);
            check(w, rc_comm_add_lane(g->members[a].comm, b, rail, fds[0], 0.0), "add_lane");
            check(w, rc_comm_add_lane(g->members[b].comm, a, rail, fds[1], 0.0), "add_lane");
        }
    }
}

static void open_group(world *w, group *g)
{
    int rails = 1 + (int)pick(w, 3), lanes = 1 + (int)pick(w, 2);
    g->config = draw_config(w);
    for (int rank = 0; rank < w->ranks; rank++) {
        g->config.rank = rank;
        os_enter(rank);
        check(w, rc_comm_create(&g->members[rank].comm, w->engines[rank], &g->config), "create");
        g->members[rank].error.code = RC_OK;
    }
    for (int a = 0; a < w->ranks; a++)
        for (int b = a + 1; b < w->ranks; b++)
            join_ranks(w, g, a, b, rails, lanes);
    g->calls = 1 + (int)pick(w, MOST_CALLS);
    g->in_flight = 1 + (int)pick(w, MOST_IN_FLIGHT);
    for (int i = 0; i < g->calls; i++) {
        g->call[i] = call_draw(&w->random, w->ranks, (uint32_t)i);
        g->call[i].call.timeout_ms = CALL_TIMEOUT_MS;
    }
    for (int rank = 0; rank < w->ranks; rank++) {
        os_enter(rank);
        check(w, rc_comm_start(g->members[rank].comm), "start");
    }
    uint64_t patience = g->config.peer_timeout_ms > 1500 ? g->config.peer_timeout_ms : 1500;
    w->bound = patience * 2 * MS > w->bound ? patience * 2 * MS : w->bound;
}

static void open_world(world *w)
{
    static const char *const kernels[] = {NULL, "scalar"};
    static const uint64_t paces[] = {1, MS, 20 * MS, 300 * MS};
    w->ranks = 2 + (int)pick(w, pick(w, 2) ? 2 : OS_MOST_RANKS - 1);
    w->groups = 1 + (pick(w, 4) == 0);
    for (int rank = 0; rank < w->ranks; rank++) {
        os_enter(rank);
        check(w, rc_engine_create(&w->engines[rank], PICK(w, kernels)), "engine");
        w->calls_at[rank] = os_now() + pick(w, 5 * MS);
        w->due[rank] = OS_NEVER;
        w->pace[rank] = PICK(w, paces);
        os_look_at(rank, os_now());
        want_turn(w, rank, w->calls_at[rank]);
    }
    for (int i = 0; i < w->groups; i++)
        open_group(w, &w->group[i]);
    draw_faults(w);
    os_set_mood(draw_mood(w));
}

/* ---- calls ---- */

static uint8_t *room_for(uint64_t elements, rc_dtype dtype)
{
    size_t bytes = elements * rc_dtype_size(dtype);
    uint8_t *room = malloc(bytes > 0 ? bytes : 1); /* to the byte: the sanitizer sees one more */
    memset(room, 0x55, bytes);
    return room;
}

static void call(world *w, group *g, int rank, task *t, const sim_call *what)
{
    rc_call call = call_of_rank(what, rank);
    rc_error error;
    uint64_t given = source_count(&call, w->ranks);
    t->what = what;
    t->dst = room_for(result_count(&call, w->ranks), call.dtype);
    t->src = what->in_place ? t->dst : room_for(given, call.dtype);
    for (uint64_t i = 0; i < given; i++)
        call_store(t->src, call.dtype, i, (double)call_value(what, rank, i));
    call.src = t->src;
    call.dst = t->dst;
    os_trace(rank, "call group %d #%d collective %d dtype %d op %d codec %d count %llu root %d",
             (int)(g - w->group), (int)(what - g->call), call.collective, call.dtype, call.op,
             call.codec, (unsigned long long)call.count, call.root);
    check(w, rc_submit(g->members[rank].comm, &call, &t->work, &error), error.message);
}

static void call_more(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    while (m->next < g->calls && m->in_flight < g->in_flight && os_now() >= w->calls_at[rank] &&
           !w->failed) {
        const sim_call *what = &g->call[m->next++];
        task *t = m->tasks;
        if (!call_takes_part(what, rank))
            continue;
        while (t->work != NULL)
            t++;
        call(w, g, rank, t, what);
        m->in_flight++;
        if (pick(w, 4) == 0) {
            w->calls_at[rank] = os_now() + pick(w, w->pace[rank]);
            want_turn(w, rank, w->calls_at[rank]);
        }
    }
}

/* ---- what must be true of an end ---- */

static void check_result(world *w, group *g, int rank, const task *t)
{
    int64_t wrong = call_first_wrong(t->what, rank, w->ranks, t->dst);
    if (wrong >= 0)
        fails(w, "rank %d: element %lld of %llu of #%d of group %d is wrong", rank,
              (long long)wrong, (unsigned long long)t->what->call.count, (int)(t->what - g->call),
              (int)(g - w->group));
}

/* Checks that a failure follows from a fault, and names what it befell. A rank that was stopped or
 * cut off may tell anything, at any time. */
static void check_error(world *w, const rc_error *error, int rank)
{
    int is_confused = w->confused >> rank & 1;
    if (error->code == RC_TIMEOUT)
        fails(w, "rank %d hangs: %s", rank, error->message);
    else if (w->suspects == 0)
        fails(w, "rank %d fails without a fault: %s", rank, error->message);
    else if (!(w->codes >> error->code & 1))
        fails(w, "rank %d takes the fault for another: %s", rank, error->message);
    else if (is_confused)
        return;
    else if (error->rank < 0 || !(w->suspects >> error->rank & 1))
        fails(w, "rank %d blames rank %d: %s", rank, error->rank, error->message);
    else if (error->rank == rank && error->lane >= 0)
        fails(w, "rank %d blames itself for a lane: %s", rank, error->message);
    else if (os_now() > w->befallen_at + w->bound / 2 + LATE_MS * MS)
        fails(w, "rank %d hears late of the fault: %s", rank, error->message);
}

/* Checks the communicator's error: it comes once and stays. */
static void look_at_error(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    rc_error now;
    rc_comm_error(m->comm, &now);
    if (now.code == m->error.code && strcmp(now.message, m->error.message) == 0)
        return;
    if (m->error.code != RC_OK)
        fails(w, "rank %d: the error \"%s\" became \"%s\"", rank, m->error.message, now.message);
    m->error = now;
    os_trace(rank, "error group %d %s: %s", (int)(g - w->group), rc_result_name(now.code),
             now.message);
    check_error(w, &now, rank);
}

static void end_task(world *w, group *g, int rank, task *t)
{
    member *m = &g->members[rank];
    rc_error error;
    rc_work_error(t->work, &error);
    os_trace(rank, "over group %d #%d %s", (int)(g - w->group), (int)(t->what - g->call),
             rc_result_name(error.code));
    if (error.code == RC_OK)
        check_result(w, g, rank, t);
    else if (error.code != m->error.code || strcmp(error.message, m->error.message) != 0)
        fails(w, "rank %d: a call ends with \"%s\", its communicator with \"%s\"", rank,
              error.message, m->error.message);
    rc_work_free(t->work);
    if (t->src != t->dst)
        free(t->src);
    free(t->dst);
    *t = (task){NULL};
    m->in_flight--;
}

static void collect_ends(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    if (m->state == WORKS || m->error.code != RC_OK)
        look_at_error(w, g, rank);
    for (int i = 0; i < MOST_IN_FLIGHT; i++)
        if (m->tasks[i].work != NULL && rc_work_wait(m->tasks[i].work, 0) != RC_AGAIN)
            end_task(w, g, rank, &m->tasks[i]);
}

/* ---- leaving ---- */

static void close_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    rc_comm_close(m->comm, 0);
    if (m->comm->buffers.taken != 0)
        fails(w, "rank %d keeps %d buffers", rank, m->comm->buffers.taken);
    rc_comm_free(m->comm);
    m->comm = NULL;
    m->state = GONE;
    w->befallen_at = os_now(); /* behind a dark lane its silence begins now */
    os_trace(rank, "gone group %d", (int)(g - w->group));
}

static void leave(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    int is_over = m->in_flight == 0 && (m->next == g->calls || m->error.code != RC_OK);
    if (m->state == WORKS && is_over) {
        m->state = LEAVES;
        m->leave_until = os_now() + LEAVE_MS * MS;
        os_trace(rank, "leaves group %d", (int)(g - w->group));
    }
    if (m->state != LEAVES)
        return;
    if (rc_comm_leave(m->comm, 0) == RC_OK || os_now() >= m->leave_until)
        close_member(w, g, rank);
    else
        want_turn(w, rank, os_now() + MS);
}

/* ---- faults ---- */

static uint64_t longest_pause(const world *w)
{
    uint64_t ms = 1000;
    for (int i = 0; i < w->groups; i++)
        ms = w->group[i].config.peer_timeout_ms < ms ? w->group[i].config.peer_timeout_ms : ms;
    return ms * MS * 2 / 5;
}

static void silence_rank(const fault *f)
{
    for (int i = 0; i < os_lanes(); i++)
        for (int end = 0; end < 2; end++)
            if (os_lane_rank(i, 0) == f->rank || os_lane_rank(i, 1) == f->rank)
                os_silence(i, end, OS_NEVER);
}

static void give_up(world *w, int rank)
{
    os_enter(rank);
    for (int i = 0; i < w->groups && !(w->dead >> rank & 1); i++)
        if (w->group[i].members[rank].state == WORKS)
            rc_comm_abort(w->group[i].members[rank].comm, "it was drawn");
}

static void befall(world *w, const fault *f)
{
    switch (f->kind) {
    case FAULT_PAUSE: os_silence(f->lane, f->end, os_now() + pick(w, longest_pause(w))); break;
    case FAULT_SLOW: os_slow_down(f->lane, 1.0 + (double)pick(w, 4)); break;
    case FAULT_NAP: os_stop(f->rank, os_now() + pick(w, longest_pause(w))); break;
    case FAULT_RST: os_cut_lane(f->lane, OS_RST, 1 + (int)pick(w, 3)); break;
    case FAULT_FIN: os_cut_lane(f->lane, OS_FIN, 1 + (int)pick(w, 3)); break;
    case FAULT_DARK_ONE: os_silence(f->lane, f->end, OS_NEVER); break;
    case FAULT_DARK_BOTH:
        os_silence(f->lane, 0, OS_NEVER);
        os_silence(f->lane, 1, OS_NEVER);
        break;
    case FAULT_FLIP: os_flip(f->lane, f->end); break;
    case FAULT_KILL: os_kill(f->rank), w->dead |= 1U << f->rank; break;
    case FAULT_VANISH: silence_rank(f); break;
    case FAULT_STOP: os_stop(f->rank, os_now() + w->bound + pick(w, 1000 * MS)); break;
    case FAULT_ABORT: give_up(w, f->rank); break;
    default: break;
    }
}

/* Notes whom the fault makes a suspect. */
static void suspect(world *w, const fault *f)
{
    if (f->kind < FAULT_HARMLESS)
        return;
    w->suspects |= 1U << f->rank;
    w->codes |= 1U << (f->kind == FAULT_FLIP    ? RC_PROTOCOL
                       : f->kind == FAULT_ABORT ? RC_ABORTED
                                                : RC_PEER_LOST);
    if (f->kind < FAULT_KILL)
        w->suspects |= 1U << os_lane_rank(f->lane, 0) | 1U << os_lane_rank(f->lane, 1);
    else
        w->confused |= 1U << f->rank;
}

static void bring_faults(world *w)
{
    int left = 0;
    for (int i = 0; i < w->faults; i++) {
        const fault *f = &w->fault[i];
        left += f->turn > w->turn;
        if (f->turn != w->turn)
            continue;
        os_trace(-1, "fault %s lane %d end %d rank %d", fault_names[f->kind], f->lane, f->end,
                 f->rank);
        w->befallen_at = os_now();
        suspect(w, f);
        befall(w, f);
    }
    if (left == 0 && w->quiet_at == 0) {
        w->quiet_at = os_now();
        os_trace(-1, "no more faults");
    }
}

/* ---- the run ---- */

static int never(const void *arg)
{
    (void)arg;
    return 0;
}

static int is_over(const world *w)
{
    for (int i = 0; i < w->groups; i++)
        for (int rank = 0; rank < w->ranks; rank++)
            if (w->group[i].members[rank].state != GONE && !(w->dead >> rank & 1))
                return 0;
    return 1;
}

static void run_rank(world *w, int rank)
{
    rc_engine *e = w->engines[rank];
    w->due[rank] = OS_NEVER;
    os_begin_turn(rank, 1 + (int)pick(w, 3));
    os_trace(rank, "turn");
    engine_lock(e);
    engine_drive(e, never, NULL, ENGINE_NEVER, 0);
    engine_unlock(e);
    for (int i = 0; i < w->groups && !w->failed; i++) {
        group *g = &w->group[i];
        if (g->members[rank].state == GONE)
            continue;
        collect_ends(w, g, rank);
        if (g->members[rank].state == WORKS && g->members[rank].error.code == RC_OK)
            call_more(w, g, rank);
        leave(w, g, rank);
    }
    os_end_turn(rank);
}

static void check_time(world *w)
{
    if (w->turn > MOST_TURNS)
        fails(w, "no end after %d turns", w->turn);
    else if (w->quiet_at != 0 && os_now() > w->quiet_at + 4 * w->bound + 20000 * MS)
        fails(w, "no end in time");
}

static void run(world *w)
{
    while (!w->failed && !is_over(w)) {
        int rank = os_next();
        if (rank < 0) {
            fails(w, "nothing happens any more");
            return;
        }
        if (!os_is_due(rank, w->due[rank]))
            continue;
        run_rank(w, rank);
        w->turn++;
        bring_faults(w);
        check_time(w);
    }
}

/* ---- the end ---- */

static void end_member(world *w, group *g, int rank)
{
    member *m = &g->members[rank];
    os_enter(rank);
    if (m->comm != NULL)
        rc_comm_free(m->comm);
    for (int i = 0; i < MOST_IN_FLIGHT; i++) {
        task *t = &m->tasks[i];
        if (t->work == NULL)
            continue;
        if (rc_work_wait(t->work, 0) == RC_AGAIN)
            fails(w, "rank %d: a call outlives its communicator", rank);
        rc_work_free(t->work);
        if (t->src != t->dst)
            free(t->src);
        free(t->dst);
    }
}

static void close_world(world *w)
{
    for (int i = 0; i < w->groups; i++)
        for (int rank = 0; rank < w->ranks; rank++)
            end_member(w, &w->group[i], rank);
    for (int rank = 0; rank < w->ranks; rank++) {
        os_enter(rank);
        rc_engine_free(w->engines[rank]);
    }
    int left = os_close();
    if (left != 0)
        fails(w, "%d descriptors are open", left);
}

static void leave_out(world *w, const world_part *part)
{
    for (int i = 0; i < w->faults; i++)
        if (!(part->faults >> i & 1))
            w->fault[i].turn = -1;
    for (int i = 0; i < w->groups; i++)
        if (w->group[i].calls > part->calls[i])
            w->group[i].calls = part->calls[i];
    if (part->is_calm)
        os_set_mood((os_mood){0, 0, 0});
}

int world_run(uint64_t seed, const world_part *part, FILE *trace)
{
    world *w = calloc(1, sizeof *w);
    w->seed = seed;
    w->random = call_mix(seed + 0x9e3779b97f4a7c15u) | 1;
    os_open(call_mix(seed), trace);
    w->began = os_now();
    open_world(w);
    leave_out(w, part);
    run(w);
    close_world(w);
    int failed = w->failed;
    free(w);
    return !failed;
}
