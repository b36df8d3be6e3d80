"""Network ports: what the kernel lists, and which are chosen."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from ringcomm.bootstrap import interfaces, sockets
from ringcomm.bootstrap.interfaces import Interface, choose, is_loopback, list_interfaces
from ringcomm.errors import ConfigError

pytestmark = pytest.mark.usefixtures("no_leaked_fds")


def port(
    name: str,
    *addresses: str,
    kind: str = "ethernet",
    up: bool = True,
    running: bool = True,
) -> Interface:
    return Interface(
        name=name,
        index=hash(name) & 0xFFFF,
        kind=kind,
        up=up,
        running=running,
        loopback=kind == "loopback",
        virtual=kind in interfaces._VIRTUAL_KINDS or name.startswith(interfaces._VIRTUAL_NAMES),
        mbit_per_s=None,
        addresses=tuple(ipaddress.ip_interface(address) for address in addresses),
    )


LO = port("lo", "127.0.0.1/8", "::1/128", kind="loopback")
ETH0 = port("eth0", "10.0.0.1/24", "2001:db8::1/64", "fe80::1/64")
ETH1 = port("eth1", "10.1.0.1/24")
DOWN = port("eth2", "10.2.0.1/24", up=False)
UNPLUGGED = port("eth3", "10.3.0.1/24", running=False)
BARE = port("eth4")
LINK_LOCAL = port("eth5", "169.254.7.1/16", "fe80::5/64")
ONLY_FE80 = port("eth6", "fe80::6/64")
DOCKER = port("docker0", "172.17.0.1/16", kind="bridge")
VETH = port("veth12ab", "10.88.0.1/16", kind="veth")
CONTAINER = port("eth0", "172.17.0.2/16", kind="veth")  # a container's side of a veth
TUNNEL = port("wg0", "10.99.0.1/24", kind="wireguard")
ALL = [LO, ETH0, ETH1, DOWN, UNPLUGGED, BARE, LINK_LOCAL, ONLY_FE80, DOCKER, VETH, TUNNEL]


def test_the_kernels_list() -> None:
    present = {i.name: i for i in list_interfaces()}
    assert set(present) == {name for _, name in socket.if_nameindex()}
    lo = present["lo"]
    assert lo.loopback
    assert lo.up
    assert ipaddress.ip_interface("127.0.0.1/8") in lo.addresses
    assert lo.mbit_per_s is None
    assert "127.0.0.1/8" in lo.describe()


@pytest.mark.parametrize(
    ("present", "single_host", "chosen"),
    [
        (ALL, True, [LO]),
        (ALL, False, [ETH0, ETH1]),
        ([LO, DOCKER, VETH], False, [DOCKER, VETH]),
        ([LO, CONTAINER], False, [CONTAINER]),
        ([LO, DOCKER, ETH1], False, [ETH1]),
        ([LO, TUNNEL], False, [TUNNEL]),
    ],
)
def test_default_choice(
    present: list[Interface], single_host: bool, chosen: list[Interface]
) -> None:
    assert choose([], single_host, present) == chosen


def test_named_in_their_order() -> None:
    assert choose(["eth1", "eth0"], False, ALL) == [ETH1, ETH0]
    assert choose(["eth0", "eth0"], True, ALL) == [ETH0, ETH0]
    assert choose(["docker0"], False, ALL) == [DOCKER]
    assert choose(["eth5"], False, ALL) == [LINK_LOCAL]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("eth9", "there is no interface 'eth9'"),
        ("eth2", "eth2 is down: run `ip link set eth2 up`"),
        ("eth3", "eth3 has no carrier"),
        ("eth4", "eth4 has no address"),
        ("eth6", "eth6 has no address"),
    ],
)
def test_named_but_unusable(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        choose([name], False, ALL)
    assert "This host has: lo (loopback, up): 127.0.0.1/8" in str(raised.value)


def test_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="no network port"):
        choose([], False, [LO, DOWN, ONLY_FE80, LINK_LOCAL])
    with pytest.raises(ConfigError, match="no loopback"):
        choose([], True, [ETH0])


def test_usable_addresses() -> None:
    assert [str(a) for a in ETH0.usable] == ["10.0.0.1/24", "2001:db8::1/64"]
    assert [str(a) for a in LINK_LOCAL.usable] == ["169.254.7.1/16"]
    assert ONLY_FE80.usable == ()
    both = port("eth7", "169.254.7.1/16", "2001:db8::7/64")
    assert [str(a) for a in both.usable] == ["2001:db8::7/64"]


def test_shared_subnets() -> None:
    twin = port("eth8", "10.0.0.9/24")
    assert sockets.shared_subnet(ETH0, [ETH0, twin])
    assert not sockets.shared_subnet(ETH0, [ETH0, ETH0, ETH1])
    assert sockets.sysctl_advice([ETH0, ETH1, LO, LO]) == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("10.0.0.1", False),
        ("fe80::1%eth0", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_addresses_are_found_without_asking_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {one.name: list(one.addresses) for one in list_interfaces()}

    def asked(*_: object) -> int:
        raise AssertionError("a driver was asked")

    monkeypatch.setattr(interfaces, "read_number", asked)
    assert interfaces.addresses_by_name() == expected
