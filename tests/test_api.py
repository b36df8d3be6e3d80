"""The module's functions and their one default communicator: a life from init to exit.

A process has one default communicator, so ranks are processes here, or a world of one.
"""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from patience import PATIENCE, PROMPT, SILENCE
from ports import free_port
from ranks import World, run_processes, run_ranks, start_process

import ringcomm
from ringcomm import (
    AbortedError,
    AuthenticationError,
    BootstrapError,
    CommTimeoutError,
    Communicator,
    Config,
    ConfigError,
    DeviceError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ProtocolError,
    RingcommError,
    TensorError,
    api,
    communicator,
)
from ringcomm.bootstrap.handshake_params import Outcome, RefusedError
from ringcomm.membership.formation import FormationError

pytestmark = pytest.mark.usefixtures("nothing_left")

LOUD = {"RINGCOMM_PEER_TIMEOUT": str(SILENCE)}
"""For processes of which none may end by the silence of another."""


@pytest.fixture
def alone() -> Iterator[Communicator]:
    """The default communicator of a world of one."""
    yield ringcomm.init()
    ringcomm.shutdown()


# ---- init and shutdown ----


def test_a_life(alone: Communicator) -> None:
    assert ringcomm.is_initialized()
    assert ringcomm.default_communicator() is alone
    assert (ringcomm.rank(), ringcomm.world_size()) == (0, 1)
    ringcomm.shutdown()
    assert not ringcomm.is_initialized()
    ringcomm.shutdown()
    again = ringcomm.init(0, 1, config=Config(lanes=2))
    assert again is not alone
    assert again.config.lanes == 2


def test_init_twice(alone: Communicator) -> None:
    with pytest.raises(RingcommError, match=r"init was called before; call ringcomm.shutdown\(\)"):
        ringcomm.init()
    assert ringcomm.default_communicator() is alone
    assert ringcomm.allreduce(np.ones(2)).tolist() == [1, 1]


def test_a_closed_default_communicator_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with ringcomm.init():
        pass
    assert not ringcomm.is_initialized()
    with pytest.raises(NotInitializedError, match=r"call ringcomm.init\(\) first"):
        ringcomm.rank()
    with ringcomm.init() as again:
        assert ringcomm.default_communicator() is again
    with Communicator.create() as group:
        monkeypatch.setattr(api, "_fallback", lambda: group)
        assert ringcomm.default_communicator() is group
        assert ringcomm.allreduce(np.ones(2)).tolist() == [1, 1]


class NullCommunicator:
    """Raises as mpi4py's COMM_NULL does; importing that would start MPI in this process."""

    def Get_rank(self) -> int:  # noqa: N802
        raise RuntimeError("MPI_ERR_COMM: invalid communicator")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"rank": 2, "world_size": 2, "init_method": "tcp://127.0.0.1:1"}, "does not fit"),
        ({"rank": 0}, "world_size is missing"),
        ({"rank": 0, "world_size": 2}, "MASTER_ADDR and MASTER_PORT"),
        ({"rank": 0, "world_size": 2, "init_method": "udp://x"}, "tcp://host:port"),
        ({"mpi": object()}, "mpi= takes an mpi4py communicator"),
        ({"mpi": object(), "rank": 0}, "mpi= already says who is who"),
        ({"mpi": NullCommunicator()}, "that this process belongs to: MPI_ERR_COMM"),
        ({"config": Config(kernel_set="mmx")}, "kernel_set='mmx': this CPU and build have scalar"),
        (
            {
                "rank": 0,
                "world_size": 2,
                "init_method": "tcp://127.0.0.1:1",
                "config": Config(kernel_set="mmx"),
                "timeout": 0.1,
            },
            "kernel_set='mmx'",  # before it meets others
        ),
    ],
)
def test_init_with_what_cannot_work(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ringcomm.init(**arguments)
    assert not ringcomm.is_initialized()
    ringcomm.init()
    ringcomm.shutdown()


def test_init_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "12")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    try:
        assert ringcomm.init().config.timeout == 12
    finally:
        ringcomm.shutdown()
    monkeypatch.setenv("RINGCOMM_TIMEOUT", "long")
    with pytest.raises(ConfigError, match="RINGCOMM_TIMEOUT='long'"):
        ringcomm.init()


