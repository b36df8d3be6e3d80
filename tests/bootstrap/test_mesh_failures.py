"""Worlds that do not come up: every waiting rank raises, soon, with the same facts."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable

import pytest
from bringup_world import Outcome, identity, join_world, meshes, run_ranks
from patience import PROMPT

from ringcomm.bootstrap import bringup, interfaces, lanes, mesh
from ringcomm.bootstrap.dialer import Target
from ringcomm.bootstrap.interfaces import Interface
from ringcomm.bootstrap.join_failure import JoinError, Lost
from ringcomm.bootstrap.loop import Loop
from ringcomm.bootstrap.rails import Pairing
from ringcomm.bootstrap.rendezvous import Exchange, open_tcp
from ringcomm.bootstrap.secret import Secret
from ringcomm.config import Config
from ringcomm.errors import BootstrapError, ConfigError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")

Redirect = Callable[[bringup.Bringup, int, Pairing, Target], Target]


def redirect(monkeypatch: pytest.MonkeyPatch, change: Redirect) -> None:
    """Lets a dialling rank find something else at a peer's address."""
    honest = bringup.Bringup._target

    def target(self: bringup.Bringup, peer: int, pairing: Pairing) -> Target:
        return change(self, peer, pairing, honest(self, peer, pairing))

    monkeypatch.setattr(bringup.Bringup, "_target", target)


def texts(outcomes: dict[int, Outcome]) -> list[str]:
    """The tables of all ranks, without the seconds."""
    return [re.sub(r"\d+\.\d s", "", str(outcome.error)) for outcome in outcomes.values()]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (Config(lanes=2), "lanes differs between ranks: 1 on ranks 0-1, 2 on ranks 2-3"),
        (Config(heartbeat=15, peer_timeout=40), "peer_timeout differs between ranks: 10 on"),
        (Config(heartbeat=0.25), "heartbeat differs between ranks: 0.4 on ranks 0-1, 0.25 on"),
    ],
    ids=["lanes", "peer_timeout", "heartbeat"],
)
def test_settings_that_differ(port: int, other: Config, text: str) -> None:
    outcomes = join_world(4, port, configs={2: other, 3: other})
    for outcome in outcomes.values():
        assert isinstance(outcome.error, ConfigError)
        assert text in str(outcome.error)
        assert outcome.seconds < PROMPT


