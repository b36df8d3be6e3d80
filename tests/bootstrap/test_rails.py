"""Which port goes with which: a pure function, by cases."""

from __future__ import annotations

import dataclasses
import ipaddress

import pytest

from ringcomm.bootstrap import port_warnings
from ringcomm.bootstrap.rails import Endpoint, Pairing, Port, meet, number, pair_all, slowest
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


def missing(ports: list[list[Port]], rank: int, hosts: str = "abc") -> list[str]:
    """What rank's host says of its ports that lead nowhere."""
    numbers = [hosts.index(host) for host in hosts]
    offered = port_warnings.Offered(ports, hosts, numbers)
    return port_warnings.sentences(offered, rank, pair_all(ports)[rank])


def test_a_port_without_a_counterpart() -> None:
    two = [port("10.0.0.1/24"), port("10.1.0.1/24")]
    one = [port("10.0.0.2/24")]
    assert missing([two, one], 0, "ab") == [
        "host b (rank 1) has no port for rail 1 (eth 10.1.0.0/24 of host a (rank 0)): "
        "this job uses 1 of 2 ports, 50% of the bandwidth, between the two"
    ]
    (there,) = missing([one, two], 0, "ab")
    assert "host a (rank 0) has no port for rail 1 (eth 10.1.0.0/24 of host b (rank 1))" in there
    assert missing([two, one, two], 0) == missing([two, one], 0, "ab")
    assert missing([two, two, one], 1)[0].startswith("host c (rank 2) has no port for rail 1")
    assert len(missing([one, two, two], 0)) == 2


def test_ports_of_known_speeds() -> None:
    fast = dataclasses.replace(port("10.0.0.1/24"), mbit_per_s=10000)
    slow = dataclasses.replace(port("10.1.0.1/24"), mbit_per_s=2500)
    (there,) = missing([[fast, slow], [port("10.1.0.2/24")]], 0, "ab")
    assert "rail 0 (eth 10.0.0.0/24" in there
    assert "1 of 2 ports, 20% of the bandwidth" in there


def test_the_slowest_link_between_hosts() -> None:
    def known(address: str, mbit: int) -> Port:
        return dataclasses.replace(port(address), mbit_per_s=mbit)

    def speed(*ranks: list[Port], hosts: tuple[int, ...] = (0, 1, 2)) -> int:
        return slowest(ranks, pair_all(ranks), hosts)

    fast = [[known(f"10.0.0.{i}/24", 10000), known(f"10.1.0.{i}/24", 1000)] for i in range(3)]
    assert speed(*fast) == 10000  # of two rails the faster
    assert speed(*fast[:2], [known("10.0.0.9/24", 2500)]) == 2500
    assert speed(*fast[:2], fast[2][1:]) == 1000
    assert speed(*fast[:2], [port("10.0.0.9/24")]) == 0  # not known
    assert speed(*fast[:2], [known("10.0.0.9/24", 100)], hosts=(0, 1, 1)) == 100
    assert speed([port("127.0.0.1/8")], [known("10.0.0.1/24", 100)], hosts=(0, 0)) == 0


def test_every_port_has_its_counterpart() -> None:
    same = [port("10.0.0.1/24"), port("10.1.0.1/24")]
    routed = [port("10.2.0.1/24"), port("10.3.0.1/24")]
    assert missing([same, same], 0, "ab") == []
    assert missing([same, routed], 0, "ab") == []
    assert missing([same, same[::-1], same], 1, "aab") == []
    assert missing([same, same[:1]], 0, "aa") == []  # two ranks of one host
