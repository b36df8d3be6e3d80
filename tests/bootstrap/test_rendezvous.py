"""The exchange over our own hub, and who may take part in it."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from bringup_world import Outcome, identity, run_ranks
from patience import PATIENCE, PROMPT, until

from ringcomm.bootstrap import hub, hub_client, meeting, rendezvous
from ringcomm.bootstrap.handshake import Server
from ringcomm.bootstrap.handshake_params import Key, Role, Terms, job_hash
from ringcomm.bootstrap.hub import HEADER
from ringcomm.bootstrap.join_failure import JoinError
from ringcomm.bootstrap.launch import Identity
from ringcomm.bootstrap.records import MAX_BYTES
from ringcomm.bootstrap.rendezvous import open_tcp
from ringcomm.bootstrap.secret import Secret
from ringcomm.bootstrap.sockets import peer_of, place
from ringcomm.config import Config
from ringcomm.errors import AuthenticationError, BootstrapError, ConfigError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

SECRET = Secret(b"k" * 32)


def rounds(exchange: rendezvous.Exchange, rank: int, count: int, patience: float) -> list[bytes]:
    """All blobs of count rounds, each rank's of another length."""
    everything: list[bytes] = []
    for number in range(count):
        blob = f"{rank}.{number}".encode() * (1 + 1000 * rank)
        everything += exchange.allgather(blob, time.monotonic() + patience)
    return everything


def expected(world_size: int, count: int) -> list[bytes]:
    return [f"{r}.{n}".encode() * (1 + 1000 * r) for n in range(count) for r in range(world_size)]


def over_tcp(
    world_size: int,
    port: int,
    *,
    ranks: list[int] | None = None,
    patience: float = 30.0,
    late: dict[int, float] | None = None,
    who: Callable[[int], Identity] | None = None,
    secrets: dict[int, Secret] | None = None,
    count: int = 3,
) -> dict[int, Outcome]:
    def call(rank: int) -> list[bytes]:
        time.sleep((late or {}).get(rank, 0.0))
        me = who(rank) if who else identity(rank, world_size, port)
        deadline = time.monotonic() + patience
        secret = (secrets or {}).get(rank, SECRET)
        exchange = open_tcp(me, Config(), secret, deadline)
        try:
            return rounds(exchange, rank, count, patience)
        finally:
            exchange.close()

    return run_ranks(call, ranks if ranks is not None else range(world_size))


def rows(outcome: Outcome) -> list[tuple[int, str]]:
    assert isinstance(outcome.error, JoinError), outcome
    return [(row.rank, row.state) for row in outcome.error.rows]


# -- our own hub --


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_hub(world_size: int, port: int) -> None:
    for outcome in over_tcp(world_size, port).values():
        assert outcome.error is None
        assert outcome.value == expected(world_size, 3)


def test_rank_0_comes_last(port: int) -> None:
    outcomes = over_tcp(3, port, late={0: 0.2})
    assert all(o.value == expected(3, 3) for o in outcomes.values())


def test_again_on_the_same_port(port: int) -> None:
    for _ in range(5):
        assert all(o.error is None for o in over_tcp(3, port).values())


def test_largest_blob(port: int) -> None:
    def call(rank: int) -> bool:
        deadline = time.monotonic() + 30
        exchange = open_tcp(identity(rank, 3, port), Config(), None, deadline)
        try:
            return exchange.allgather(b"x" * MAX_BYTES, deadline) == [b"x" * MAX_BYTES] * 3
        finally:
            exchange.close()

    assert all(outcome.value for outcome in run_ranks(call, range(3)).values())