def test_versions_that_differ(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", "1.1"])
    monkeypatch.setattr(mesh, "_version", lambda: next(versions))
    for outcome in join_world(2, port).values():
        assert isinstance(outcome.error, ConfigError)
        assert "the version of ringcomm differs" in str(outcome.error)


def test_a_port_that_others_can_reach_needs_a_secret(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    listened: list[str] = []
    monkeypatch.setattr(bringup, "listen", listened.append)
    outside = [i for i in interfaces.list_interfaces() if i.up and i.usable and not i.loopback]
    if not outside:
        pytest.skip("this host has a loopback only")
    for outcome in join_world(2, port, interfaces=(outside[0].name,)).values():
        assert isinstance(outcome.error, ConfigError)
        assert "python -m ringcomm keygen FILE" in str(outcome.error)
    assert listened == []


def on_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ranks believe that each is on a host of its own."""
    keys = iter(f"host {number}" for number in range(100))
    monkeypatch.setattr(mesh, "host_key", lambda: next(keys))


def test_two_hosts_need_a_secret(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on_two_hosts(monkeypatch)
    fake = dataclasses.replace(loopback(), loopback=False, name="eth0")
    fake = dataclasses.replace(fake, addresses=(next(interfaces.netlink.addresses()).address,))
    monkeypatch.setattr(bringup, "choose", lambda *_: [fake])
    monkeypatch.setattr(Interface, "usable", property(lambda self: (not_ours(),)))
    for outcome in join_world(2, port).values():
        assert isinstance(outcome.error, ConfigError)
        assert "203.0.113.9" in str(outcome.error)
        assert "python -m ringcomm keygen FILE" in str(outcome.error)


def not_ours() -> interfaces.Address:
    return interfaces.ipaddress.IPv4Interface("203.0.113.9/24")


def loopback() -> Interface:
    return next(i for i in interfaces.list_interfaces() if i.loopback)


def test_the_loopback_does_not_reach_another_host(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_two_hosts(monkeypatch)
    secrets = dict.fromkeys(range(2), Secret(b"k" * 32))
    for outcome in join_world(2, port, secrets=secrets, interfaces=("lo",)).values():
        assert isinstance(outcome.error, ConfigError)
        assert "interface lo is the loopback" in str(outcome.error)


def test_dead_rail_beside_a_good_one(
    port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lanes, "RAIL_GRACE", 0.3)

    def change(_self: bringup.Bringup, _peer: int, pairing: Pairing, honest: Target) -> Target:
        return dataclasses.replace(honest, port=1) if pairing.rail == 1 else honest

    redirect(monkeypatch, change)
    caplog.set_level(logging.WARNING, "ringcomm")
    outcomes = join_world(3, port, lanes=2, interfaces=("lo", "lo"), recovery="off")
    for made in meshes(outcomes):
        assert sorted((lane.peer, lane.rail) for lane in made.lanes) == sorted(
            [(peer, 0) for peer in range(3) if peer != made.rank] * 2
        )
        assert [rail.index for rail in made.rails] == [0]
        made.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 6  # both ends of each pair
    assert any(
        "rail 1 (lo) does not reach rank 0" in text and "refused at 127.0.0.1:1" in text
        for text in warnings
    )


def test_rail_that_is_dead_between_two_ranks_only(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "RAIL_GRACE", 0.3)

    def change(self: bringup.Bringup, peer: int, pairing: Pairing, honest: Target) -> Target:
        dead = (self._rank, peer, pairing.rail) == (2, 1, 0)
        return dataclasses.replace(honest, port=1) if dead else honest

    redirect(monkeypatch, change)
    found = meshes(join_world(3, port, interfaces=("lo", "lo"), recovery="off"))
    assert [(lane.peer, lane.rail) for lane in found[0].lanes] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [(lane.peer, lane.rail) for lane in found[1].lanes] == [(0, 0), (0, 1), (2, 1)]
    assert [(lane.peer, lane.rail) for lane in found[2].lanes] == [(0, 0), (0, 1), (1, 1)]
    for made in found:
        made.close()


def test_pair_that_cannot_connect(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(self: bringup.Bringup, peer: int, _pairing: Pairing, honest: Target) -> Target:
        return dataclasses.replace(honest, port=1) if (self._rank, peer) == (2, 1) else honest

    redirect(monkeypatch, change)
    outcomes = join_world(3, port, connect_timeout=1.2, interfaces=("lo", "lo"))
    assert len(set(texts(outcomes))) == 1
    for outcome in outcomes.values():
        assert isinstance(outcome.error, JoinError)
        assert {(r.rank, r.seen_from, r.rail, r.state) for r in outcome.error.rows} == {
            (1, 2, 0, "refused"),
            (1, 2, 1, "refused"),
        }
        assert "127.0.0.1:1 " in str(outcome.error)
        assert outcome.seconds < 1.2 + PROMPT


def test_addresses_that_were_tampered_with(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is sent to another peer's listener finds out from the handshake."""

    def change(self: bringup.Bringup, peer: int, _pairing: Pairing, honest: Target) -> Target:
        ports = {(2, 1): self._ports[0][0].endpoints[0].port, (3, 0): 1}
        return dataclasses.replace(honest, port=ports.get((self._rank, peer), honest.port))

    redirect(monkeypatch, change)
    outcomes = join_world(4, port, connect_timeout=1.2)
    for outcome in outcomes.values():
        assert isinstance(outcome.error, JoinError)
        rows = {(row.rank, row.seen_from): row for row in outcome.error.rows}
        assert {pair: row.state for pair, row in rows.items()} == {
            (0, 3): "refused",
            (1, 2): "unexpected peer",
        }
        assert "the rank at this address is 0 there and 1 here" in rows[1, 2].detail


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"host":1}',
        b'{"host":"a","host":"b"}',
        b'{"host":"a","host_key":"b","machine_key":"m","session":"c","settings":NaN}',
        b'{"host":"a\\u0007","host_key":"b","machine_key":"m","session":"c","settings":{}}',
        b"[" * 60000,
        b'{"error":7}',
        b'{"host":"'
        + b"a" * 5000
        + b'","host_key":"b","machine_key":"m","session":"c","settings":{}}',
    ],
)
def test_malformed_blobs(blob: bytes, port: int) -> None:
    """From a rank that holds the key: an error that names it, on every rank."""

    class Liar:
        def __init__(self, exchange: Exchange) -> None:
            self._exchange = exchange

        def allgather(self, _blob: bytes, deadline: float) -> list[bytes]:
            return self._exchange.allgather(blob, deadline)

        def alarm(self, loop: Loop, ring: Callable[[], None], lost: Lost) -> None:
            self._exchange.alarm(loop, ring, lost)

        def close(self) -> None:
            self._exchange.close()

    def call(rank: int) -> None:
        config = Config(connect_timeout=30.0)
        me = identity(rank, 2, port)
        exchange = open_tcp(me, config, None, lanes.time.monotonic() + 30)
        mesh.join(me, config, None, Liar(exchange) if rank else exchange).close()

    for outcome in run_ranks(call, range(2)).values():
        assert isinstance(outcome.error, BootstrapError)
        assert "rank 1" in str(outcome.error)
        assert outcome.seconds < PROMPT
