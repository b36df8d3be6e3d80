"""The first two rounds of bring-up: hosts and settings of all ranks, then where they listen.

Invariants: a rank that fails says so in its part of the round, so that nobody waits for it;
every rank compares the fields that must agree, so all raise the same error;
each part is checked field by field before use.
"""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..errors import BootstrapError, ConfigError, RingcommError
from .rails import Endpoint, Port
from .records import Record, pack
from .rendezvous import Exchange
from .system import typed_errors

MAX_PORTS = 16

Fields = dict[str, Any]
T = TypeVar("T")


def exchange_round(
    exchange: Exchange,
    deadline: float,
    make: Callable[[], Fields],
    read: Callable[[int, Record], T],
) -> list[T]:
    """Runs one round and returns the parts of all ranks in rank order, read by
    ``read(rank, record)``.

    If make() fails, the reason is sent to the other ranks before its error is raised here. Raises
    that error, or BootstrapError naming the ranks whose make() failed.
    """
    failure: RingcommError | None = None
    try:
        with typed_errors():
            blob = pack(make())
    except RingcommError as error:
        failure = error
        blob = pack({"error": str(error)[:1500]})
    blobs = exchange.allgather(blob, deadline)
    if failure is not None:
        raise failure
    failed = unable(blobs)
    if failed:
        lines = "; ".join(f"rank {rank}: {why}" for rank, why in failed.items())
        culprit = next(iter(failed)) if len(failed) == 1 else None
        raise BootstrapError(f"not all ranks could go on. {lines}", rank=culprit)
    return [read(rank, record) for rank, record in enumerate(_records(blobs))]


def unable(blobs: Sequence[bytes]) -> dict[int, str]:
    """Returns the ranks whose make() failed in a round, and why. Raises BootstrapError."""
    return {rank: r.text("error") for rank, r in enumerate(_records(blobs)) if "error" in r.fields}


def _records(blobs: Sequence[bytes]) -> list[Record]:
    return [Record.unpack(f"rank {rank}", blob) for rank, blob in enumerate(blobs)]


@dataclasses.dataclass(frozen=True)
class Greeting:
    """Round 1: one rank introduces itself."""

    host: str
    """Host name, for messages."""
    host_key: str
    """Equal for two ranks exactly if they can reach each other over the loopback."""
    machine_key: str
    """Equal for two ranks exactly if they share a kernel, and so its cores."""
    session: str
    """Random name; rank 0's identifies this bring-up in every lane's handshake."""
    settings: dict[str, str]
    """Settings that must be equal on all ranks, by name."""

    def to_fields(self) -> Fields:
        """Returns the fields for a blob."""
        return dataclasses.asdict(self)

    @classmethod
    def from_record(cls, _rank: int, record: Record) -> Greeting:
        """Reads the fields of a blob. Raises BootstrapError."""
        settings = record.object("settings")
        return cls(
            host=record.text("host"),
            host_key=record.text("host_key"),
            machine_key=record.text("machine_key"),
            session=record.text("session"),
            settings={name: settings.text(name) for name in settings.fields},
        )


def machine_key() -> str:
    """Returns an identifier of this running kernel."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return _digest(file.read().strip())
    except (FileNotFoundError, PermissionError):  # EMFILE is raised, or keys would differ
        return _digest(socket.gethostname())


def host_key() -> str:
    """Returns an identifier of this kernel and network namespace, so that a container counts as a
    host."""
    try:
        namespace = os.readlink("/proc/thread-self/ns/net")
    except (FileNotFoundError, PermissionError):
        namespace = ""
    return _digest(f"{machine_key()} {namespace}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_settings(greetings: Sequence[Greeting]) -> None:
    """Raises ConfigError naming the first setting that differs, with the ranks and values."""
    names = dict.fromkeys(name for g in greetings for name in g.settings)
    for name in names:
        by_value: dict[str, list[int]] = {}
        for rank, greeting in enumerate(greetings):
            by_value.setdefault(greeting.settings.get(name, "nothing"), []).append(rank)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {_ranks(who)}" for value, who in by_value.items())
            raise ConfigError(f"{name} differs between ranks: {values}. Make it the same on all")


def _ranks(ranks: Sequence[int]) -> str:
    """Formats ranks as "rank 3" or "ranks 0-2, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


@dataclasses.dataclass(frozen=True)
class Offer:
    """Round 2: ports and addresses on which one rank listens."""

    seconds_left: float
    """Seconds until the rank's own deadline; the earliest counts for all."""
    ports: tuple[Port, ...]

    def to_fields(self) -> Fields:
        """Returns the fields for a blob."""
        return {"seconds_left": self.seconds_left, "ports": [_port_fields(p) for p in self.ports]}

    @classmethod
    def from_record(cls, rank: int, record: Record) -> Offer:
        """Reads the fields of a blob. Raises BootstrapError."""
        ports = tuple(_read_port(rank, port) for port in record.records("ports", MAX_PORTS))
        if not ports:
            raise BootstrapError(f"rank {rank} offers no port", rank=rank)
        return cls(record.number("seconds_left", 0.0, 1e9), ports)


def _port_fields(port: Port) -> Fields:
    endpoints = [_endpoint_fields(endpoint) for endpoint in port.endpoints]
    fields = {"name": port.name, "mbit_per_s": port.mbit_per_s, "endpoints": endpoints}
    local = port.link_local
    return fields if local is None else {**fields, "link_local": _endpoint_fields(local)}


def _endpoint_fields(endpoint: Endpoint) -> Fields:
    return {"address": str(endpoint.address), "port": endpoint.port}


def _read_port(rank: int, record: Record) -> Port:
    endpoints = tuple(_read_endpoint(rank, e) for e in record.records("endpoints", 2))
    has_local = "link_local" in record.fields
    local = _read_endpoint(rank, record.object("link_local")) if has_local else None
    return Port(record.text("name"), record.integer("mbit_per_s", 0, 10**9), endpoints, local)


def _read_endpoint(rank: int, record: Record) -> Endpoint:
    try:
        address = ipaddress.ip_interface(record.text("address"))
    except ValueError:
        raise BootstrapError(f"rank {rank} sent a bad address", rank=rank) from None
    return Endpoint(address, record.integer("port", 1, 65535))
