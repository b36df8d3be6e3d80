"""The floor: what bare TCP streams carry over the same ports in the same run.

All ranks send to their right neighbour at once, one stream per rail, as a ring collective does. No
collective can keep a higher busbw on these links for long, so busbw / floor is its efficiency.

Invariants: the rate is taken at the receiver, over a window that begins after slow start and ends
before the senders stop. Buffers start at a page: one that starts some bytes later than the kernel's
own shares the low bits of its addresses, which slows a copy on some CPUs. A listener is bound to
its rail's address and takes a stream only with the token that was handed to the left neighbour.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import mmap
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

WARM_S = 0.5
CONNECT_S = 5.0
BUFFER_BYTES = 1 << 20
TOKEN_BYTES = 16


class Control(Protocol):
    """The part of a Peer that the floor needs."""

    rank: int
    world: int

    def gather(self, values: np.ndarray) -> np.ndarray: ...
    def barrier(self) -> None: ...


class FloorError(Exception):
    """A stream could not be made, or broke. Raised on all ranks alike."""


@dataclasses.dataclass(frozen=True)
class Floor:
    """Goodput of bare streams.

    Attributes:
        rails: names of rank 0's ports.
        gbps: per rail, GB/s into the rank that received least over this rail.
        total: GB/s over all rails into the rank that received least: a ring goes at its slowest
            hop.
        congestion: congestion control of the streams.
        cpu_s_per_gb: CPU seconds per GB sent, of sending and receiving, over all ranks.
    """

    rails: tuple[str, ...]
    gbps: tuple[float, ...]
    total: float
    congestion: str
    cpu_s_per_gb: float


def measure_floor(control: Control, rails: list[tuple[str, str]], seconds: float) -> Floor | None:
    """Run the streams for ``seconds``; called by all ranks, same result on all.

    ``rails``: (name, address) of this rank's ports. None if a rank has none, or is alone. Raises
    FloorError on all ranks if a stream could not be made on one, or broke.
    """
    count = int(control.gather(np.array([len(rails)])).min())
    if count == 0 or control.world == 1:
        return None
    try:
        return _measure(control, rails[:count], seconds, bound=True)
    except FloorError:  # ports of one subnet that answer for each other lose bound streams
        return _measure(control, rails[:count], seconds, bound=False)


def _measure(control: Control, rails: list[tuple[str, str]], seconds: float, bound: bool) -> Floor:
    with contextlib.ExitStack() as stack:
        outgoing, incoming = connect(control, rails, bound, stack)
        used = outgoing[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        control.barrier()
        rates, sent, cpu, failure = _stream(outgoing, incoming, seconds)
    _raise_together(control, failure)
    table = control.gather(np.array([*rates, sent, cpu]))
    into = table[:, : len(rails)] / 1e9
    return Floor(
        rails=tuple(name for name, _ in rails),
        gbps=tuple(map(float, into.min(axis=0))),
        total=float(into.sum(axis=1).min()),
        congestion=used.rstrip(b"\0").decode(),
        cpu_s_per_gb=float(table[:, -1].sum() / max(1.0, table[:, -2].sum()) * 1e9),
    )


def _raise_together(control: Control, failure: str) -> None:
    """Raise on all ranks if one has a failure to tell."""
    texts = control.gather(np.frombuffer(failure.encode()[:200].ljust(200), np.uint8))
    for rank, text in enumerate(texts):
        said = text.tobytes().decode(errors="replace").strip()
        if said:
            raise FloorError(f"the floor could not be measured: rank {rank}: {said}")


def connect(
    control: Control, rails: list[tuple[str, str]], bound: bool, stack: contextlib.ExitStack
) -> tuple[list[socket.socket], list[socket.socket]]:
    """One stream to the right and one from the left per rail, closed by the stack."""
    failure = ""
    listeners: list[socket.socket] = []
    tokens = [secrets.token_bytes(TOKEN_BYTES) for _ in rails]
    cards = np.zeros((len(rails), 6 + TOKEN_BYTES), np.uint8)
    try:
        for card, token, (_, address) in zip(cards, tokens, rails, strict=True):
            listener = stack.enter_context(socket.socket())
            listener.bind((address, 0))
            listener.listen(4)
            listeners.append(listener)
            port = listener.getsockname()[1]
            card[:] = [*socket.inet_aton(address), port >> 8, port & 255, *token]
    except OSError as error:
        failure = f"no listener on {address}: {error}"
    _raise_together(control, failure)
    everyone = control.gather(cards.reshape(-1)).reshape(control.world, len(rails), -1)
    outgoing: list[socket.socket] = []
    incoming: list[socket.socket] = []
    try:
        right = everyone[(control.rank + 1) % control.world]
        for rail, card in zip(rails, right, strict=True):
            outgoing.append(stack.enter_context(_dial(rail, card.tobytes(), bound)))
        for listener, token in zip(listeners, tokens, strict=True):
            incoming.append(stack.enter_context(_accept(listener, token)))
    except OSError as error:
        failure = str(error)
    _raise_together(control, failure)
    return outgoing, incoming


def _dial(rail: tuple[str, str], card: bytes, bound: bool) -> socket.socket:
    """A stream from this rail's address, and by this rail's device alone if ``bound``."""
    name, address = rail
    target = socket.inet_ntoa(card[:4]), int.from_bytes(card[4:6], "big")
    stream = socket.socket()
    try:
        if bound and target[0] != address:  # a stream to the own address goes over lo
            with contextlib.suppress(PermissionError):
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name.encode())
        for choice in (b"cubic", b"reno"):
            with contextlib.suppress(OSError):
                stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, choice)
                break
        stream.bind((address, 0))
        stream.settimeout(CONNECT_S)
        stream.connect(target)
        stream.sendall(card[6:])
    except OSError as error:
        stream.close()
        raise OSError(f"{name}: no stream to {target[0]}: {error}") from None
    return stream


def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """The stream that shows the token; strangers are turned away until the time is up."""
    give_up = time.monotonic() + CONNECT_S
    while True:
        listener.settimeout(max(0.01, give_up - time.monotonic()))
        stream, _ = listener.accept()
        stream.settimeout(max(0.01, give_up - time.monotonic()))
        shown = b""
        with contextlib.suppress(OSError):
            while len(shown) < len(token):
                part = stream.recv(len(token) - len(shown))
                if not part:
                    break
                shown += part
        if hmac.compare_digest(shown, token):
            stream.settimeout(CONNECT_S)
            return stream
        stream.close()


def _stream(
    outgoing: list[socket.socket], incoming: list[socket.socket], seconds: float
) -> tuple[list[float], int, float, str]:
    """(bytes per second received per rail, bytes sent, CPU seconds, what failed)."""
    rates = [0.0] * len(incoming)
    sent = [0] * len(outgoing)
    begin = time.monotonic() + WARM_S
    end = begin + seconds

    def send(rail: int) -> None:
        block = mmap.mmap(-1, BUFFER_BYTES)
        stream = outgoing[rail]
        while time.monotonic() < end + 0.1:  # go on past the receiver's window
            sent[rail] += stream.send(block)
        stream.shutdown(socket.SHUT_WR)

    def receive(rail: int) -> None:
        rates[rail] = _receive(incoming[rail], begin, end)

    before = time.process_time()
    failure = _run_all(
        [
            *((send, rail) for rail in range(len(outgoing))),
            *((receive, rail) for rail in range(len(incoming))),
        ]
    )
    return rates, sum(sent), time.process_time() - before, failure


def _receive(stream: socket.socket, begin: float, end: float) -> float:
    """Read to the end of the stream; bytes per second between the two moments."""
    block = mmap.mmap(-1, BUFFER_BYTES)
    total = first = last = 0
    first_at = last_at = 0.0
    while got := stream.recv_into(block):
        now = time.monotonic()
        total += got
        if not first_at and now >= begin:
            first, first_at = total, now
        elif first_at and not last_at:
            last = total
            last_at = now if now >= end else 0.0
    return (last - first) / ((last_at or end) - first_at) if first_at else 0.0


def _run_all(jobs: list[tuple[Callable[[int], None], int]]) -> str:
    """Run each job in a thread of its own; returns the first error in words, or nothing."""
    failures: list[str] = []

    def guarded(job: Callable[[int], None], rail: int) -> None:
        try:
            job(rail)
        except OSError as error:
            failures.append(f"a stream of rail {rail} broke: {error}")

    threads = [threading.Thread(target=guarded, args=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures[0] if failures else ""
