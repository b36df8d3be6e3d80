/* test_stress.c - everything at once: several communicators on one engine per rank, a thread for
 * each rank of each, with and without a sender, mixed collectives of random sizes several at a
 * time, threads that look at counters and collect finished works, and ends that come at any moment:
 * an abort, a close with works in flight, or neither. Every result must be right, and every failure
 * must name who ended it.
 *
 * environment: STRESS_SECONDS, how long (default 1), and STRESS_SEED.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "../../csrc/base/clock.h"
#include "world.h"

enum { RANKS = 3, COMMS = 3, CALLS = 40, AHEAD = 4, MOST = 20000 };

typedef enum ending { END_IN_ORDER, END_ABORT, END_CLOSE, ENDINGS } ending;

/* One communicator with all its ranks, and how it ends. */
typedef struct group {
    rc_comm *comms[RANKS];
    uint64_t seed; /* of the calls, which are the same on all ranks */
    ending how;
    int who;        /* ends it, */
    uint32_t after; /* this many us */
    pthread_t ender;
} group;

/* One rank of a group, and its works in flight. */
typedef struct party {
    group *group;
    int rank;
    pthread_t thread;
    rc_work *works[AHEAD];
    rc_call calls[AHEAD];
    float *src[AHEAD], *dst[AHEAD];
} party;

static uint64_t seed;
static atomic_int over; /* for those who watch */

/* ---- calls ---- */

static rc_call draw_call(uint64_t *at)
{
    static const rc_collective kinds[] = {
        RC_ALLREDUCE, RC_ALLREDUCE, RC_REDUCE_SCATTER, RC_ALLGATHER, RC_BROADCAST, RC_REDUCE,
        RC_GATHER,    RC_SCATTER,   RC_ALLTOALL,       RC_BARRIER,   RC_SEND,      RC_RECV};
    rc_call call = {.size = sizeof call, .dtype = RC_F32, .timeout_ms = 30000};
    call.collective = kinds[draw_below(at, CHECK_COUNT(kinds))];
    call.count = draw_below(at, draw_below(at, 4) ? 300 : MOST);
    call.root = (int)draw_below(at, RANKS);
    call.waits = (int)draw_below(at, 2);
    call.notify = (int)draw_below(at, 2);
    if (call.collective == RC_BARRIER)
        call.count = 0;
    return call;
}

/* A drawn send goes from the rank before root, and a receive to the rank behind it. */
static int sender_of(const rc_call *call)
{
    return call->collective == RC_SEND ? (call->root + RANKS - 1) % RANKS : call->root;
}

static int receiver_of(const rc_call *call)
{
    return call->collective == RC_SEND ? call->root : (call->root + 1) % RANKS;
}

/* What this rank calls of it; 0 if it takes no part. */
static int take_part(rc_call *call, int rank)
{
    int from = sender_of(call), to = receiver_of(call);
    if (!collective_is_p2p(call->collective))
        return 1;
    if (rank != from && rank != to)
        return 0;
    call->collective = rank == from ? RC_SEND : RC_RECV;
    call->root = rank == from ? to : from;
    return 1;
}

/* Small whole numbers, of which any sum is exact. */
static float value(uint64_t seq, int rank, uint64_t i)
{
    return (float)((seq * 7 + (uint64_t)rank * 31 + i * 3) % 100);
}

static float expected(const rc_call *call, uint64_t seq, int rank, uint64_t i)
{
    uint64_t at;
    int first;
    trace(call, rank, RANKS, i, &first, &at);
    if (!collective_reduces(call->collective))
        return value(seq, first, at);
    float sum = 0.0F;
    for (int other = 0; other < RANKS; other++)
        sum += value(seq, other, at);
    return sum;
}

static void check_result(const party *p, int slot, uint64_t seq)
{
    const rc_call *call = &p->calls[slot];
    uint64_t wrong = 0;
    for (uint64_t i = 0; has_result(call, p->rank) && i < result_count(call, RANKS); i++)
        wrong += p->dst[slot][i] != expected(call, seq, p->rank, i);
    if (!CHECK(wrong == 0))
        CHECK_NOTE("rank %d: collective %d #%llu of %llu\n", p->rank, call->collective,
                   (unsigned long long)seq, (unsigned long long)call->count);
}

