"""One fault on an emulated cluster at a time, and what every rank made of it.

A Cluster is a netlab whose hosts have a worker each (fault_rank.py). A trial forks the ranks,
waits until all are in the phase in which the fault shall come, breaks one port, and takes down when
each rank's exception came and what it said. Then the port is mended for the next trial.

Invariants: no rank of a trial lives when run() returns; leaving the ``with`` block removes workers,
namespaces and files; nothing waits without a limit, and everything ends soon after ``stop`` is set.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from lab.cluster import MASTER_PORT, NetLab
from lab.events import listening
from lab.job import Job

FAULTS = {
    "cut": "the port is set down on its host",
    "unplug": "the switch's end goes down: the port has no carrier",
    "blackhole": "the switch drops what comes from the port and goes to it; the carrier stays",
    "flush": "the port loses its address; the link stays",
    "mute": "what the host sends to one other by the port is lost; all else arrives",
}
PHASES = ("idle", "small", "64 MB", "split", "bring-up")

_START_S = 120.0  # for what is not under test, on a busy machine
_PORTS_APART = 16  # of one trial's rendezvous from the next one's
_DELAY_S = {"bring-up": 0.3}  # the fault comes at a random moment within; 0.6 unless given; if that
# was too late, within half of it, and so on
_TRIES = 5


class StoppedError(Exception):
    """The command is to end."""


class VoidError(Exception):
    """A trial that says nothing: the phase was over, or something failed, before the fault."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A fault at a place, in a phase.

    Attributes:
        ports: of each host.
        world: ranks, of which each has a host.
        fault: a key of FAULTS.
        host, nic: whose port.
        to: with "mute", the host that hears nothing; else -1.
        number: of its repetition.
    """

    ports: int
    world: int
    phase: str
    fault: str
    host: int
    nic: int
    to: int
    number: int

    @property
    def key(self) -> str:
        """Names it among all trials."""
        return " ".join(str(value) for value in dataclasses.astuple(self))

    def hurts(self, rank: int, peer: int, rail: int) -> bool:
        """Whether the lanes of this rank to that peer, on this rail, are hit."""
        ends = {rank, peer}
        hit = ends == {self.host, self.to} if self.to >= 0 else self.host in ends
        return hit and rail == self.nic

    def __str__(self) -> str:
        at = f"{self.fault} host{self.host} eth{self.nic}"
        to = f" to host{self.to}" if self.to >= 0 else ""
        return f"{self.world} hosts x {self.ports}, {self.phase}: {at}{to}"


@dataclasses.dataclass
class _Rank:
    """What one rank has said in a trial."""

    events: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    wrong: int = 0

    def said(self, event: str) -> bool:
        return event in self.events

    @property
    def lanes(self) -> list[list[int]]:
        lanes: list[list[int]] = self.events.get("opened", {}).get("lanes", [])
        return lanes


class Cluster:
    """``world`` hosts with ``ports`` ports each; a context manager.

    Args:
        mbit: rate of every port.
        stop: ends whatever is going on, with StoppedError.
    """

    def __init__(self, world: int, ports: int, mbit: float, stop: threading.Event) -> None:
        self.world, self.ports = world, ports
        self._lab = NetLab(world, [mbit] * ports)
        self._stop = stop
        self._stack = contextlib.ExitStack()
        self._workers: list[socket.socket] = []
        self._ranks: list[_Rank] = []
        self._job: Job | None = None
        self._trials = 0

    # ---- life ----

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            path, listener = stack.enter_context(listening(self.world, _START_S))
            stack.enter_context(self._lab)
            program = Path(__file__).with_name("fault_rank.py")
            self._job = self._lab.start([sys.executable, str(program), path], quiet=True)
            self._workers = self._accept(listener, stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _accept(self, listener: socket.socket, stack: contextlib.ExitStack) -> list[socket.socket]:
        """The workers' connections by rank."""
        by_rank: dict[int, socket.socket] = {}
        while len(by_rank) < self.world:
            try:
                worker = stack.enter_context(listener.accept()[0])
            except TimeoutError:
                raise RuntimeError(f"the ranks do not start: {self._printed()}") from None
            worker.settimeout(_START_S)
            by_rank[json.loads(worker.recv(1 << 16))["rank"]] = worker
        return [by_rank[rank] for rank in range(self.world)]

    def _printed(self) -> str:
        """What the processes of this cluster wrote."""
        assert self._job is not None
        return " ".join(self._job.output(rank) for rank in range(self.world))[-2000:]

    # ---- a trial ----

    def run(
        self, trial: Trial, settings: dict[str, Any], seed: str, limit: float
    ) -> dict[str, Any]:
        """The trial's row: settings, and per rank when it failed, and with what.

        Args:
            settings: of ringcomm, for all ranks.
            seed: decides the moment of the fault.
            limit: seconds after the fault at which ranks that have not failed are given up.

        Raises VoidError when it did not come to the fault in several tries.
        """
        for attempt in range(_TRIES):
            try:
                chance = random.Random(f"{seed} {trial.key} {attempt}")
                delay = chance.uniform(0.0, _DELAY_S.get(trial.phase, 0.6) / (1 << attempt))
                return self._try(trial, settings, delay, limit)
            except VoidError as void:
                reason = void
        raise reason

    def _try(
        self, trial: Trial, settings: dict[str, Any], delay: float, limit: float
    ) -> dict[str, Any]:
        self._begin(trial.phase, settings)
        try:
            ready = "starting" if trial.phase == "bring-up" else "ready"
            if not self._pump(
                lambda: all(r.said(ready) or r.said("failed") for r in self._ranks), _START_S
            ):
                raise VoidError(f"{trial}: the ranks did not come so far: {self._printed()}")
            self._pump(lambda: False, delay)
            self._check_before(trial)
            hit = time.monotonic()
            getattr(self._lab, trial.fault)(
                trial.host, trial.nic, *([trial.to] if trial.to >= 0 else [])
            )
            self._pump(lambda: self._over(trial), limit)
        finally:
            codes = self._end()
            self._mend(trial)
        return {
            "trial": dataclasses.asdict(trial),
            "settings": settings,
            "delay": round(delay, 3),
            "ranks": [self._report(rank, hit, codes[rank]) for rank in range(self.world)],
        }

    def _begin(self, phase: str, settings: dict[str, Any]) -> None:
        self._ranks = [_Rank() for _ in range(self.world)]
        port = MASTER_PORT + self._trials % 256 * _PORTS_APART
        self._trials += 1
        order = {
            "do": "run",
            "phase": phase,
            "settings": settings,
            "environment": {"MASTER_PORT": str(port)},
        }
        for worker in self._workers:
            worker.send(json.dumps(order).encode())

    def _check_before(self, trial: Trial) -> None:
        """Raises VoidError if the trial's moment has passed, or the ranks were not well before."""
        for rank in self._ranks:
            if rank.said("failed"):
                raise VoidError(f"{trial}: failed before: {rank.events['failed']['text']}")
        everything = (self.world - 1) * self.ports
        if trial.phase == "bring-up":
            if all(rank.said("opened") for rank in self._ranks):
                raise VoidError(f"{trial}: all were in before the fault came")
        elif any(len(rank.lanes) < everything for rank in self._ranks):
            raise VoidError(f"{trial}: not all lanes were made")

    def _over(self, trial: Trial) -> bool:
        """Whether nothing more is to be expected: all have failed, or go on without the port."""
        if all(rank.said("failed") for rank in self._ranks):
            return True
        return trial.phase == "bring-up" and all(
            rank.said("going")
            and not rank.said("failed")
            and not any(trial.hurts(me, peer, rail) for peer, rail in rank.lanes)
            for me, rank in enumerate(self._ranks)
        )

    def _report(self, number: int, hit: float, code: int) -> dict[str, Any]:
        rank = self._ranks[number]
        after = {event: round(said["at"] - hit, 4) for event, said in rank.events.items()}
        failed = {
            name: value
            for name, value in rank.events.get("failed", {}).items()
            if name not in ("event", "at", "logged")
        }
        logged = [line for said in rank.events.values() for line in said["logged"]]
        return {
            "after": after,
            "error": failed,
            "lanes": rank.lanes,
            "logged": list(dict.fromkeys(logged)),
            "wrong": rank.wrong,
            "code": code,
        }

    def _end(self) -> dict[int, int]:
        """Ends the ranks; their exit codes."""
        for worker in self._workers:
            worker.send(json.dumps({"do": "end"}).encode())
        codes: dict[int, int] = {}
        for number, worker in enumerate(self._workers):
            while number not in codes:
                data = worker.recv(1 << 20)
                if not data:
                    raise RuntimeError(f"a worker is gone: {self._printed()}")
                message = json.loads(data)
                if message["event"] == "ended":
                    codes[number] = message["code"]
        return codes

    def _mend(self, trial: Trial) -> None:
        self._lab.restore(trial.host, trial.nic)
        deadline = time.monotonic() + _START_S
        while not self._lab.is_up(trial.host, trial.nic):
            if time.monotonic() > deadline:
                raise RuntimeError(f"host{trial.host} eth{trial.nic} does not come up again")
            time.sleep(0.02)

    def _pump(self, done: Callable[[], bool], within: float) -> bool:
        """Takes the ranks' events until done(), or for so long; whether it was done."""
        deadline = time.monotonic() + within
        while not done():
            left = deadline - time.monotonic()
            if self._stop.is_set():
                raise StoppedError
            if left <= 0:
                return False
            for worker in select.select(self._workers, [], [], min(left, 0.2))[0]:
                self._take(worker)
        return True

    def _take(self, worker: socket.socket) -> None:
        data = worker.recv(1 << 20)
        if not data:
            raise RuntimeError(f"a worker is gone: {self._printed()}")
        message = json.loads(data)
        rank = self._ranks[self._workers.index(worker)]
        if message["event"] == "wrong":
            rank.wrong += 1
        rank.events.setdefault(message["event"], message)
