"""The physical floor of a site, as a rank program: what bare sockets and memory do there.

    half round trip   two ranks throw a message to and fro, polling, the others idle
    duplex stream     every rank sends to its right neighbour and receives from its left, all at
                      once, each with one polling thread; the rank that receives least counts
    memory copy       every rank copies a buffer, all at once: one larger than any cache, one of
                      1 MiB that stays in them, and one that its neighbour has just written

peers.py starts it between the libraries' jobs, once a round, so that it meets the same machine.
Sockets and buffers are driven from Python, which shows in the half round trip of a small message,
so a library in C may pass that. Where links are the limit the stream bounds every library that
uses TCP; where the CPU is, it is what one thread per rank moves in pieces of 1 MiB, and a library
that keeps a message in its cache may pass it.

Invariants: the streams are made as the floor of sweep.py makes them (floor.py), with the
congestion control that the site pins. Rank 0 writes the figures, as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import mmap
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from measure.control import Star, address_of
from measure.floor import BUFFER_BYTES, WARM_S, FloorError, connect

PING_BYTES = (4, 4096, 65536)
COPY_BYTES = 64 << 20
NEAR_BYTES = 1 << 20
HANDED_BYTES = 512 << 10  # what two ranks hand over of NEAR_BYTES at once
_HANDED_TURNS = 40
_SHARED = Path("/dev/shm")  # which no disk has to do with
_TURNS = 400  # of ping-pong: some 10 ms where the ranks have a core each


@dataclasses.dataclass(frozen=True)
class Physical:
    """The floor of one round.

    Attributes:
        half_trip_us: microseconds of half a round trip by bytes of the message (median).
        stream: GB/s into the rank that received least, over all ports, while all ranks send.
        stream_cpu: CPU seconds of all ranks per GB sent.
        copy: GB/s of the slowest rank's memory copy (bytes copied, not read plus written).
        copy_near: the same of a buffer that stays in the caches.
        copy_handed: the same of one that the neighbour has just written, in memory that they share.
        congestion: congestion control of the streams.
    """

    half_trip_us: dict[int, float]
    stream: float
    stream_cpu: float
    copy: float
    copy_near: float
    copy_handed: float
    congestion: str

    @classmethod
    def read(cls, path: Path) -> Physical:
        """What main() wrote."""
        document = json.loads(path.read_text())
        trips = {int(size): us for size, us in document.pop("half_trip_us").items()}
        return cls(half_trip_us=trips, **document)


def measure(control: Star, rails: list[tuple[str, str]], seconds: float, wanted: str) -> Physical:
    """All of it, called by all ranks; the same figures on all. Raises FloorError on all."""
    with contextlib.ExitStack() as stack:
        right, left = _open(control, rails, wanted, stack)
        used = right[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        for stream in (*right, *left):
            stream.setblocking(False)
        trips = {size: _ping_pong(control, right[0], left[0], size) for size in PING_BYTES}
        control.barrier()
        rate, sent, cpu = _duplex(right, left, seconds)
        control.barrier()
    copied = [_copy_rate(size, seconds / 8) for size in (COPY_BYTES, NEAR_BYTES)]
    copied.append(_handed_rate(control))
    table = control.gather(np.array([rate, sent, cpu, *copied]))
    everyone = control.gather(np.array([*trips.values()]))
    return Physical(
        half_trip_us=dict(zip(trips, map(float, everyone[0] * 1e6), strict=True)),
        stream=float(table[:, 0].min() / 1e9),
        stream_cpu=float(table[:, 2].sum() / max(1.0, table[:, 1].sum()) * 1e9),
        copy=float(table[:, 3].min() / 1e9),
        copy_near=float(table[:, 4].min() / 1e9),
        copy_handed=float(table[:, 5].min() / 1e9),
        congestion=used.rstrip(b"\0").decode(),
    )


def _open(
    control: Star, rails: list[tuple[str, str]], wanted: str, stack: contextlib.ExitStack
) -> tuple[list[socket.socket], list[socket.socket]]:
    """Streams to the right and from the left, a pair per rail."""
    try:
        right, left = connect(control, rails, True, stack)
    except FloorError:  # ports of one subnet that answer for each other lose bound streams
        right, left = connect(control, rails, False, stack)
    for stream in (*right, *left):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, wanted.encode())
    return right, left


def _ping_pong(control: Star, right: socket.socket, left: socket.socket, size: int) -> float:
    """Seconds of half a round trip between rank 0 and its right neighbour; 0 on the others.

    A stream carries both ways, so rank 0's right and rank 1's left are one.
    """
    control.barrier()
    if control.rank > 1:
        return 0.0
    stream = right if control.rank == 0 else left
    block = memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE)))[:size]
    halves = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        if control.rank == 0:
            _push(stream, block)
        _pull(stream, block)
        if control.rank == 1:
            _push(stream, block)
        halves.append((time.perf_counter() - began) / 2)
    return float(np.median(halves))


def _push(stream: socket.socket, block: memoryview) -> None:
    at = 0
    while at < len(block):
        with contextlib.suppress(BlockingIOError):
            at += stream.send(block[at:])


def _pull(stream: socket.socket, block: memoryview) -> None:
    at = 0
    while at < len(block):
        try:
            got = stream.recv_into(block[at:])
        except BlockingIOError:
            continue
        if not got:
            raise ConnectionError("the neighbour has left")
        at += got


def _duplex(
    right: list[socket.socket], left: list[socket.socket], seconds: float
) -> tuple[float, int, float]:
    """(bytes per second received after the warm-up, bytes sent, CPU seconds)."""
    out, into = mmap.mmap(-1, BUFFER_BYTES), mmap.mmap(-1, BUFFER_BYTES)
    began, cpu = time.monotonic(), time.process_time()
    begin, end = began + WARM_S, began + WARM_S + seconds
    sent = received = first = 0
    first_at = now = began
    while now < end:
        moved = 0
        for stream in right:
            with contextlib.suppress(BlockingIOError):
                moved += (done := stream.send(out))
                sent += done
        for stream in left:
            with contextlib.suppress(BlockingIOError):
                moved += (done := stream.recv_into(into))
                received += done
        if not moved:  # the ports are the limit: leave the core to the others
            select.select(left, right, [], 0.01)
        now = time.monotonic()
        if now < begin:
            first, first_at = received, now
    return (received - first) / (now - first_at), sent, time.process_time() - cpu


def _copy_rate(size: int, seconds: float) -> float:
    """Bytes per second of copying a buffer of this size; the median of the copies."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)  # both touched
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return float(size / np.median(times))