def test_an_absent_rank_is_named_in_time() -> None:
    began = time.monotonic()
    with pytest.raises(BootstrapError, match="rank 1"):
        ringcomm.init(0, 2, init_method=f"tcp://127.0.0.1:{free_port()}", timeout=0.5)
    assert 0.4 < time.monotonic() - began < 0.5 + PROMPT
    assert not ringcomm.is_initialized()


def test_a_signal_handler_may_call_shutdown_within_init(monkeypatch: pytest.MonkeyPatch) -> None:
    join = communicator.join

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return join(*arguments)

    def handle(*_: object) -> None:
        with pytest.raises(RingcommError, match="init was called before"):
            ringcomm.init(0, 1)
        ringcomm.shutdown()

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(communicator, "join", interrupted)
            with pytest.raises(RingcommError, match="shutdown was called while"):
                ringcomm.init(0, 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not ringcomm.is_initialized()
    with ringcomm.init(0, 1):
        ringcomm.shutdown()


# ---- the default functions ----

CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": lambda **k: ringcomm.allreduce(np.ones(2), **k),
    "broadcast": lambda **k: ringcomm.broadcast(np.ones(2), **k),
    "reduce": lambda **k: ringcomm.reduce(np.ones(2), **k),
    "allgather": lambda **k: ringcomm.allgather(np.ones(2), **k),
    "gather": lambda **k: ringcomm.gather(np.ones(2), **k),
    "scatter": lambda **k: ringcomm.scatter(np.ones((1, 2)), **k),
    "reduce_scatter": lambda **k: ringcomm.reduce_scatter(np.ones(2), **k),
    "alltoall": lambda **k: ringcomm.alltoall(np.ones(2), **k),
    "barrier": lambda **k: ringcomm.barrier(**k),
}


@pytest.mark.parametrize("name", [*CALLS, "send", "recv", "rank", "world_size"])
def test_use_without_init_and_after_shutdown(name: str) -> None:
    def call() -> None:
        if name in CALLS:
            CALLS[name]()
        elif name in ("send", "recv"):
            getattr(ringcomm, name)(np.ones(2), 0)
        else:
            getattr(ringcomm, name)()

    with pytest.raises(NotInitializedError, match=r"call ringcomm.init\(\) first"):
        call()
    ringcomm.init()
    ringcomm.shutdown()
    with pytest.raises(NotInitializedError, match=r"call ringcomm.init\(\) first"):
        call()


@pytest.mark.parametrize("name", CALLS)
def test_functions_use_the_default_or_the_given_communicator(
    name: str, alone: Communicator
) -> None:
    with Communicator.create() as other:
        for target in (None, other):
            work = CALLS[name](comm=target, async_op=True, timeout=5)
            assert isinstance(work, ringcomm.Work)
            result = work.wait()
            assert result is None if name == "barrier" else result.reshape(-1).tolist() == [1, 1]
        assert alone.stats()["works"] == other.stats()["works"] == 1


@pytest.mark.parametrize("name", [*CALLS, "send", "recv"])
def test_functions_take_what_the_methods_take(name: str) -> None:
    """The same names, order, kinds and defaults; a function has comm= on top."""
    function = inspect.signature(getattr(ringcomm, name)).parameters
    method = dict(inspect.signature(getattr(Communicator, name)).parameters)
    del method["self"]
    assert [p for p in function.values() if p.name != "comm"] == list(method.values())
    assert function["comm"].default is None


def default_functions() -> None:
    """One rank of two; run as a process by the test below."""
    comm = ringcomm.init()
    n, rank = ringcomm.world_size(), ringcomm.rank()
    assert (n, rank) == (2, int(os.environ["RANK"]))
    ringcomm.barrier()
    assert ringcomm.allreduce(np.ones(3), "avg", compression="bf16").tolist() == [1, 1, 1]
    assert ringcomm.broadcast(np.array([rank]), root=1).tolist() == [1]
    assert ringcomm.allgather(np.array([rank])).tolist() == [[0], [1]]
    assert ringcomm.reduce_scatter(np.arange(4)).tolist() == [[0, 2], [4, 6]][rank]
    assert ringcomm.reduce(np.array([5]), root=1).tolist() == [[5], [10]][rank]
    gathered = ringcomm.gather(np.array([rank]), root=1)
    assert gathered is None if rank == 0 else gathered.tolist() == [[0], [1]]
    assert ringcomm.scatter(np.array([[1], [2]]) * (rank + 1), root=0).tolist() == [rank + 1]
    assert ringcomm.alltoall(np.array([0, 1]) + 10 * rank).tolist() == [rank, rank + 10]
    if rank == 0:
        ringcomm.send(np.arange(3), 1)
    else:
        assert ringcomm.recv(np.zeros(3, np.int64), 0).tolist() == [0, 1, 2]
    with comm.split(rank) as part:
        assert ringcomm.allreduce(np.ones(1), comm=part).tolist() == [1]
    assert ringcomm.allreduce(np.ones(1), async_op=True).wait().tolist() == [2]
    ringcomm.shutdown()


