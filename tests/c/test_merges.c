/* test_merges.c - the plans that merge, judged by running them: every rank's values as the set of
 * ranks that are in them, frames delivered as the plan says, in random order.
 */
#include <string.h>

#include "../../csrc/plan/plan.h"
#include "check.h"
#include "draw.h"

enum { MAX_WORLD = 33, BAG = 4 * MAX_WORLD * MAX_WORLD };

typedef struct value {
    uint64_t ranks;  /* that are in it */
    uint32_t rounds; /* frames that had to come first, one after the other */
} value;

typedef struct frame {
    uint32_t chunk;
    value value;
} frame;

static plan plans[MAX_WORLD];
static value values[MAX_WORLD][MAX_WORLD];  /* [rank][part] */
static value kept[MAX_WORLD][MAX_WORLD][8]; /* [rank][part][turn] */
static uint32_t over[MAX_WORLD][MAX_WORLD]; /* turns, [rank][part] */
static frame bag[BAG];
static int in_bag;
static uint64_t seed = 88172645463325252u;

static void open_world(rc_algorithm algorithm, int n)
{
    rc_call call = {.collective = RC_ALLREDUCE, .dtype = RC_F32, .count = 256 * (uint64_t)n};
    memset(kept, 0, sizeof kept);
    memset(over, 0, sizeof over);
    in_bag = 0;
    for (int rank = 0; rank < n; rank++) {
        plan_init(&plans[rank], &call, algorithm, rank, n, 1 << 20);
        for (int part = 0; part < n; part++)
            values[rank][part] = (value){.ranks = UINT64_C(1) << rank};
    }
}

static void post(const plan *p, uint32_t chunk, value v)
{
    CHECK(plan_hops(p, chunk) == 1);
    CHECK_EQ(plan_rank_at(p, chunk, 0), p->rank);
    v.rounds++;
    bag[in_bag++] = (frame){chunk, v};
}

static void leave(const plan *p, uint32_t part)
{
    uint32_t turns = over[p->rank][part], chunk = plan_send_after_turns(p, part, turns);
    value v = values[p->rank][part];
    if (chunk != PLAN_NO_CHUNK) {
        CHECK_EQ(plan_is_given(p, chunk), turns == 0);
        post(p, chunk, v);
    }
}

static void pass_on(const plan *p, uint32_t part, value v)
{
    for (uint32_t i = 0; i < plan_results(p, part); i++) {
        v.rounds += i > 0; /* its port carries one after the other */
        post(p, plan_result(p, part, i), v);
    }
}

static void merge(const plan *p, uint32_t part)
{
    value *had = &values[p->rank][part];
    uint32_t *turn = &over[p->rank][part];
    while (*turn < plan_turns(p, part) && kept[p->rank][part][*turn].ranks != 0) {
        value came = kept[p->rank][part][*turn];
        CHECK_EQ(had->ranks & came.ranks, 0); /* nobody is added twice */
        had->ranks |= came.ranks;
        had->rounds = came.rounds > had->rounds ? came.rounds : had->rounds;
        ++*turn;
        int is_last = *turn == plan_turns(p, part);
        if (is_last && plan_is_owner(p, part))
            pass_on(p, part, *had);
        else
            leave(p, part);
    }
}

static void deliver(frame f)
{
    const plan *p = &plans[plan_rank_at(&plans[0], f.chunk, 1)];
    uint32_t part = plan_part(p, f.chunk);
    if (plan_action_at(p, f.chunk, 0) == PLAN_STORE) {
        values[p->rank][part] = f.value;
        pass_on(p, part, f.value);
        return;
    }
    uint32_t turn = plan_turn(p, f.chunk);
    if (!CHECK(turn < plan_turns(p, part) && turn < 8))
        return;
    CHECK_EQ(kept[p->rank][part][turn].ranks, 0);
    kept[p->rank][part][turn] = f.value;
    merge(p, part);
}

static uint32_t log2_up(int n)
{
    uint32_t log = 0;
    while (1 << log < n)
        log++;
    return log;
}

/* Every part ends with every rank in it, once, on every rank; in as many rounds as the cost model
 * counts, and with as many frames as the ranks wait for. */
static void run(rc_algorithm algorithm, int n)
{
    uint64_t delivered = 0, expected = 0;
    open_world(algorithm, n);
    for (int rank = 0; rank < n; rank++) {
        expected += plan_receives(&plans[rank], -1);
        CHECK_EQ(plan_sends(&plans[rank], -1), plan_receives(&plans[rank], -1));
        for (uint32_t part = 0; part < plan_parts(&plans[rank]); part++)
            leave(&plans[rank], part);
    }
    while (in_bag > 0) {
        int i = (int)draw_below(&seed, (uint64_t)in_bag);
        frame f = bag[i];
        bag[i] = bag[--in_bag];
        deliver(f);
        delivered++;
    }
    CHECK_EQ(delivered, expected);
    uint32_t up = log2_up(n), is_power = 1 << up == n;
    uint32_t most = algorithm == RC_HALVING ? 2 * up : is_power ? up : up + 1;
    for (int rank = 0; rank < n; rank++)
        for (uint32_t part = 0; part < plan_parts(&plans[rank]); part++) {
            CHECK_EQ(values[rank][part].ranks, (UINT64_C(1) << n) - 1);
            CHECK(values[rank][part].rounds <= most);
        }
}

static void everyone_gets_everything_once(void)
{
    for (int n = 2; n <= MAX_WORLD; n++)
        for (int round = 0; round < 5; round++) {
            run(RC_DOUBLING, n);
            run(RC_HALVING, n);
        }
}

/* Halving's point: in each round one receiver, and no more bytes than the ring. */
static void halving_sends_what_the_ring_sends(void)
{
    for (int n = 2; n <= MAX_WORLD; n++) {
        open_world(RC_HALVING, n);
        for (int rank = 0; rank < n; rank++) {
            CHECK_EQ(plan_sends(&plans[rank], -1), 2 * (uint64_t)(n - 1));
            uint32_t receivers = 0;
            for (int peer = 0; peer < n; peer++)
                receivers += plan_sends(&plans[rank], peer) > 0;
            CHECK(receivers <= 2 * log2_up(n));
        }
    }
}

int main(void)
{
    static const check_test tests[] = {
        {"everyone_gets_everything_once", everyone_gets_everything_once},
        {"halving_sends_what_the_ring_sends", halving_sends_what_the_ring_sends},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