def test_rank_0_stays_until_its_last_word_is_taken(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = hub.tune

    def tune(sock: socket.socket) -> None:
        honest(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # takes a part of it at a time

    monkeypatch.setattr(hub, "tune", tune)
    monkeypatch.setattr(hub, "_FLUSH_PATIENCE", 0.0)
    test_largest_blob(port)


def test_missing_rank_is_named_to_all(port: int) -> None:
    outcomes = over_tcp(4, port, ranks=[0, 1, 3], patience=0.7)
    for outcome in outcomes.values():
        assert rows(outcome) == [(2, "never came to the rendezvous")]
        assert f"only 3 of 4 ranks met at 127.0.0.1:{port} within" in str(outcome.error)
        assert outcome.error.rank == 2  # type: ignore[union-attr]
        assert 0.6 < outcome.seconds < 0.7 + PROMPT


def test_the_earliest_deadline_counts(port: int) -> None:
    def call(rank: int) -> list[bytes]:
        deadline = time.monotonic() + (0.5 if rank == 1 else 30.0)
        exchange = open_tcp(identity(rank, 3, port), Config(), None, deadline)
        try:
            return exchange.allgather(b"x", deadline)
        finally:
            exchange.close()

    for outcome in run_ranks(call, [0, 1]).values():
        assert rows(outcome) == [(2, "never came to the rendezvous")]
        assert outcome.seconds < 0.5 + PROMPT


def test_rank_0_missing(port: int) -> None:
    outcomes = over_tcp(3, port, ranks=[1, 2], patience=0.5)
    for outcome in outcomes.values():
        assert rows(outcome) == [(0, "refused")]
        assert f"127.0.0.1:{port}" in str(outcome.error)
        assert outcome.seconds < 0.5 + PROMPT


def test_wrong_secret_is_in_every_table(port: int) -> None:
    other = Secret(b"q" * 32)
    outcomes = over_tcp(3, port, patience=0.7, secrets={2: other})
    for rank in (0, 1):
        assert rows(outcomes[rank]) == [(2, "authentication failed")]
    assert rows(outcomes[2]) == [(0, "authentication failed")]
    for outcome in outcomes.values():
        assert isinstance(outcome.error, AuthenticationError)
        assert SECRET.key_id.hex() in str(outcome.error)
        assert other.key_id.hex() in str(outcome.error)


def test_wrong_secret_where_several_ports_are_tried(port: int) -> None:
    """That nobody listens at the other ports does not hide what is wrong."""

    def who(rank: int) -> Identity:
        ports = tuple(range(port, port + 3))
        return dataclasses.replace(identity(rank, 2, port), master_ports=ports)

    outcomes = over_tcp(2, port, patience=0.7, who=who, secrets={1: Secret(b"q" * 32)})
    assert (0, "authentication failed") in rows(outcomes[1])
    for outcome in outcomes.values():
        assert isinstance(outcome.error, AuthenticationError)


def test_other_job(port: int) -> None:
    outcomes = over_tcp(
        2, port, patience=0.7, who=lambda rank: identity(rank, 2, port, job=f"job {rank}")
    )
    assert rows(outcomes[0]) == [(1, "other job")]
    assert rows(outcomes[1]) == [(0, "other job")]


def test_two_processes_claim_one_rank(port: int) -> None:
    me = {0: 0, 1: 1, 2: 1}
    outcomes = over_tcp(3, port, patience=0.7, who=lambda r: identity(me[r], 3, port))
    refused = [o for r, o in outcomes.items() if r and rows(o) == [(0, "duplicate")]]
    assert len(refused) == 1
    assert "already rank 1" in str(refused[0].error)
    assert refused[0].seconds < min(o.seconds for o in outcomes.values() if o is not refused[0])


@pytest.mark.parametrize("candidates", [1, 2])
def test_two_processes_claim_rank_0(port: int, candidates: int) -> None:
    """Whether the second finds another port, or none: both are told, and it at once."""
    ports = tuple(range(port, port + candidates))
    zero = Identity(0, 2, None, None, "127.0.0.1", ports, "env", "job")
    outcomes = over_tcp(2, port, patience=5.0, who=lambda _: zero)
    second, first = sorted(outcomes.values(), key=lambda outcome: outcome.seconds)
    assert second.seconds < 5.0  # a busy machine may stand still for seconds
    assert isinstance(second.error, BootstrapError)
    assert "two processes of this job say that they are rank 0" in str(second.error)
    assert rows(first) == [(0, "duplicate"), (1, "never came to the rendezvous")]
    assert "another process of this job says that it is rank 0" in str(first.error)


def test_rank_0_of_another_job_is_no_rival(port: int) -> None:
    """It has the first of the ports that both would take."""

    def who(rank: int) -> Identity:
        ports, job = (port, port + 1), "other" if rank == 2 else "job"
        return Identity(rank % 2, 2, None, None, "127.0.0.1", ports, "env", job)

    waiting = {"who": lambda _: who(2), "patience": 2.0}
    other = threading.Thread(target=over_tcp, args=(1, port), kwargs=waiting)
    other.start()
    assert until(lambda: _listens(port))
    outcomes = over_tcp(2, port, who=who)
    assert all(outcome.value == expected(2, 3) for outcome in outcomes.values())
    other.join()


def _listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_member_that_resets_behind_its_proof(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 names it, and says nothing of its secret."""

    def tune(sock: socket.socket) -> None:
        assert until(lambda: peer_of(sock) == "a connection that has ended")

    monkeypatch.setattr(hub, "tune", tune)

    def call(rank: int) -> None:
        deadline = time.monotonic() + PATIENCE
        if rank == 0:
            exchange = open_tcp(identity(0, 2, port), Config(), SECRET, deadline)
            try:
                exchange.allgather(b"x", deadline)
            finally:
                exchange.close()
        else:
            made = open_tcp(identity(1, 2, port), Config(), SECRET, deadline)
            assert isinstance(made, hub_client.Member)
            made._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            made.close()

    outcomes = run_ranks(call, range(2))
    error = outcomes[0].error
    assert isinstance(error, BootstrapError)
    assert error.rank == 1
    assert "authentication" not in str(error)
    assert outcomes[1].error is None


def test_hub_that_closes_behind_a_proof() -> None:
    """What it meant is not known: it may have died."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def serve() -> None:
        listener.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock:
                    job = job_hash("test")
                    server = Server(Key.derive(None, job), Terms(Role.RENDEZVOUS, job, 2, -1, 0))
                    while server.want != 32:
                        sock.sendall(server.feed(sock.recv(server.want, socket.MSG_WAITALL)))
                    sock.recv(32, socket.MSG_WAITALL)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with pytest.raises(BootstrapError) as raised:
            open_tcp(identity(1, 2, port), Config(), None, time.monotonic() + 0.7)
        assert "authentication" not in str(raised.value)
        assert "closed" in str(raised.value)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def test_exact_port_in_use(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is silent when it is asked whether it is rank 0, and does not go."""
    monkeypatch.setattr(meeting, "_IN_USE_PATIENCE", 0.2)
    monkeypatch.setattr(hub, "_RIVAL_PATIENCE", 0.2)
    in_use = pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use")
    with socket.create_server(("127.0.0.1", port)), in_use:
        open_tcp(identity(0, 2, port), Config(), None, time.monotonic() + 5)


def test_candidate_ports_step_over_taken_ones(port: int) -> None:
    """The first candidate belongs to a service that accepts and stays silent."""

    def who(rank: int) -> Identity:
        return Identity(rank, 3, None, None, "localhost", (port, port + 1), "env", "job")

    with socket.create_server(("127.0.0.1", port)):
        outcomes = over_tcp(3, port, who=who)
    for outcome in outcomes.values():
        assert outcome.value == expected(3, 3)
        assert outcome.seconds < PROMPT


def test_two_jobs_with_the_same_candidates(port: int) -> None:
    def who(job: str) -> Callable[[int], Identity]:
        ports = tuple(range(port, port + 4))
        return lambda rank: Identity(rank, 3, None, None, "127.0.0.1", ports, "mpirun", job)

    found: dict[str, dict[int, Outcome]] = {}
    threads = [
        threading.Thread(target=lambda j=job: found.update({j: over_tcp(3, port, who=who(j))}))
        for job in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(o.value == expected(3, 3) for job in "ab" for o in found[job].values())


def test_address_of_another_host(port: int) -> None:
    elsewhere = Identity(0, 2, None, None, "203.0.113.7", (port,), "env", "job")
    with pytest.raises(ConfigError, match="no address of this host"):
        open_tcp(elsewhere, Config(insecure=True), None, time.monotonic() + 5)


def test_no_secret_off_loopback(port: int) -> None:
    for rank in (0, 1):
        elsewhere = Identity(rank, 2, None, None, "203.0.113.7", (port,), "env", "job")
        with pytest.raises(ConfigError, match="python -m ringcomm keygen"):
            open_tcp(elsewhere, Config(), None, time.monotonic() + 5)


def test_a_link_local_address_keeps_its_interface() -> None:
    index, name = socket.if_nameindex()[0]
    address = f"fe80::1%{name}"
    assert meeting.resolve(address) == [address]
    assert place(address, 5) == ("fe80::1", 5, 0, index)


def test_name_that_does_not_resolve(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(hub_client, "_RESOLVE_PAUSE", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    unknown = Identity(0, 2, None, None, "node0", (port,), "env", "job")
    with pytest.raises(ConfigError, match=r"host, node0, cannot be resolved .*set MASTER_ADDR"):
        open_tcp(unknown, Config(), SECRET, time.monotonic() + 5)
    unknown = Identity(1, 2, None, None, "node0", (port,), "env", "job")
    with pytest.raises(JoinError, match="cannot be resolved"):
        open_tcp(unknown, Config(), SECRET, time.monotonic() + 0.3)


@pytest.mark.parametrize(
    "message",
    [
        HEADER.pack(9, 1, 1000, 0),
        HEADER.pack(1, 2, 1000, 0),
        HEADER.pack(1, 1, 1000, MAX_BYTES + 1),
        HEADER.pack(1, 1, 1000, 2**32 - 1) + b"x" * 100000,
        b"\xff" * 200000,
    ],
)
def test_hub_survives_a_broken_member(message: bytes, port: int) -> None:
    """One that holds the key, even."""

    def call(rank: int) -> Any:
        deadline = time.monotonic() + 30
        exchange = open_tcp(identity(rank, 2, port), Config(), None, deadline)
        try:
            if rank == 1:
                exchange._sock.sendall(message)  # type: ignore[attr-defined]
                time.sleep(0.05)
                return None
            return exchange.allgather(b"x", deadline)
        except ConnectionError as error:
            if rank == 1 and not isinstance(error, BootstrapError):
                return None  # the hub closed while we still sent
            raise
        finally:
            exchange.close()

    outcome = run_ranks(call, range(2))[0]
    assert [row[0] for row in rows(outcome)] == [1]
    assert outcome.seconds < PROMPT


@pytest.mark.parametrize(
    "answer",
    [
        HEADER.pack(2, 1, 0, 2**32 - 1),
        HEADER.pack(2, 7, 0, 0),
        HEADER.pack(5, 1, 0, 0),
        HEADER.pack(2, 1, 0, 8) + struct.pack("<II", 2**31, 0),
        HEADER.pack(2, 1, 0, 9) + struct.pack("<IIB", 0, 0, 0),
        HEADER.pack(3, 1, 0, 2) + b"{}",
        HEADER.pack(3, 1, 0, 4) + b"\xff" * 4,
    ],
)
def test_member_survives_a_broken_hub(answer: bytes) -> None:
    hub_end, member_end = socket.socketpair()
    server = socket.create_server(("127.0.0.1", 0))
    hub_end.close()
    member_end.close()
    member_end = socket.create_connection(server.getsockname())
    hub_end, _ = server.accept()
    with server, hub_end:
        exchange = hub_client.Member(identity(1, 2, 4000), member_end)
        hub_end.sendall(answer)
        with pytest.raises(BootstrapError):
            exchange.allgather(b"x", time.monotonic() + 2)
        exchange.close()
