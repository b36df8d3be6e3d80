"""What RINGCOMM_LOG tells, and that nothing is told without it."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator

import numpy as np
import pytest
from ranks import World, run_processes

import ringcomm
from ringcomm import Config, ConfigError, MismatchError, config

pytestmark = pytest.mark.usefixtures("nothing_left")

JOB = """
    import numpy as np, ringcomm
    comm = ringcomm.init(config=ringcomm.Config(lanes=2))
    part = comm.split(0)
    part.close()
    try:
        comm.allreduce(np.ones(1 + comm.rank))
    except ringcomm.MismatchError:
        print("refused")
    ringcomm.shutdown()
"""


@contextlib.contextmanager
def bare_logger() -> Iterator[logging.Logger]:
    """The logger as it is in a process that has not set it up."""
    logger = logging.getLogger("ringcomm")
    level, handlers = logger.level, logger.handlers[:]
    logger.handlers.clear()
    logger.propagate = False  # the tests' own handlers are the root's
    logger.setLevel(logging.NOTSET)
    try:
        yield logger
    finally:
        logger.propagate = True
        logger.handlers[:] = handlers
        logger.setLevel(level)


def test_a_job_that_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGCOMM_KERNEL_SET", raising=False)
    first, second = run_processes(2, JOB, env={"RINGCOMM_LOG": "info", "RINGCOMM_TIMEOUT": "21"})
    assert (first.stdout, second.stdout) == ("refused\n", "refused\n")
    for says in (
        r"INFO: 2 ranks: 0-1 on \S+\n",
        r"  rail 0: lo 127\.0\.0\.1, of unknown speed\n",
        r"shared memory: yes; algorithms: model; congestion control: (cubic|reno); kernels: \w+\n",
        r"  compression: none but where a call names one\n",
        r"  settings: lanes=2 \(argument\), timeout=21 \(RINGCOMM_TIMEOUT\)\n",
        r"INFO: another communicator, \S+/1:0,1: 2 ranks\n",
        r"INFO: MismatchError: allreduce\(f64\[\d\]\) #\d+ failed on rank 0 ",
        r"INFO: rank 0 of 2 closes after \d+\.\d s: \d+ works, \d+ bytes sent over links, ",
    ):
        assert re.search(says, first.stderr), f"{says}\n{first.stderr}"
    assert first.stderr.count("settings:") == 1
    assert "settings:" not in second.stderr
    assert "MismatchError" in second.stderr


def test_nothing_is_told_without_it() -> None:
    for one in run_processes(2, JOB):
        assert (one.stdout, one.stderr) == ("refused\n", "")


def test_a_failure_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: ringcomm.Communicator) -> None:
        for _ in range(3):
            with pytest.raises(MismatchError):
                comm.allreduce(np.ones(1 + comm.rank))

    with caplog.at_level(logging.INFO, "ringcomm"), World(2) as world:
        world.run(body)
    assert sum("MismatchError" in message for message in caplog.messages) == 2  # of two ranks


def test_a_handler_is_added_only_where_there_is_none() -> None:
    with bare_logger() as bare:
        config.set_up_logging({})
        assert (bare.handlers, bare.level) == ([], logging.NOTSET)
        config.set_up_logging({"RINGCOMM_LOG": "Debug"})
        config.set_up_logging({"RINGCOMM_LOG": "warning"})
        assert (len(bare.handlers), bare.level) == (1, logging.WARNING)
        bare.handlers.clear()
        bare.propagate = True  # to the handlers of who runs the tests
        config.set_up_logging({"RINGCOMM_LOG": "info"})
        assert (bare.handlers, bare.level) == ([], logging.INFO)


@pytest.mark.parametrize(("level", "says"), [("inf", "did you mean info"), ("3", "give one of")])
def test_a_bad_level_is_named(level: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "RINGCOMM_LOG", level)
    with pytest.raises(ConfigError, match=f"RINGCOMM_LOG='{level}': .*{says}"):
        Config()
