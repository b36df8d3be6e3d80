"""Ranks that join in different ways, some of which cannot work."""

from __future__ import annotations

import dataclasses
import datetime
import os
import resource
import signal
import threading
from typing import Any

import numpy as np
from faults.rank import Rank
from patience import PATIENCE
from ports import free_port

import ringcomm
from ringcomm.bootstrap import lanes, mesh


def _check(rank: Rank, comm: ringcomm.Communicator, tag: int = 1) -> None:
    # Sums of these are exact in bf16, which has 8 significant bits.
    tensor = np.full(100_003, tag * (comm.rank + 1), dtype=np.float32)
    comm.allreduce(tensor, compression="bf16")
    expected = tag * comm.world_size * (comm.world_size + 1) / 2
    rank.emit(
        "joined", right=bool((tensor == expected).all()), rank=comm.rank, world_size=comm.world_size
    )


def explicit(rank: Rank, address: str) -> None:
    """Joins by arguments alone."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    _check(rank, ringcomm.init(rank.number, rank.world_size, init_method=address))
    ringcomm.shutdown()


def by_environment(rank: Rank, tag: int) -> None:
    """Joins as under torchrun."""
    _check(rank, ringcomm.init(), tag)
    ringcomm.shutdown()


def by_store(rank: Rank, port: int) -> None:
    """Joins over a torch Store that rank 0 serves until all are in, which the sum shows."""
    from torch.distributed import TCPStore

    wait = datetime.timedelta(seconds=PATIENCE)
    store = TCPStore("127.0.0.1", port, rank.world_size, rank.number == 0, wait)
    _check(rank, ringcomm.init(store=store))
    ringcomm.shutdown()


def badly(rank: Rank, arguments: list[dict[str, Any]], settings: list[dict[str, Any]]) -> None:
    """init with the arguments and settings at this rank's number, and once more as it should be."""
    config = ringcomm.Config(**settings[rank.number])
    rank.attempt("refused", lambda: ringcomm.init(**arguments[rank.number], config=config))
    rank.emit("left", initialized=ringcomm.is_initialized())
    rank.wait_for_go()
    good = dataclasses.replace(config, interfaces=(), lanes=1, secret_file="", connect_timeout=30.0)
    _check(rank, ringcomm.init(config=good))
    ringcomm.shutdown()


def with_secrets(rank: Rank, secrets: list[str | None], timeout: float) -> None:
    """Joins with the secret at this rank's number in the environment."""
    secret = secrets[rank.number]
    if secret is not None:
        os.environ["RINGCOMM_SECRET"] = secret
    rank.attempt("refused", lambda: _check(rank, ringcomm.init(timeout=timeout)))
    ringcomm.shutdown()


def _die_among_lanes(rank: Rank, who: int) -> None:
    """Rank who is killed when it is about to connect to the others."""

    def run(*_arguments: Any) -> None:
        rank.emit("dies")
        os.kill(os.getpid(), signal.SIGKILL)

    if rank.number == who:
        lanes.LaneMaker.run = run  # type: ignore[method-assign]


def dies_in_init(rank: Rank, who: int) -> None:
    """A rank dies while init makes the lanes."""
    _die_among_lanes(rank, who)
    rank.attempt("told", ringcomm.init)


def dies_in_split(rank: Rank, who: int) -> None:
    """A rank dies while split makes the lanes."""
    comm = ringcomm.init()
    comm.barrier()
    _die_among_lanes(rank, who)
    rank.attempt("told", lambda: comm.split(0))
    ringcomm.shutdown()


def with_few_descriptors(rank: Rank, who: int, left: int, timeout: float) -> None:
    """Rank who may open only so many more files."""
    if rank.number == who:
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + left, used + left))
    rank.attempt("refused", lambda: ringcomm.init(timeout=timeout))
    rank.attempt("closed", ringcomm.shutdown)


def _import_all() -> None:
    """What a process imports while it joins others, by joining two ranks of its own."""
    address = f"tcp://127.0.0.1:{free_port()}"

    def one(number: int) -> None:
        with ringcomm.Communicator.create(number, 2, init_method=address) as comm:
            comm.allreduce(np.ones(4), compression="bf16")
            comm.barrier()

    threads = [threading.Thread(target=one, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def as_users(rank: Rank, uids: list[int], timeout: float, insecure: bool = False) -> None:
    """Joins as the user at this rank's number, who may not be allowed to read what is imported."""
    mesh._version = lambda: "the tests'"
    _import_all()
    uid = uids[rank.number]
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    config = ringcomm.Config.from_env(insecure=insecure, connect_timeout=timeout)
    rank.emit("here")
    rank.wait_for_go()
    rank.attempt("refused", lambda: _check(rank, ringcomm.init(config=config)))
    ringcomm.shutdown()


def twice(rank: Rank) -> None:
    """init a second time, use after shutdown, and a second life after that."""
    rank.attempt("before", ringcomm.barrier)
    comm = ringcomm.init()
    rank.attempt("twice", ringcomm.init)
    _check(rank, comm)
    ringcomm.shutdown()
    rank.attempt("after", lambda: ringcomm.allreduce(np.ones(4)))
    rank.attempt("closed", lambda: comm.allreduce(np.ones(4)))
    ringcomm.shutdown()
    _check(rank, ringcomm.init())
    ringcomm.shutdown()
