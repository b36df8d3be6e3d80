"""Bring-up: from a launcher's environment to connected, authenticated sockets.

For others:

    join                  what ringcomm.init, split and a torch process group call: arguments in,
                          mesh out
    mesh                  Mesh, the result; join(), which also membership calls for its rounds
    launch                rank, world size and meeting point of this process
    interfaces, secret    the network ports of this host; the job's secret
    system                typed_errors, for callers of all of these

For membership, whose control connections are made of the same parts, also acceptor, dialer,
handshake_params, loop, meeting, records, settings_exchange, sockets and join_failure.

Inside:

    rendezvous            how ranks exchange a few bytes (hub, hub_client, meeting: our own way)
    mesh                  all of it in order (settings_exchange, bringup, rails, lanes, commit,
                          probe, shared_memory, mesh_result)
    handshake             authentication of a connection (handshake_params, same_user)
    loop, acceptor,       non-blocking sockets under way (pending_connections)
    dialer
    records, strangers    messages to other ranks, to the log
    join_failure,         why the ranks could not be joined, or a port stays unused
    port_warnings

Standard library only; nothing of the C core and nothing above it is imported from here.
"""
