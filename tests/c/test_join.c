/* test_join.c - contributions in any order: when a segment is complete, and who holds its buffers.
 */
#include "../../csrc/coll/join.h"
#include "check.h"
#include "reference.h"

enum { WORLD = 4, SEGMENTS = 3, BYTES = 64 };

static pool buffers;

static pool_buffer *contribution(int rank, uint32_t segment)
{
    pool_buffer *buffer = pool_take(&buffers);
    buffer->data[0] = (uint8_t)(16 * rank + (int)segment);
    return buffer;
}

static void check_wires(join *j, uint32_t segment, int own)
{
    const void *const *wires = join_wires(j, segment);
    for (int rank = 0; rank < WORLD; rank++)
        if (rank == own)
            CHECK(wires[rank] == NULL);
        else
            CHECK_EQ(*(const uint8_t *)wires[rank], 16 * rank + (int)segment);
}

/* Ranks and segments mixed at random; one rank's values are not among them. */
static void complete_with_the_last_one(void)
{
    uint64_t seed = 4711;
    for (int round = 0; round < 200; round++) {
        join j;
        int own = round % WORLD, left = SEGMENTS * (WORLD - 1), kept[SEGMENTS][WORLD] = {{0}};
        int counts[SEGMENTS] = {0};
        pool_init(&buffers, BYTES, 4);
        CHECK_EQ(join_init(&j, SEGMENTS, WORLD, WORLD - 1), RC_OK);
        while (left > 0) {
            int rank = (int)draw_below(&seed, WORLD);
            uint32_t segment = (uint32_t)draw_below(&seed, SEGMENTS);
            if (rank == own || kept[segment][rank])
                continue;
            kept[segment][rank] = 1;
            left--;
            int complete = join_keep(&j, segment, rank, contribution(rank, segment));
            CHECK_EQ(complete, ++counts[segment] == WORLD - 1);
            if (complete) {
                check_wires(&j, segment, own);
                join_drop(&j, segment, &buffers);
            }
        }
        CHECK_EQ(buffers.taken, 0);
        join_destroy(&j, &buffers);
        pool_destroy(&buffers);
    }
}

static void what_is_kept_is_given_back(void)
{
    join j;
    pool_init(&buffers, BYTES, 4);
    CHECK_EQ(join_init(&j, SEGMENTS, WORLD, WORLD), RC_OK);
    pool_buffer *shared = contribution(1, 0); /* a frame holds it too */
    CHECK(!join_keep(&j, 0, 1, pool_share(shared)));
    CHECK(!join_keep(&j, 2, 3, contribution(3, 2)));
    CHECK_EQ(buffers.taken, 2);
    join_destroy(&j, &buffers);
    CHECK_EQ(buffers.taken, 1);
    pool_return(&buffers, shared);
    CHECK_EQ(buffers.taken, 0);
    join_destroy(&j, &buffers); /* twice is once */
    pool_destroy(&buffers);
}

static void nothing_to_join(void)
{
    join j;
    CHECK_EQ(join_init(&j, 0, WORLD, WORLD), RC_OK);
    join_destroy(&j, NULL);
}

int main(void)
{
    static const check_test tests[] = {
        {"complete_with_the_last_one", complete_with_the_last_one},
        {"what_is_kept_is_given_back", what_is_kept_is_given_back},
        {"nothing_to_join", nothing_to_join},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