def test_default_functions_in_processes() -> None:
    run_processes(2, default_functions)


# ---- arguments ----


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    with World(2) as world:
        yield world


def test_a_split_after_a_refused_one(pair: World) -> None:
    """One rank's refused call must not make its next split another one than the others'."""

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            with pytest.raises(ConfigError):
                comm.split("x")  # type: ignore[arg-type]
        part = comm.split(0)
        assert part is not None
        with part:
            assert part.allreduce(np.ones(1)).tolist() == [2]

    pair.run(body)


def test_a_split_has_the_timeout_that_was_set() -> None:
    def body(comm: Communicator) -> None:
        comm.set_timeout(7.0)
        part = comm.split(0)
        assert part is not None
        with part:
            assert part.config.timeout == comm.config.timeout == 7.0

    run_ranks(2, body)


def test_integers_of_numpy_are_integers(pair: World) -> None:
    def body(comm: Communicator) -> None:
        assert comm.broadcast(np.array([comm.rank]), np.int64(1)).tolist() == [1]
        part = comm.split(np.int32(3), np.uint8(1))
        assert part is not None
        part.close()

    pair.run(body)


# ---- the end of a communicator ----


def test_a_closed_communicator_says_so() -> None:
    comm = Communicator.create()
    comm.close()
    comm.close()
    for call in (
        lambda: comm.allreduce(np.ones(2)),
        comm.barrier,
        comm.stats,
        comm.abort,
        lambda: comm.split(0),
    ):
        with pytest.raises(NotInitializedError, match="the communicator is closed"):
            call()
    assert "closed" in repr(comm)


def test_repr_and_attributes() -> None:
    def body(comm: Communicator) -> None:
        assert repr(comm) == f"<ringcomm.Communicator rank {comm.rank} of 2>"
        assert len(comm.hosts) == 2
        assert comm.host_of(0) == comm.hosts[0]
        assert comm.host_of(None) is None
        assert comm.host_of(2) is None
        assert comm.kernel_set in {name for name, _ in ringcomm.core.native.kernel_sets()}
        assert [(rail.interface, rail.address) for rail in comm.rails] == [("lo", "127.0.0.1")]

    run_ranks(2, body)


def test_leaving_the_with_block_closes() -> None:
    def body(comm: Communicator) -> None:
        with comm as same:
            assert same is comm
            assert comm.allreduce(np.ones(1)).tolist() == [2]
        with pytest.raises(NotInitializedError):
            comm.barrier()

    run_ranks(2, body)


def test_leaving_the_with_block_by_an_exception_aborts_the_others() -> None:
    def body(comm: Communicator) -> str:
        if comm.rank == 1:
            with pytest.raises(KeyError), comm:
                raise KeyError("lost")
            return ""
        began = time.monotonic()
        with pytest.raises(AbortedError) as caught, comm:
            comm.allreduce(np.ones(1))
        assert time.monotonic() - began < PROMPT
        assert caught.value.rank == 1
        return str(caught.value)

    messages = run_ranks(3, body)
    assert all("KeyError: 'lost'" in message for message in (messages[0], messages[2]))


def test_exit_without_shutdown() -> None:
    """Interpreter exit closes what is open, in order, so that the slower rank does not suffer."""
    code = """
        import numpy, ringcomm, time
        comm = ringcomm.init()
        part = comm.split(0)
        assert part.allreduce(numpy.ones(2)).tolist() == [2, 2]
        if comm.rank == 1:
            time.sleep(0.5)
        assert comm.allreduce(numpy.ones(2), async_op=True).wait().tolist() == [2, 2]
    """
    for one in run_processes(2, code, env=LOUD):
        assert (one.stdout, one.stderr) == ("", "")