/* ---- a rank ---- */

/* 1 if the communicator has not ended. */
static int settle(party *p, int slot)
{
    rc_error error;
    rc_work *work = p->works[slot];
    if (work == NULL)
        return 1;
    const group *g = p->group;
    rc_result result = outcome(work, &error);
    int closed = result == RC_INVALID_STATE && g->how == END_CLOSE && p->rank == g->who;
    if (result == RC_OK)
        check_result(p, slot, rc_work_seq(work));
    else if (!CHECK(closed || (g->how != END_IN_ORDER && error.rank == g->who)))
        CHECK_NOTE("rank %d, ended by %d: %s\n", p->rank, g->who, error.message);
    rc_work_free(work);
    p->works[slot] = NULL;
    return result == RC_OK;
}

/* 0 if the communicator has been closed. */
static int start_call(party *p, int slot, rc_call call, uint64_t seq)
{
    rc_error error;
    for (uint64_t i = 0; i < source_count(&call, RANKS); i++)
        p->src[slot][i] = value(seq, p->rank, i);
    call.src = p->src[slot];
    call.dst = p->dst[slot];
    p->calls[slot] = call;
    rc_result result = rc_submit(p->group->comms[p->rank], &call, &p->works[slot], &error);
    if (result == RC_OK)
        return CHECK_EQ(rc_work_seq(p->works[slot]), seq);
    CHECK_EQ(result, RC_INVALID_STATE);
    CHECK(p->group->how == END_CLOSE && p->rank == p->group->who);
    return 0;
}

static void *be_rank(void *arg)
{
    party *p = arg;
    uint64_t at = p->group->seed, seqs = 0, sent[RANKS] = {0}, received[RANKS] = {0};
    int running = 1;
    for (int i = 0; i < CALLS && running; i++) {
        rc_call call = draw_call(&at);
        if (!take_part(&call, p->rank))
            continue;
        uint64_t *seq = call.collective == RC_SEND   ? &sent[call.root]
                        : call.collective == RC_RECV ? &received[call.root]
                                                     : &seqs;
        running = settle(p, i % AHEAD) && start_call(p, i % AHEAD, call, *seq);
        *seq += 1;
    }
    for (int slot = 0; slot < AHEAD; slot++)
        settle(p, slot);
    return NULL;
}

/* ---- the others ---- */

static void *end_group(void *arg)
{
    group *g = arg;
    usleep(g->after);
    if (g->how == END_ABORT)
        rc_comm_abort(g->comms[g->who], "enough");
    if (g->how == END_CLOSE)
        rc_comm_close(g->comms[g->who], 2000);
    return NULL;
}

static void *look_on(void *arg)
{
    group *groups = arg;
    for (uint64_t at = 1; !atomic_load(&over);) {
        rc_comm *comm = groups[draw_below(&at, COMMS)].comms[draw_below(&at, RANKS)];
        rc_comm_stats stats;
        rc_lane_stats lanes[2 * RANKS];
        rc_error error;
        rc_comm_stats_get(comm, &stats);
        CHECK_EQ(rc_comm_lane_stats(comm, lanes, 2 * RANKS), stats.lanes);
        rc_comm_error(comm, &error);
        usleep(300);
    }
    return NULL;
}

static void *collect(void *arg)
{
    while (!atomic_load(&over)) {
        rc_work *work;
        if (rc_engine_take_done(arg, 20, &work) == RC_OK) {
            CHECK(rc_work_wait(work, 0) != RC_AGAIN);
            rc_work_free(work);
        }
    }
    return NULL;
}

/* ---- a round ---- */

