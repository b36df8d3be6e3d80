/* ports.c - see ports.h. */
#include "ports.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include "../base/error.h"

enum { DATAGRAM_BYTES = 32 << 10, DATAGRAMS_A_TURN = 16 };

static void parse_link(port_watch *w, const struct nlmsghdr *message)
{
    struct ifinfomsg info;
    if (message->nlmsg_len < NLMSG_LENGTH(sizeof info))
        return;
    memcpy(&info, NLMSG_DATA(message), sizeof info);
    if (info.ifi_family != AF_UNSPEC) /* a bridge reports its ports by the same messages */
        return;
    if (message->nlmsg_type == RTM_DELLINK)
        w->link(w, info.ifi_index, PORT_GONE);
    else if (!(info.ifi_flags & IFF_UP))
        w->link(w, info.ifi_index, PORT_DOWN);
    else
        w->link(w, info.ifi_index, info.ifi_flags & IFF_RUNNING ? PORT_RUNS : PORT_NO_CARRIER);
}

/* Reports an address that came or went. On a point-to-point link IFA_ADDRESS is the far end,
 * IFA_LOCAL this one. */
static void parse_address(port_watch *w, const struct nlmsghdr *message)
{
    struct ifaddrmsg info;
    const uint8_t *found = NULL;
    if (message->nlmsg_len < NLMSG_LENGTH(sizeof info))
        return;
    memcpy(&info, NLMSG_DATA(message), sizeof info);
    uint32_t length = info.ifa_family == AF_INET ? 4 : info.ifa_family == AF_INET6 ? 16 : 0;
    const uint8_t *at = (const uint8_t *)message + NLMSG_LENGTH(NLMSG_ALIGN(sizeof info));
    const uint8_t *end = (const uint8_t *)message + message->nlmsg_len;
    struct rtattr attribute;
    while (length > 0 && end - at >= (ptrdiff_t)sizeof attribute) {
        memcpy(&attribute, at, sizeof attribute);
        if (attribute.rta_len < sizeof attribute || attribute.rta_len > end - at)
            break;
        int is_local = attribute.rta_type == IFA_LOCAL;
        if (attribute.rta_len == RTA_LENGTH(length) &&
            (is_local || (attribute.rta_type == IFA_ADDRESS && found == NULL)))
            found = at + RTA_LENGTH(0);
        ptrdiff_t step = RTA_ALIGN(attribute.rta_len);
        at = step < end - at ? at + step : end;
    }
    if (found != NULL)
        w->address(w, (int)info.ifa_index, found, (int)length, message->nlmsg_type == RTM_NEWADDR);
}

void ports_parse(port_watch *w, const void *data, size_t length)
{
    const uint8_t *at = data, *end = at + length;
    while (end - at >= (ptrdiff_t)sizeof(struct nlmsghdr)) {
        const struct nlmsghdr *message = (const struct nlmsghdr *)(const void *)at;
        if (message->nlmsg_len < sizeof *message || message->nlmsg_len > (size_t)(end - at))
            return;
        if (message->nlmsg_type == RTM_NEWLINK || message->nlmsg_type == RTM_DELLINK)
            parse_link(w, message);
        else if (message->nlmsg_type == RTM_NEWADDR || message->nlmsg_type == RTM_DELADDR)
            parse_address(w, message);
        ptrdiff_t step = NLMSG_ALIGN(message->nlmsg_len);
        at = step < end - at ? at + step : end;
    }
}

static void read_port_messages(engine_source *source, uint32_t events)
{
    port_watch *w = (port_watch *)source;
    _Alignas(struct nlmsghdr) uint8_t data[DATAGRAM_BYTES];
    (void)events;
    for (int i = 0; i < DATAGRAMS_A_TURN && source->fd >= 0; i++) {
        ssize_t got = recv(source->fd, data, sizeof data, MSG_DONTWAIT);
        if (got > 0 && !w->stale)
            ports_parse(w, data, (size_t)got);
        else if (got < 0 && errno == ENOBUFS) /* the kernel has dropped messages */
            w->stale = 1;
        else if (got < 0 && errno == EAGAIN) { /* all that came are read */
            if (w->stale)
                w->forget(w);
            w->stale = 0;
            return;
        } else if (got == 0 || (got < 0 && errno != EINTR))
            engine_remove(w->engine, source);
    }
}

rc_result ports_open(port_watch *w, rc_engine *e)
{
    rc_error why;
    error_clear(&why);
    w->engine = e;
    w->source.ready = read_port_messages;
    w->source.quiet = 1;
    fcntl(w->source.fd, F_SETFD, FD_CLOEXEC);
    return engine_add(e, &w->source, EPOLLIN, &why);
}
