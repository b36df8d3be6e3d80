"""Bring-up: from a launcher's environment to connected, authenticated sockets.

    launch, launchers         rank, world size and meeting point of this process
    secret, terms, handshake  authentication of the ranks
    netlink, interfaces       the network ports of this host
    rendezvous                how ranks exchange a few bytes (hub, member, meeting: our own way)
    join                      what ringcomm.init calls: arguments in, mesh out
    mesh                      all of it in order (greeting, bringup, rails, lanes, commit, joined)
    loop, acceptor, dialer    non-blocking sockets under way
    blobs, report, strangers  messages to other ranks, to the user, to the log

Standard library only; nothing of the C core and nothing above it is imported from here.
"""
