/* test_ports.c - what is made of the kernel's messages about ports, whole and damaged. */
#include "../../csrc/net/ports.h"

#include <stdlib.h>
#include <string.h>

#include "port_news.h"

typedef struct heard {
    port_watch watch; /* first */
    int links, addresses, port, there, length;
    port_state state;
    uint8_t bytes[16];
} heard;

static void hear_link(port_watch *w, int port, port_state state)
{
    heard *h = (heard *)w;
    h->links++;
    h->port = port;
    h->state = state;
}

static void hear_address(port_watch *w, int port, const uint8_t *bytes, int length, int there)
{
    heard *h = (heard *)w;
    h->addresses++;
    h->port = port;
    h->there = there;
    h->length = length;
    memcpy(h->bytes, bytes, (size_t)length);
}

static heard parse(const void *data, size_t length)
{
    heard h = {.watch = {.link = hear_link, .address = hear_address}};
    ports_parse(&h.watch, data, length);
    return h;
}

static void links_have_states(void)
{
    static const struct {
        int type;
        unsigned flags;
        port_state state;
    } cases[] = {{RTM_NEWLINK, IFF_UP | IFF_RUNNING, PORT_RUNS},
                 {RTM_NEWLINK, IFF_UP, PORT_NO_CARRIER},
                 {RTM_NEWLINK, 0, PORT_DOWN},
                 {RTM_DELLINK, IFF_UP | IFF_RUNNING, PORT_GONE}};
    for (size_t i = 0; i < CHECK_COUNT(cases); i++) {
        news n = {.length = 0};
        add_link(&n, cases[i].type, 7, cases[i].flags, AF_UNSPEC);
        heard h = parse(n.bytes, n.length);
        CHECK_EQ(h.links, 1);
        CHECK_EQ(h.port, 7);
        CHECK_EQ(h.state, cases[i].state);
    }
    news bridge = {.length = 0};
    add_link(&bridge, RTM_DELLINK, 7, 0, AF_BRIDGE); /* it left a bridge, and is not gone */
    CHECK_EQ(parse(bridge.bytes, bridge.length).links, 0);
}

static void addresses_come_and_go(void)
{
    static const uint8_t address[4] = {10, 8, 0, 1};
    for (int there = 0; there < 2; there++) {
        news n = {.length = 0};
        add_address(&n, there ? RTM_NEWADDR : RTM_DELADDR, 3, "10.8.0.1");
        heard h = parse(n.bytes, n.length);
        CHECK_EQ(h.addresses, 1);
        CHECK_EQ(h.port, 3);
        CHECK_EQ(h.there, there);
        CHECK_EQ(h.length, 4);
        CHECK(memcmp(h.bytes, address, 4) == 0);
    }
}

static void several_messages_in_one_datagram(void)
{
    news n = {.length = 0};
    add_link(&n, RTM_NEWLINK, 1, IFF_UP, AF_UNSPEC);
    add_message(&n, NLMSG_DONE, 0);
    add_address(&n, RTM_DELADDR, 2, "10.8.0.1");
    add_link(&n, RTM_NEWLINK, 4, 0, AF_UNSPEC);
    heard h = parse(n.bytes, n.length);
    CHECK_EQ(h.links, 2);
    CHECK_EQ(h.addresses, 1);
    CHECK_EQ(h.port, 4);
}

/* In memory of its own size, where a sanitizer sees the end of it. */
static void parse_copy(const news *n, size_t length)
{
    uint8_t *copy = malloc(length);
    memcpy(copy, n->bytes, length);
    parse(copy, length);
    free(copy);
}

static void damaged_messages_are_skipped(void)
{
    uint32_t random = 1;
    for (int round = 0; round < 20000; round++) {
        news n = {.length = 0};
        add_link(&n, round % 2 ? RTM_NEWLINK : RTM_DELLINK, 1, 0, AF_UNSPEC);
        add_address(&n, RTM_NEWADDR, 1, "127.0.0.1");
        for (int i = 0; i < 3; i++) {
            random = random * 1664525 + 1013904223;
            n.bytes[random % n.length] = (uint8_t)(random >> 24);
        }
        parse_copy(&n, n.length - random % 8);
    }
    news whole = {.length = 0};
    add_address(&whole, RTM_NEWADDR, 1, "127.0.0.1");
    for (size_t length = 1; length < whole.length; length++)
        parse_copy(&whole, length);
}

int main(void)
{
    static const check_test tests[] = {
        {"links_have_states", links_have_states},
        {"addresses_come_and_go", addresses_come_and_go},
        {"several_messages_in_one_datagram", several_messages_in_one_datagram},
        {"damaged_messages_are_skipped", damaged_messages_are_skipped},
    };
    return check_run(tests, CHECK_COUNT(tests));
}
