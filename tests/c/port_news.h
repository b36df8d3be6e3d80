/* port_news.h - messages about network ports as the kernel sends them on a netlink socket. */
#ifndef RINGCOMM_TEST_PORT_NEWS_H
#define RINGCOMM_TEST_PORT_NEWS_H

#include <arpa/inet.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdint.h>

#include "check.h"

typedef struct news {
    _Alignas(struct nlmsghdr) uint8_t bytes[512];
    size_t length;
} news;

static inline void *add_message(news *n, int type, size_t body)
{
    struct nlmsghdr *m = (struct nlmsghdr *)(void *)(n->bytes + n->length);
    m->nlmsg_len = (uint32_t)NLMSG_LENGTH(body);
    m->nlmsg_type = (uint16_t)type;
    n->length += NLMSG_ALIGN(m->nlmsg_len);
    return NLMSG_DATA(m);
}

static inline void add_link(news *n, int type, int port, unsigned flags, int family)
{
    struct ifinfomsg *info = add_message(n, type, sizeof *info);
    info->ifi_family = (uint8_t)family;
    info->ifi_index = port;
    info->ifi_flags = flags;
}

static inline void add_address(news *n, int type, int port, const char *address)
{
    struct {
        struct ifaddrmsg info;
        struct rtattr kind;
        uint8_t bytes[4];
    } *m = add_message(n, type, sizeof *m);
    m->info.ifa_family = AF_INET;
    m->info.ifa_index = (uint32_t)port;
    m->kind = (struct rtattr){.rta_len = RTA_LENGTH(4), .rta_type = IFA_LOCAL};
    CHECK_EQ(inet_pton(AF_INET, address, m->bytes), 1);
}

#endif
