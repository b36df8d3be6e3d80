/* test_tags.c - counts by tag: each tag has its own, whatever order they come in and however many
 * there are. The address sanitizer's leak check is part of this test. */
#include "../../csrc/net/tags.h"
#include "check.h"

enum { MANY = 50000 };

/* Spread over all 32 bits, and no two alike: the factor is odd. */
static uint32_t tag_of(uint32_t i)
{
    return i * 2654435761u;
}

static void names_hold_tag_and_number(void)
{
    static const uint32_t values[] = {0, 1, 77, UINT32_MAX};
    for (size_t i = 0; i < CHECK_COUNT(values); i++)
        for (size_t k = 0; k < CHECK_COUNT(values); k++) {
            uint64_t name = tags_name(values[i], values[k]);
            CHECK_EQ(tags_tag(name), values[i]);
            CHECK_EQ(tags_number(name), values[k]);
        }
}

static void nothing_is_there_before_it_is_asked_for(void)
{
    tag_table t = {0};
    CHECK(tags_find(&t, 0) == NULL);
    tag_count *zero = tags_get(&t, 0);
    CHECK(zero != NULL && zero->sends == 0 && zero->receives == 0);
    CHECK(tags_find(&t, 0) != NULL);
    CHECK(tags_find(&t, 1) == NULL);
    tags_destroy(&t);
}

static void each_tag_has_its_counts(void)
{
    tag_table t = {0};
    for (uint32_t i = 0; i < MANY; i++) {
        tag_count *entry = tags_get(&t, tag_of(i));
        CHECK(entry != NULL);
        entry->sends = i;
        entry->receives = ~i;
    }
    CHECK_EQ(t.count, MANY);
    int kept = 0;
    for (uint32_t i = 0; i < MANY; i++) {
        const tag_count *entry = tags_find(&t, tag_of(i));
        kept += entry != NULL && entry == tags_get(&t, tag_of(i)) && entry->tag == tag_of(i) &&
                entry->sends == i && entry->receives == ~i;
    }
    CHECK_EQ(kept, MANY);
    CHECK(tags_find(&t, tag_of(MANY)) == NULL);
    CHECK_EQ(t.count, MANY);
    tags_destroy(&t);
}

static void a_peers_have_an_end(void)
{
    tag_table t = {0};
    uint32_t made = 0;
    while (made <= TAGS_MOST && tags_get_told(&t, tag_of(made)) != NULL)
        made++;
    CHECK_EQ(made, TAGS_MOST);
    CHECK(tags_get_told(&t, tag_of(7)) != NULL); /* those that are there stay */
    CHECK(tags_get(&t, tag_of(made)) != NULL);   /* this rank's own have no end */
    tags_destroy(&t);
}

int main(void)
{
    static const check_test tests[] = {
        {"names_hold_tag_and_number", names_hold_tag_and_number},
        {"nothing_is_there_before_it_is_asked_for", nothing_is_there_before_it_is_asked_for},
        {"each_tag_has_its_counts", each_tag_has_its_counts},
        {"a_peers_have_an_end", a_peers_have_an_end},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