def _handed_rate(control: Star) -> float:
    """Bytes per second of copying what another core's cache holds; the median of the copies."""
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    os.sched_setaffinity(0, [cores[control.rank % len(cores)]])  # never its neighbour's
    try:
        return _hand_round(control, _shared(control).reshape(control.world, HANDED_BYTES))
    finally:
        os.sched_setaffinity(0, allowed)


def _hand_round(control: Star, parts: np.ndarray) -> float:
    mine, theirs = parts[control.rank], parts[(control.rank + 1) % control.world]
    target, times = np.ones(HANDED_BYTES, np.uint8), []
    for turn in range(_HANDED_TURNS):
        mine[:] = turn
        control.barrier()
        began = time.perf_counter()
        np.copyto(target, theirs)
        times.append(time.perf_counter() - began)
        control.barrier()
    return float(HANDED_BYTES / np.median(times))


def _shared(control: Star) -> np.ndarray:
    """HANDED_BYTES of each rank in memory that all see; nothing of it is left when they end."""
    token = control.gather(np.frombuffer(os.urandom(8), np.uint8))[0].tobytes().hex()
    folder = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    path = folder / f"floor-{token}"
    if control.rank == 0:
        path.touch(0o600)
        os.truncate(path, control.world * HANDED_BYTES)
    control.barrier()
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
    control.barrier()
    if control.rank == 0:
        path.unlink()
    return memory


def main(argv: Sequence[str] | None = None) -> int:
    """The rank program; returns its exit code."""
    parser = argparse.ArgumentParser(prog="physical.py", description="The physical floor.")
    parser.add_argument("--seconds", type=float, default=1.0, help="of the stream")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(argv)
    names = os.environ["RINGCOMM_INTERFACES"].split(",")
    try:
        control = Star()
        rails = [(name, address_of(name)) for name in names]
        found = measure(control, rails, options.seconds, options.congestion)
    except (OSError, FloorError) as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 1
    if control.rank == 0:
        options.json.write_text(json.dumps(dataclasses.asdict(found)) + "\n")
    control.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
