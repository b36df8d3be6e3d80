"""Ranks that work in rounds, and go on without who is lost or late."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from faults.rank import Rank

import ringcomm
from ringcomm.membership import Membership, Round

STOP = b"stop"


def work(
    rank: Rank,
    grace_s: float = 30.0,
    min_peers: int | None = None,
    work_s: float = 0.0,
    count: int = 1 << 16,
    rejoin: bool = False,
    hosts: tuple[str, ...] = (),
    timeout: float = 60.0,
    hold: int = -1,
    forks: bool = False,
) -> None:
    """Round after round, until somebody is told to stop. What they work on is a sum that is the
    same on all members: each round adds the sum of the members' numbers, and one. In round
    ``hold`` this rank waits until it is told to go on, before its first collective. With ``forks``
    it has a child, which lives until the test is over."""
    with Membership(
        grace_s=grace_s,
        min_peers=min_peers,
        rejoin=rejoin,
        hosts=hosts,
        config=ringcomm.Config.from_env(timeout=timeout),
    ) as membership:
        state, number, told = np.zeros(1), 0, False

        def agree(how: Callable[..., Round], *arguments: Any) -> Round | None:
            """None: the job cannot go on, and the test is told why."""
            began = time.monotonic()
            try:
                return how(*arguments)
            except ringcomm.RingcommError as error:
                rank.emit(
                    "failed",
                    kind=type(error).__name__,
                    text=str(error),
                    took=time.monotonic() - began,
                )
                return None

        if forks and os.fork() == 0:
            os.read(0, 1)
            os._exit(0)
        rank.emit("ready")
        while True:
            began = time.monotonic()
            told = told or (rank.events != 1 and hold < 0 and not forks and rank.was_told())
            round_ = agree(membership.begin_round, number, STOP if told else b"")
            if round_ is None:
                return
            waited = time.monotonic() - began
            values = np.full(count, membership.rank + 1.0)
            while True:
                try:
                    if number == hold:
                        rank.emit("holds")
                        rank.wait_for_go()
                        hold = -1
                    result = values.copy()
                    if round_.joined:
                        membership.comm.broadcast(state, root=round_.leader)
                    membership.comm.allreduce(result)
                    membership.end_round()
                    break
                except ringcomm.RingcommError as error:
                    rank.emit("lost", kind=type(error).__name__, text=str(error), rank=error.rank)
                    round_ = agree(membership.lost, error)
                    if round_ is None:
                        return
            assert np.all(result == result[0])
            state += result[0] + 1
            number = round_.number + 1
            rank.emit(
                "round",
                number=round_.number,
                members=round_.members,
                left=round_.left,
                joined=round_.joined,
                leader=round_.leader,
                is_new=round_.is_new,
                tokens=[token.decode() for token in round_.tokens],
                waited=waited,
                state=float(state[0]),
            )
            if STOP in round_.tokens:
                return
            time.sleep(work_s)


def alone() -> None:
    """The same without a test that listens, as a program of its own."""
    work(Rank(1), grace_s=1.0, work_s=0.05)
