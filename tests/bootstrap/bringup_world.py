"""A world of ranks as threads, each joining the others as a process would."""

from __future__ import annotations

import dataclasses
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from patience import PATIENCE

from ringcomm.bootstrap import mesh
from ringcomm.bootstrap.handshake import Client, Server, Talk
from ringcomm.bootstrap.handshake_params import Outcome as Result
from ringcomm.bootstrap.handshake_params import RefusedError
from ringcomm.bootstrap.launch import Identity
from ringcomm.bootstrap.secret import Secret
from ringcomm.config import Config


def identity(rank: int, world_size: int, port: int, job: str = "test") -> Identity:
    """A rank whose rendezvous is on exactly this loopback port."""
    return Identity(rank, world_size, None, None, "127.0.0.1", (port,), "explicit", job)


def run(sock: socket.socket, machine: Client | Server, deadline: float) -> None:
    """Drives one end of a handshake over a connected socket until it is done. Raises
    RefusedError."""
    sock.setblocking(False)
    talk = Talk(sock, machine)
    if isinstance(machine, Client):
        talk.send(machine.first())
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    while machine.want:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(1000 * left):
            raise RefusedError("no answer in time", outcome=Result.TIMEOUT)
        talk.go_on()
    if isinstance(machine, Server) and machine.refusal is not None:
        raise machine.refusal


@dataclasses.dataclass
class Outcome:
    """What one rank's call returned or raised, and how long after the ranks' common start."""

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


def run_ranks(call: Callable[[int], Any], ranks: Sequence[int]) -> dict[int, Outcome]:
    """Runs call(rank) in a thread per rank. All are timed from before the first thread starts: a
    world ends with the limit of its earliest rank, and a busy machine may start others late."""
    outcomes = {rank: Outcome() for rank in ranks}
    began = time.monotonic()

    def body(rank: int) -> None:
        try:
            outcomes[rank].value = call(rank)
        except Exception as error:
            outcomes[rank].error = error
        outcomes[rank].seconds = time.monotonic() - began

    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a rank hangs"
    return outcomes


def join_world(
    world_size: int,
    port: int,
    *,
    ranks: Sequence[int] | None = None,
    secrets: dict[int, Secret | None] | None = None,
    configs: dict[int, Config] | None = None,
    late: dict[int, float] | None = None,
    **settings: Any,
) -> dict[int, Outcome]:
    """Joins the given ranks (all, if None) of a world; settings make their Config. late: seconds
    by which a rank comes later."""
    settings.setdefault("connect_timeout", 30.0)
    config = Config(**settings)

    def call(rank: int) -> mesh.Mesh:
        time.sleep((late or {}).get(rank, 0.0))
        return mesh.join(
            identity(rank, world_size, port),
            (configs or {}).get(rank, config),
            (secrets or {}).get(rank),
        )

    return run_ranks(call, range(world_size) if ranks is None else ranks)


def meshes(outcomes: dict[int, Outcome]) -> list[mesh.Mesh]:
    """The meshes of a world in which every rank succeeded."""
    for outcome in outcomes.values():
        if outcome.error is not None:
            raise outcome.error
    return [outcomes[rank].value for rank in sorted(outcomes)]
