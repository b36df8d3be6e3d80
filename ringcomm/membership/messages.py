"""Encoding of the messages between members; the package's docstring has the table of messages.

A message is a header (kind, three zeros, payload length) and a payload: strict JSON, but for BLOB
and ALL, which carry the parts of a bring-up as they are, behind epoch and step.

Invariants: every length and field is checked before use; a malformed message raises a
BootstrapError that names the rank it came from.
"""

from __future__ import annotations

import enum
import ipaddress
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from ..bootstrap.records import LENGTH, MAX_BYTES, Record, pack
from ..errors import BootstrapError
from .decision import Go, Ready

HEADER = struct.Struct("<BxxxI")
_PLACE = struct.Struct("<II")
MAX_TOKEN = 256
"""Most bytes of a token."""
MAX_NUMBER = 2**62
"""Greatest number of a round, and of what else is counted."""

Address = tuple[str, int]
Book = dict[int, list[Address]]
"""Addresses at which each rank listens."""


class Kind(enum.IntEnum):
    """Kind of a message."""

    INTRO = 1
    READY = 2
    GO = 3
    BLOB = 4
    ALL = 5
    FAILED = 6


def most_bytes(world_size: int) -> int:
    """Returns the most bytes of any payload."""
    return _PLACE.size + world_size * (LENGTH.size + MAX_BYTES)


def no_message(rank: int) -> BootstrapError:
    """Returns the error to raise where a rank has sent what is no message."""
    return BootstrapError(f"rank {rank} sent what no ringcomm sends", rank=rank)


# ---- INTRO ----


def pack_intro(process: int, book: Mapping[int, Sequence[Address]]) -> bytes:
    """Encodes an INTRO: a random number, which tells the process from an earlier one of its rank,
    and the addresses that it knows."""
    return pack({"process": process, "book": _pack_places(book)}, most_bytes(len(book)))


def read_intro(source: str, payload: bytes, world_size: int) -> tuple[int, Book]:
    """Decodes an INTRO: process, addresses. Raises BootstrapError."""
    record = Record.unpack(source, payload, most_bytes(world_size))
    return record.integer("process", 0, MAX_NUMBER), _read_book(record, world_size)


def pack_book(book: Mapping[int, Sequence[Address]]) -> bytes:
    """Encodes the addresses at which ranks listen."""
    return pack({"book": _pack_places(book)})


def read_book(source: str, payload: bytes, world_size: int) -> Book:
    """Decodes the addresses at which ranks listen. Raises BootstrapError."""
    return _read_book(Record.unpack(source, payload), world_size)


def _pack_places(book: Mapping[int, Sequence[Address]]) -> list[dict[str, Any]]:
    return [
        {"rank": rank, "places": [{"address": a, "port": p} for a, p in places]}
        for rank, places in book.items()
    ]


def _read_book(record: Record, world_size: int) -> Book:
    book: Book = {}
    for entry in record.records("book", world_size):
        places = [_read_place(place) for place in entry.records("places", 64)]
        book[entry.integer("rank", 0, world_size - 1)] = places
    return book


def _read_place(record: Record) -> Address:
    address = record.text("address")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise record.malformed("has a bad address") from None
    return address, record.integer("port", 1, 65535)


# ---- READY ----


def pack_ready(ready: Ready, now: float) -> bytes:
    """Encodes a READY; its time is sent as an age in seconds, as clocks differ."""
    return pack(
        {
            "history": dict(zip(("epoch", "number", "origin"), ready.history, strict=True)),
            "number": ready.number,
            "healthy": int(ready.healthy),
            "blames": _ranks(ready.blames),
            "token": ready.token.hex(),
            "serial": ready.serial,
            "epoch": ready.epoch,
            "origin": ready.origin,
            "seen": ready.seen,
            "behind": int(ready.behind),
            "age": max(0.0, now - ready.at),
        }
    )