def test_exit_says_goodbye_on_every_communicator() -> None:
    code = """
        import ringcomm
        comm = ringcomm.Communicator.create()
        part = comm.split(0)
        part.barrier()
        if comm.rank == 1:
            try:
                part.barrier()
            except ringcomm.PeerLostError as error:
                print(error)
    """
    first, second = run_processes(2, code)
    assert (first.stdout, first.stderr, second.stderr) == ("", "", "")
    assert "rank 0 has shut down" in second.stdout


def test_exit_by_an_exception_with_works_in_flight() -> None:
    code = """
        import numpy, ringcomm, time
        comm = ringcomm.init()
        work = comm.allreduce(numpy.ones(1 << 20), async_op=True)
        if comm.rank == 0:
            raise SystemExit(3)
        try:
            while True:
                comm.barrier()
        except ringcomm.RingcommError as error:
            print(type(error).__name__)
    """
    first, second = run_processes(2, code, env=LOUD, check=False)
    assert first.returncode == 3
    assert (second.returncode, second.stderr) == (0, "")
    assert second.stdout in ("PeerLostError\n", "AbortedError\n")


def test_ctrl_c_ends_a_wait() -> None:
    process = start_process(
        """
        import numpy, ringcomm, sys, threading, time
        from ranks import World
        with World(2) as world:
            try:
                print("waiting", flush=True)
                world.comms[0].allreduce(numpy.ones(3))
            except KeyboardInterrupt:
                print("interrupted", time.monotonic(), flush=True)
        """,
        {},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.3)
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        said, when = process.stdout.readline().split()
        assert said == "interrupted"
        assert float(when) - sent < PROMPT  # not when the wait would have ended
        _, errors = process.communicate(timeout=PATIENCE)
        assert (process.returncode, errors) == (0, "")
    finally:
        process.kill()
        process.communicate()


# ---- errors ----

FAMILY: dict[type[RingcommError], type[Exception]] = {
    RingcommError: RuntimeError,
    ConfigError: ValueError,
    TensorError: TypeError,
    NotInitializedError: RuntimeError,
    BootstrapError: ConnectionError,
    AuthenticationError: ConnectionError,
    MismatchError: RuntimeError,
    PeerLostError: ConnectionError,
    CommTimeoutError: TimeoutError,
    AbortedError: RuntimeError,
    DeviceError: RuntimeError,
    ProtocolError: RuntimeError,
}


def test_the_family_is_complete() -> None:
    public = {getattr(ringcomm, name) for name in ringcomm.__all__}
    errors = {thing for thing in public if isinstance(thing, type) and issubclass(thing, Exception)}
    assert errors == set(FAMILY)


@pytest.mark.parametrize("kind", FAMILY)
def test_errors_pickle_with_their_fields(kind: type[RingcommError]) -> None:
    fields: dict[str, Any] = {
        "rank": 3,
        "host": "node7",
        "rail": 1,
        "lane": 2,
        "seq": 41,
        "elapsed": 1.5,
    }
    error = kind("rank 3 is gone", **fields)
    error.__notes__ = ["in epoch 2"]  # as add_note() of Python 3.11 leaves it
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is kind
        assert copy.__notes__ == error.__notes__
        assert str(copy) == "rank 3 is gone"
        assert {name: getattr(copy, name) for name in fields} == fields
    assert isinstance(error, FAMILY[kind])
    assert isinstance(error, RingcommError)
    bare = kind("no details")
    assert (bare.rank, bare.host, bare.seq, bare.elapsed) == (None, None, None, None)


@pytest.mark.parametrize(
    "error",
    [
        FormationError("it failed", blames=(1,)),
        RefusedError("turned away", outcome=Outcome.STRANGER),
    ],
    ids=repr,
)
def test_errors_made_of_other_arguments_pickle(error: RingcommError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_all_names_exist_and_are_documented() -> None:
    for name in ringcomm.__all__:
        thing = getattr(ringcomm, name)
        alias = name in ("Algorithm", "Compression", "Op")  # which have a comment beside them
        assert name == "__version__" or alias or inspect.getdoc(thing), name
        if hasattr(Communicator, name):
            assert (inspect.getdoc(getattr(Communicator, name)) or "") in inspect.getdoc(thing)