static void open_group(group *g, rc_engine *const *engines)
{
    world w = {.options = {.size = RANKS,
                           .lanes = 1 + (int)draw_below(&seed, 2),
                           .tcp = (int)draw_below(&seed, 2),
                           .threads = 1 + (uint32_t)draw_below(&seed, 2),
                           .segment_bytes = 4096},
               .size = RANKS};
    for (int rank = 0; rank < RANKS; rank++) {
        rc_comm_config config = world_config(&w.options, rank);
        CHECK_EQ(rc_comm_create(&w.comms[rank], engines[rank], &config), RC_OK);
    }
    for (int a = 0; a < RANKS; a++)
        for (int b = a + 1; b < RANKS; b++)
            world_join(&w, a, b);
    for (int rank = 0; rank < RANKS; rank++) {
        world_start(w.comms[rank]);
        g->comms[rank] = w.comms[rank];
    }
    g->seed = draw(&seed);
    g->how = (ending)draw_below(&seed, ENDINGS);
    g->who = (int)draw_below(&seed, RANKS);
    g->after = (uint32_t)draw_below(&seed, 8000);
}

static void open_parties(group *g, party *parties)
{
    for (int rank = 0; rank < RANKS; rank++) {
        parties[rank] = (party){.group = g, .rank = rank};
        for (int slot = 0; slot < AHEAD; slot++) {
            parties[rank].src[slot] = calloc((size_t)RANKS * MOST, sizeof(float));
            parties[rank].dst[slot] = calloc((size_t)RANKS * MOST, sizeof(float));
        }
        pthread_create(&parties[rank].thread, NULL, be_rank, &parties[rank]);
    }
    pthread_create(&g->ender, NULL, end_group, g);
}

static void join_parties(group *g, party *parties)
{
    for (int rank = 0; rank < RANKS; rank++) {
        pthread_join(parties[rank].thread, NULL);
        for (int slot = 0; slot < AHEAD; slot++) {
            free(parties[rank].src[slot]);
            free(parties[rank].dst[slot]);
        }
    }
    pthread_join(g->ender, NULL);
}

static void run_round(rc_engine *const *engines)
{
    group groups[COMMS];
    party parties[COMMS][RANKS];
    pthread_t watcher, collectors[RANKS];
    atomic_store(&over, 0);
    for (int i = 0; i < COMMS; i++)
        open_group(&groups[i], engines);
    pthread_create(&watcher, NULL, look_on, groups);
    for (int rank = 0; rank < RANKS; rank++)
        pthread_create(&collectors[rank], NULL, collect, engines[rank]);
    for (int i = 0; i < COMMS; i++)
        open_parties(&groups[i], parties[i]);
    for (int i = 0; i < COMMS; i++)
        join_parties(&groups[i], parties[i]);
    atomic_store(&over, 1);
    pthread_join(watcher, NULL);
    for (int rank = 0; rank < RANKS; rank++)
        pthread_join(collectors[rank], NULL);
    for (int i = 0; i < COMMS; i++)
        for (int rank = 0; rank < RANKS; rank++) {
            if (draw_below(&seed, 2)) /* else abruptly */
                rc_comm_close(groups[i].comms[rank], 1000);
            rc_comm_free(groups[i].comms[rank]);
        }
}

static void everything_at_once(void)
{
    const char *limit = getenv("STRESS_SECONDS"), *from = getenv("STRESS_SEED");
    double seconds = limit != NULL ? atof(limit) : 1.0;
    seed = from != NULL ? strtoull(from, NULL, 10) : 2024u;
    int before = open_fds();
    uint64_t start = clock_ns();
    do {
        rc_engine *engines[RANKS];
        for (int rank = 0; rank < RANKS; rank++)
            CHECK_EQ(rc_engine_create(&engines[rank], NULL), RC_OK);
        uint64_t first = seed;
        run_round(engines);
        for (int rank = 0; rank < RANKS; rank++)
            rc_engine_free(engines[rank]);
        if (check_failures > 0)
            fprintf(stderr, "STRESS_SEED=%llu\n", (unsigned long long)first);
    } while (check_failures == 0 && clock_seconds(start, clock_ns()) < seconds);
    CHECK_EQ(open_fds(), before);
}

int main(void)
{
    static const check_test tests[] = {{"everything_at_once", everything_at_once}};
    return check_run(tests, CHECK_COUNT(tests));
}