def read_ready(rank: int, payload: bytes, world_size: int, now: float) -> Ready:
    """Decodes a READY; now: the receiver's clock. Raises BootstrapError."""
    record = Record.unpack(f"rank {rank}", payload)
    history = record.object("history")
    return Ready(
        rank=rank,
        serial=record.integer("serial", 0, MAX_NUMBER),
        epoch=record.integer("epoch", -1, 2**32 - 1),
        origin=record.integer("origin", 0, MAX_NUMBER),
        seen=record.integer("seen", -1, 2**32 - 1),
        behind=bool(record.integer("behind", 0, 1)),
        history=(
            history.integer("epoch", -2, 2**32 - 1),
            history.integer("number", -MAX_NUMBER, MAX_NUMBER),
            history.integer("origin", 0, MAX_NUMBER),
        ),
        number=record.integer("number", -MAX_NUMBER, MAX_NUMBER),
        healthy=bool(record.integer("healthy", 0, 1)),
        blames=_read_ranks(record, "blames", world_size),
        token=_read_token(record),
        at=now - record.number("age", 0.0, 1e12),
    )


def _ranks(ranks: Sequence[int]) -> list[dict[str, int]]:
    return [{"rank": rank} for rank in ranks]


def _read_ranks(record: Record, name: str, world_size: int) -> tuple[int, ...]:
    entries = record.records(name, world_size)
    return tuple(entry.integer("rank", 0, world_size - 1) for entry in entries)


def _read_token(record: Record) -> bytes:
    try:
        return bytes.fromhex(record.text("token"))
    except ValueError:
        raise record.malformed("has a bad token") from None


# ---- GO ----


def pack_go(go: Go) -> bytes:
    """Encodes a GO."""
    members = [
        {"rank": rank, "serial": serial, "token": token.hex()}
        for rank, serial, token in zip(go.members, go.serials, go.tokens, strict=True)
    ]
    return pack(
        {
            "epoch": go.epoch,
            "number": go.number,
            "is_new": int(go.is_new),
            "members": members,
            "left": _ranks(go.left),
            "joined": _ranks(go.joined),
            "leader": go.leader,
            "origin": go.origin,
        },
        most_bytes(len(members)),
    )


def read_go(source: str, payload: bytes, world_size: int) -> Go:
    """Decodes a GO. Raises BootstrapError."""
    record = Record.unpack(source, payload, most_bytes(world_size))
    members = record.records("members", world_size)
    ranks = tuple(member.integer("rank", 0, world_size - 1) for member in members)
    leader = record.integer("leader", 0, world_size - 1)
    if leader not in ranks or sorted(set(ranks)) != list(ranks):
        raise record.malformed("has impossible members")
    return Go(
        epoch=record.integer("epoch", 0, 2**32 - 1),
        number=record.integer("number", -MAX_NUMBER, MAX_NUMBER),
        is_new=bool(record.integer("is_new", 0, 1)),
        members=ranks,
        serials=tuple(member.integer("serial", 0, MAX_NUMBER) for member in members),
        tokens=tuple(_read_token(member) for member in members),
        left=_read_ranks(record, "left", world_size),
        joined=_read_ranks(record, "joined", world_size),
        leader=leader,
        origin=record.integer("origin", 0, MAX_NUMBER),
    )


# ---- BLOB, ALL, FAILED ----


def pack_part(epoch: int, step: int, part: bytes) -> bytes:
    """Encodes a BLOB or an ALL: a rank's part of a step of the bring-up, or the parts of all
    members in their order, as join_blobs makes them."""
    return _PLACE.pack(epoch, step) + part


def read_part(rank: int, payload: bytes) -> tuple[int, int, bytes]:
    """Decodes a BLOB or an ALL: epoch, step, the part or all parts. Raises BootstrapError."""
    if len(payload) < _PLACE.size:
        raise no_message(rank)
    epoch, step = _PLACE.unpack_from(payload)
    return epoch, step, payload[_PLACE.size :]


def pack_failed(epoch: int, blames: Sequence[int], text: str) -> bytes:
    """Encodes a FAILED, with the ranks to blame and the reason."""
    shown = "".join(c if c.isprintable() or c == "\n" else "?" for c in text[:1500])
    return pack({"epoch": epoch, "blames": _ranks(blames), "text": shown})


def read_failed(source: str, payload: bytes, world_size: int) -> tuple[int, tuple[int, ...], str]:
    """Decodes a FAILED: epoch, ranks to blame, reason. Raises BootstrapError."""
    record = Record.unpack(source, payload)
    epoch = record.integer("epoch", 0, 2**32 - 1)
    return epoch, _read_ranks(record, "blames", world_size), record.text("text")
