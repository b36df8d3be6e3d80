"""Ranks of the reference trainer: its command, and runs of which one rank may be killed amid a
step."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch._dynamo  # noqa: F401 (which DDP imports when it is first used)
from faults.rank import Rank

from ringcomm.train import launcher
from ringcomm.train.__main__ import main
from ringcomm.train.command_line import parse
from ringcomm.train.distributed import join
from ringcomm.train.engine import Engine
from ringcomm.train.run import train


def command(rank: Rank, arguments: list[str]) -> None:
    """What ``python -m ringcomm.train`` does, exit code and all."""
    sys.exit(main(arguments))


def run(rank: Rank, arguments: list[str], dies_in: int | None = None) -> None:
    """The trainer, in one thread: it sums alike on all machines. Rank 1 dies by SIGKILL when it is
    about to go backward in that step."""
    launcher.default_threads = lambda: 1
    step = Engine.train_step

    def train_step(engine: Engine, number: int, *rest: Any) -> Any:
        if number == dies_in and rank.number == 1:
            engine.model.register_full_backward_hook(
                lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            )
        return step(engine, number, *rest)

    Engine.train_step = train_step  # type: ignore[method-assign]
    options = parse(arguments)

    def whole() -> None:
        with join(options) as world:
            train(options, world)

    rank.attempt("over", whole)
    os._exit(0)
