"""Rounds 2 to 5 of a bring-up, for one rank: offer, connect, commit, share.

mesh.py has the whole sequence and its result. Invariants: run() owns every descriptor until it
hands over those of the mesh, all at once; it closes all others, and all after any error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..config import Config
from ..errors import ConfigError
from . import commit, netlink, port_warnings, probe
from .dialer import Target
from .handshake_params import Key, job_hash
from .interfaces import Interface, addresses_by_name, choose, is_loopback, list_interfaces
from .keeper import Keeping
from .lanes import LaneId, LaneMaker, Plan
from .launch import Identity
from .mesh_result import LaneSocket, Mesh, RailInfo
from .netlink import Address
from .rails import Endpoint, Pairing, Port, meet, meet_on_link, pair_all, slowest
from .rendezvous import Exchange
from .secret import Secret, check_exposed
from .settings_exchange import MAX_PORTS, Greeting, Offer, exchange_round
from .shared_memory import share
from .sockets import (
    device_binding_works,
    is_link_local,
    keep_on_port,
    listen,
    may_bind_to_device,
    needs_link_local,
    routing_advice,
    shared_subnet,
    sysctl_advice,
)
from .system import describe, require_descriptors

_COMMIT_MARGIN = 1.0  # seconds of the deadline kept for the last round
_MOST_UNPAIRED = 4  # hosts that one host logs a line about
_log = logging.getLogger("ringcomm")


class Bringup:
    """Rounds 2 to 5 of one rank."""

    def __init__(
        self,
        identity: Identity,
        config: Config,
        secret: Secret | None,
        epoch: int,
        greetings: Sequence[Greeting],
    ) -> None:
        keys = [greeting.host_key for greeting in greetings]
        self._identity = identity
        self._rank, self._world = identity.rank, identity.world_size
        self._config = config
        self._secret = secret
        self._epoch = epoch
        self._job = job_hash(f"{greetings[0].session} {identity.world_size}")
        self._hosts = [greeting.host for greeting in greetings]
        self._machines = [greeting.machine_key for greeting in greetings]
        self._host_numbers = [sorted(set(keys), key=keys.index).index(key) for key in keys]
        self._single_host = len(set(keys)) == 1
        # The first rank of each host alone logs facts about the host.
        self._logs_for_host = keys.index(keys[self._rank]) == self._rank
        self._interfaces: list[Interface] = []
        # The chosen ports, and those beside them in their subnets, without containers' bridges.
        self._near: list[Interface] = []
        self._listeners: list[socket.socket] = []
        self._watch: list[int] = []  # as in the mesh, and so is _shared
        self._shared: list[int] = []
        self._ports: list[tuple[Port, ...]] = []
        self._pairings: dict[int, list[Pairing]] = {}
        self._link_mbit = 0
        self._recovers = False
        self._unless_joined = contextlib.ExitStack()  # closes what the mesh would get
        self._rates: dict[int, float] = {}  # probed rates by rail, bytes per second

    def run(self, exchange: Exchange, deadline: float) -> Mesh:
        """Runs rounds 2 to 5 and returns the mesh. Raises the errors of mesh.join()."""
        with self._unless_joined:
            mesh = self._run(exchange, deadline)
            self._unless_joined.pop_all()
        return mesh

    def _run(self, exchange: Exchange, deadline: float) -> Mesh:
        offers = exchange_round(
            exchange, deadline, lambda: self._offer(deadline).to_fields(), Offer.from_record
        )
        left = min(offer.seconds_left for offer in offers)
        began = time.monotonic()
        deadline = min(deadline, began + left)
        self._ports = [offer.ports for offer in offers]
        pairings = pair_all(self._ports)
        self._pairings = pairings[self._rank]
        several = any(len(ways) > 1 for to in pairings for ways in to.values())
        self._recovers = self._config.recovery == "on" and (several or not self._single_host)
        self._link_mbit = slowest(self._ports, pairings, self._host_numbers)
        self._warn_unpaired()
        with contextlib.closing(LaneMaker(self._plan())) as maker:
            maker.run(
                deadline - min(_COMMIT_MARGIN, 0.2 * left),
                lambda loop, ring: exchange.alarm(loop, ring, maker.lost),
            )
            self._warn_shared_subnet(maker)
            lanes = (lane for lane in maker.made if lane.lane != probe.PROBE_LANE)
            mine = commit.Made.of(lanes, maker.rows())
            made = exchange_round(
                exchange,
                deadline,
                mine.to_fields,
                lambda rank, record: commit.Made.from_record(
                    record, self._world, self._config.lanes
                ),
            )
            commit.check(made, self._hosts, time.monotonic() - began)
            self._measure(maker)
            shared = share(
                exchange, deadline, self._rank, self._host_numbers, self._config.shared_memory
            )
            if shared is not None:
                self._shared.append(self._held(shared))
            agreed = commit.agreed(made, self._rank)
            mesh = self._mesh(maker, agreed, made)
            for lane in agreed:
                maker.made.pop(lane).detach()
            return mesh

    def _held(self, descriptor: int) -> int:
        """Has a descriptor closed unless the mesh gets it; returns it."""
        self._unless_joined.callback(os.close, descriptor)
        return descriptor

    # -- round 2 --

    def _offer(self, deadline: float) -> Offer:
        """Chooses the ports and listens on them. Raises ConfigError."""
        present = list_interfaces()
        chosen = choose(self._config.interfaces, self._single_host, present)
        if len(chosen) > MAX_PORTS:
            raise ConfigError(f"{len(chosen)} ports are too many: name at most {MAX_PORTS}")
        for interface in chosen:
            if interface.loopback and not self._single_host:
                raise ConfigError(
                    f"interface {interface.name} is the loopback, which ranks on other hosts "
                    "cannot reach: name others"
                )
        addresses = [str(address.ip) for i in chosen for address in i.usable]
        check_exposed(addresses, self._secret, self._config.insecure)
        probes = 0 if self._single_host or not self._config.probe else 1
        most_lanes = len(chosen) * (self._config.lanes + probes) * (self._world - 1)
        require_descriptors(
            most_lanes + len(addresses),
            f"connecting to all {self._world} ranks, over {', '.join(i.name for i in chosen)},",
        )
        self._interfaces = chosen
        only_virtual = all(port.virtual for port in chosen)
        beside = [one for one in present if one.up and not one.loopback]
        self._near = chosen + [
            one
            for one in beside
            if one not in chosen
            and (only_virtual or not one.virtual)
            and shared_subnet(one, chosen)
        ]
        # Before lanes are made, so that no change of a port is missed.
        watch = None if self._single_host else netlink.subscribe()
        if watch is not None:
            self._watch.append(self._held(watch.detach()))
        is_secret = self._secret is not None or all(map(is_loopback, addresses))
        if self._logs_for_host and not is_secret:
            _log.warning(
                "insecure: anyone who can reach %s can join this job or read its data",
                ", ".join(addresses),
            )
        ports = tuple(self._listen(interface) for interface in chosen)
        return Offer(max(0.0, deadline - time.monotonic()), ports)

    def _listen(self, interface: Interface) -> Port:
        endpoints = []
        for address in interface.usable:
            try:
                endpoints.append(self._listen_on(address))
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {address.ip} ({interface.name}): {describe(error)}"
                ) from None
        return Port(
            interface.name,
            interface.mbit_per_s or 0,
            tuple(endpoints),
            self._listen_on_link(interface),
        )

    def _listen_on_link(self, interface: Interface) -> Endpoint | None:
        """Listens on the port's link-local address, if there is one and only it keeps the port's
        traffic on the port; else returns None."""
        address = interface.link_local
        if address is not None and needs_link_local(interface, self._near):
            with contextlib.suppress(OSError):
                return self._listen_on(address, interface.index)
        return None

    def _listen_on(self, address: Address, scope: int = 0) -> Endpoint:
        listener = listen(str(address.ip), scope=scope, congestion=self._config.congestion)
        self._listeners.append(listener)
        self._unless_joined.callback(listener.close)
        return Endpoint(address, listener.getsockname()[1])

    # -- connect --

    def _plan(self) -> Plan:
        targets: dict[LaneId, Target] = {}
        expected: set[LaneId] = set()
        rails = {peer: len(pairings) for peer, pairings in self._pairings.items()}
        probed = probe.peers(self._rank, self._host_numbers, rails) if self._config.probe else ()
        for peer, pairings in self._pairings.items():
            for pairing in pairings:
                numbers = [*range(self._config.lanes)]
                if peer in probed:
                    numbers.append(probe.PROBE_LANE)
                lanes = [LaneId(peer, pairing.rail, i) for i in numbers]
                targets.update(dict.fromkeys(lanes, self._target(peer, pairing)))
                if peer > self._rank:
                    expected.update(lanes)
        return Plan(
            self._rank,
            self._world,
            self._job,
            self._epoch,
            Key.derive(self._secret, self._job, self._config.insecure),
            self._listeners,
            targets,
            frozenset(expected),
            self._config.congestion,
        )

    def _target(self, peer: int, pairing: Pairing) -> Target:
        here, there = self._addresses(peer, pairing)
        port = self._interfaces[pairing.ours]
        use_device = not self._same_host(peer) and device_binding_works(port, self._near)
        return Target(
            str(there.address.ip),
            there.port,
            str(here.address.ip),
            port.name if use_device else "",
            link_local=self._link_local_target(peer, pairing),
        )

    def _link_local_target(self, peer: int, pairing: Pairing) -> Target | None:
        ours, theirs = self._ports[self._rank][pairing.ours], self._ports[peer][pairing.theirs]
        found = None if self._same_host(peer) else meet_on_link(ours, theirs)
        if found is None:
            return None
        here, there = found
        port = f"%{ours.name}"  # by name: a port that was made again has another index
        return Target(f"{there.address.ip}{port}", there.port, f"{here.address.ip}{port}")

    def _warn_unpaired(self) -> None:
        """Warns, once on each host, of ports that stay unused because another host has no
        counterpart."""
        if not self._logs_for_host:
            return
        offered = port_warnings.Offered(self._ports, self._hosts, self._host_numbers)
        found = port_warnings.sentences(offered, self._rank, self._pairings)
        for sentence in found[:_MOST_UNPAIRED]:
            _log.warning("%s. `ip address` and RINGCOMM_INTERFACES there tell why", sentence)
        if len(found) > _MOST_UNPAIRED:
            _log.warning("so it is between %d more hosts", len(found) - _MOST_UNPAIRED)

    def _warn_shared_subnet(self, maker: LaneMaker) -> None:
        """Warns if ports share a subnet and the kernel does not keep each lane on its own port.
        Lanes over link-local addresses stay on theirs. The others work all the same, over the
        ports that the kernel routes them by."""
        routed = list(self._routed_in_shared_subnet(maker)) if self._logs_for_host else []
        if not routed:
            return
        lines = sysctl_advice(self._near)
        if lines:
            _log.warning(
                "network ports of this host share a subnet, so their traffic may share one port; "
                "as root run: sysctl -w %s",
                " ".join(lines),
            )
        advice: dict[str, str] = {}
        for peer, pairing in routed:
            port = self._interfaces[pairing.ours]
            if may_bind_to_device(port.name):
                continue
            here, there = self._addresses(peer, pairing)
            commands = routing_advice(port, here.address, there.address)
            if commands:
                advice.setdefault(port.name, commands)
        if advice:
            _log.warning(
                "the kernel does not let us bind sockets to a network port (SO_BINDTODEVICE), and "
                "routes what belongs to %s through another; as root run: %s",
                ", ".join(advice),
                "; ".join(advice.values()),
            )

    def _routed_in_shared_subnet(self, maker: LaneMaker) -> Iterator[tuple[int, Pairing]]:
        """Yields (peer, pairing) of the rails whose port shares a subnet with another one and
        whose lanes do not all use link-local addresses."""
        for peer, pairings in self._pairings.items():
            for pairing in () if self._same_host(peer) else pairings:
                made = (
                    sock
                    for lane, sock in maker.made.items()
                    if (lane.peer, lane.rail) == (peer, pairing.rail)
                )
                on_link = [is_link_local(sock) for sock in made]
                port = self._interfaces[pairing.ours]
                if shared_subnet(port, self._near) and not (on_link and all(on_link)):
                    yield peer, pairing

    def _addresses(self, peer: int, pairing: Pairing) -> tuple[Endpoint, Endpoint]:
        """Returns our and the peer's address on a rail."""
        ours = self._ports[self._rank][pairing.ours]
        found = meet(ours, self._ports[peer][pairing.theirs])
        assert found is not None  # else pair_all() had raised
        return found

    def _same_host(self, peer: int) -> bool:
        return self._host_numbers[peer] == self._host_numbers[self._rank]

    def _measure(self, maker: LaneMaker) -> None:
        """Measures the rails and fills _rates. Ranks of a host probe at once, so each measures
        its share of a port."""
        ours = probe.target(self._rank, self._host_numbers)
        connections = {
            lane: (sock, lane.peer == ours)
            for lane, sock in maker.made.items()
            if lane.lane == probe.PROBE_LANE
        }
        rates = probe.measure(connections)
        self._rates = {lane.rail: rate for lane, rate in rates.items()}
        for lane, (sock, _) in connections.items():
            del maker.made[lane]
            sock.close()

    # -- round 3 --

    def _mesh(
        self, maker: LaneMaker, agreed: Sequence[LaneId], made: Sequence[commit.Made]
    ) -> Mesh:
        rails: dict[int, RailInfo] = {}
        for peer, pairings in self._pairings.items():
            for pairing in pairings:
                is_made = any((lane.peer, lane.rail) == (peer, pairing.rail) for lane in agreed)
                if not is_made:
                    self._warn_left_out(peer, pairing, made)
                if is_made or self._recovers:
                    port = self._ports[self._rank][pairing.ours]
                    address = str(port.endpoints[0].address.ip)
                    info = RailInfo(pairing.rail, port.name, address, port.mbit_per_s)
                    rails.setdefault(pairing.rail, info)
        late: list[LaneId] = []
        keeping: list[Keeping] = []
        if self._recovers:
            lanes = (lane for lane in maker.plan.targets if lane.lane != probe.PROBE_LANE)
            late = sorted(set(lanes) - set(agreed))
            plan = maker.hand_over([*agreed, *late])
            keeping = [Keeping(plan, self._keep_on_port, self._addresses_now, frozenset(late))]
        here = self._host_numbers[self._rank]
        neighbours = [r for r in range(self._world) if self._host_numbers[r] == here]
        local_rank = self._identity.local_rank
        return Mesh(
            rank=self._rank,
            world_size=self._world,
            hosts=self._hosts,
            host_numbers=self._host_numbers,
            rails=[rails[index] for index in sorted(rails)],
            lanes=[
                self._lane_socket(lane, maker.made.get(lane), made)
                for lane in sorted([*agreed, *late])
            ],
            local_rank=neighbours.index(self._rank) if local_rank is None else local_rank,
            local_world_size=len(neighbours),
            ranks_on_machine=self._machines.count(self._machines[self._rank]),
            shared=self._shared,
            watch=self._watch,
            in_memory=bool(self._shared),
            link_mbit=self._link_mbit,
            recovers=self._recovers,
            keeping=keeping,
        )

    def _pairing(self, lane: LaneId) -> Pairing:
        return next(p for p in self._pairings[lane.peer] if p.rail == lane.rail)

    def _keep_on_port(self, lane: LaneId, sock: socket.socket) -> None:
        if not self._same_host(lane.peer):
            keep_on_port(sock, self._interfaces[self._pairing(lane).ours], self._near)

    def _addresses_now(self, lanes: Collection[LaneId]) -> dict[LaneId, str]:
        present: dict[str, list[Address]] = {}
        with contextlib.suppress(OSError):
            present = addresses_by_name() if lanes else {}
        return {lane: self._address_now(lane, present) for lane in lanes}

    def _address_now(self, lane: LaneId, present: Mapping[str, list[Address]]) -> str:
        """Returns the address of a lane's port here. If the port has lost that which the lane was
        made by: another one in the peer's network; where that was another network, any other."""
        pairing = self._pairing(lane)
        here, there = (end.address for end in self._addresses(lane.peer, pairing))
        alike = [
            address
            for address in present.get(self._interfaces[pairing.ours].name, ())
            if address.version == here.version and not address.is_link_local
        ]
        if here.ip not in (address.ip for address in alike):
            is_near = there.ip in here.network
            for address in alike:
                if there.ip in address.network or not is_near:
                    return str(address.ip)
        return str(here.ip)

    def _lane_socket(
        self, lane: LaneId, sock: socket.socket | None, made: Sequence[commit.Made]
    ) -> LaneSocket:
        """Describes a lane for the core. One that could not be made gets a socket whose other end
        is closed: the core finds it lost, and it is made anew once that can be."""
        pairing = self._pairing(lane)
        if sock is None:
            here, there = (str(end.address.ip) for end in self._addresses(lane.peer, pairing))
            why_not = commit.reason(made, self._rank, lane.peer, lane.rail)
            ours, theirs = socket.socketpair()
            theirs.close()
            fd = self._held(ours.detach())
        else:
            here, there, why_not = sock.getsockname()[0], sock.getpeername()[0], ""
            self._keep_on_port(lane, sock)
            fd = sock.fileno()
        is_apart = not self._same_host(lane.peer)  # else it does not end with its port
        return LaneSocket(
            *lane,
            fd,
            self._speed(lane, pairing) if is_apart else 0.0,
            self._describe_end(self._rank, pairing.ours, here),
            self._describe_end(lane.peer, pairing.theirs, there),
            self._interfaces[pairing.ours].index if is_apart else 0,
            why_not,
        )

    def _describe_end(self, rank: int, port: int, address: str) -> str:
        """Describes an end of a lane, for errors."""
        return f"{self._ports[rank][port].name} {address.split('%')[0]} on {self._hosts[rank]}"

    def _speed(self, lane: LaneId, pairing: Pairing) -> float:
        """Speed of a lane to another host in bytes per second; 0.0: not known."""
        if lane.rail in self._rates:
            return self._rates[lane.rail] / self._config.lanes
        speeds = (
            self._ports[self._rank][pairing.ours].mbit_per_s,
            self._ports[lane.peer][pairing.theirs].mbit_per_s,
        )
        return min((s for s in speeds if s), default=0) * 1e6 / 8 / self._config.lanes

    def _warn_left_out(self, peer: int, pairing: Pairing, made: Sequence[commit.Made]) -> None:
        _log.warning(
            "rail %d (%s) does not reach rank %d (%s): %s; going on without it%s",
            pairing.rail,
            self._ports[self._rank][pairing.ours].name,
            peer,
            self._hosts[peer],
            commit.reason(made, self._rank, peer, pairing.rail),
            " until it does" if self._recovers else "",
        )
