"""Which port goes with which: a pure function, by cases."""

from __future__ import annotations

import ipaddress

import pytest

from ringcomm.bootstrap.rails import Endpoint, Pairing, Port, meet, number, pair_all
from ringcomm.errors import ConfigError


def port(*addresses: str) -> Port:
    endpoints = tuple(Endpoint(ipaddress.ip_interface(a), 4000) for a in addresses)
    return Port("eth", 0, endpoints)


def paired(ports: list[list[Port]], us: int, peer: int) -> list[tuple[int, int, int]]:
    everyone = pair_all(ports)
    found = everyone[us][peer]
    assert found == [Pairing(p.rail, p.theirs, p.ours) for p in everyone[peer][us]]
    return [(p.rail, p.ours, p.theirs) for p in found]


def test_rank_0_sets_the_order() -> None:
    ports = [
        [port("10.0.0.1/24"), port("10.1.0.1/24")],
        [port("10.1.0.2/24"), port("10.0.0.2/24")],
        [port("10.0.0.3/24")],
    ]
    assert number(ports) == [[0, 1], [1, 0], [0]]
    assert paired(ports, 0, 1) == [(0, 0, 1), (1, 1, 0)]
    assert paired(ports, 0, 2) == [(0, 0, 0)]
    assert paired(ports, 1, 2) == [(0, 1, 0)]


def test_a_network_that_rank_0_is_not_on() -> None:
    ports = [
        [port("10.0.0.1/24")],
        [port("10.0.0.2/24"), port("10.9.0.2/24")],
        [port("10.9.0.3/24"), port("10.0.0.3/24")],
    ]
    assert paired(ports, 1, 2) == [(0, 0, 1), (1, 1, 0)]
    assert paired(ports, 0, 2) == [(0, 0, 1)]


def test_two_ports_in_one_subnet() -> None:
    ports = [
        [port("10.0.0.1/24"), port("10.0.0.11/24")],
        [port("10.0.0.2/24"), port("10.0.0.12/24")],
        [port("10.0.0.3/24")],
    ]
    assert paired(ports, 0, 1) == [(0, 0, 0), (1, 1, 1)]
    assert paired(ports, 0, 2) == [(0, 0, 0)]


def test_loopback_named_twice() -> None:
    lo = port("127.0.0.1/8", "::1/128")
    assert paired([[lo, lo], [lo, lo]], 0, 1) == [(0, 0, 0), (1, 1, 1)]


def test_routed_hosts_are_paired_by_order() -> None:
    ports = [
        [port("10.0.0.1/24"), port("10.0.1.1/24")],
        [port("10.1.0.1/24"), port("10.1.1.1/24")],
        [port("10.2.0.1/32")],
    ]
    assert paired(ports, 0, 1) == [(0, 0, 0), (1, 1, 1)]
    assert paired(ports, 1, 2) == [(0, 0, 0)]


def test_different_prefix_lengths_of_one_network() -> None:
    ports = [[port("10.0.0.1/16")], [port("10.0.3.1/24")]]
    assert paired(ports, 0, 1) == [(0, 0, 0)]


def test_versions_of_ip() -> None:
    both, four, six = port("10.0.0.1/24", "fd00::1/64"), port("10.0.0.2/24"), port("fd00::3/64")
    assert paired([[both], [four]], 0, 1) == [(0, 0, 0)]
    assert paired([[both], [six]], 0, 1) == [(0, 0, 0)]
    addresses = meet(both, six)
    assert addresses is not None
    assert [str(a.address) for a in addresses] == ["fd00::1/64", "fd00::3/64"]
    with pytest.raises(ConfigError, match="ranks 1 and 2 have no network in common"):
        pair_all([[both], [four], [six]])


def test_a_shared_subnet_beats_the_version() -> None:
    ours = port("10.0.0.1/24", "fd00::1/64")
    theirs = port("192.168.0.2/24", "fd00::2/64")
    addresses = meet(ours, theirs)
    assert addresses is not None
    assert str(addresses[1].address) == "fd00::2/64"
