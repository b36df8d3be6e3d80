"""What users write, which mypy --strict accepts (tests/test_typing.py)."""

from typing import Any

import numpy as np

import ringcomm


def log(work: ringcomm.Work) -> None:
    print(work.name, work.seq, work.elapsed, work.done())


def typed(x: np.ndarray[Any, np.dtype[np.float32]], later: bool) -> ringcomm.Work | None:
    op: ringcomm.Op = "avg"
    codec: ringcomm.Compression = "int8"
    algorithm: ringcomm.Algorithm = "ring"
    half: float = float(ringcomm.allreduce(x, op, compression=codec).mean()) / 2
    ringcomm.recv(x, None, tag=3).sum()
    rows: list[float] = ringcomm.allgather(x).tolist()
    both = ringcomm.allreduce_many([x, x])
    both[0].sum()
    stats: ringcomm.Stats = ringcomm.default_communicator().stats()
    per_lane: float = stats["lanes"][0]["rtt_s"] + stats["rails"][0]["share"] + half + len(rows)
    print(per_lane, ringcomm.Config(algorithm=algorithm).sources()["lanes"])
    ringcomm.allreduce_many([x], async_op=True).wait(2.0)
    ringcomm.allreduce(x, on_done=log, async_op=True)
    return ringcomm.broadcast(x, async_op=True) if later else ringcomm.barrier(async_op=True)


def train(x: Any) -> str | None:
    config = ringcomm.Config(interfaces=("eth0", "eth1"), lanes=2, timeout=30.0)
    comm: ringcomm.Communicator = ringcomm.init(0, 1, config=config, timeout=5.0)
    ringcomm.allreduce(x, "avg", compression="bf16", out=np.empty_like(x), timeout=1.0)
    ringcomm.broadcast(x, root=0, async_op=True).wait()
    feedback, store = ringcomm.ErrorFeedback(), ringcomm.FeedbackStore()
    ringcomm.allreduce(x, compression="onebit", feedback=feedback)
    ringcomm.reduce_scatter(x, compression="int8", feedback=False)
    ringcomm.allreduce_many([x, x], compression="int4", feedback=[store["a"], store["b"]])
    store.load_state_dict(store.state_dict(), strict=False)
    store.loss_scale = 2 * feedback.loss_scale
    left: float = float(abs(feedback.worker).max()) + feedback.owner_start
    print(left)
    with comm.split(color=0, key=comm.rank) or comm as part:
        part.allreduce(x, on_done=log, async_op=True)
        rows = part.allgather(x, out=None)
        sent: int = part.stats()["wire_bytes"]
        print(rows, sent, part.kernel_set, part.world_size + 1)
    try:
        comm.send(x, 1)
        comm.recv(x, src=1, timeout=2.5)
    except ringcomm.PeerLostError as error:
        lost: int | None = error.rank
        print(lost, error.elapsed)
        return error.host
    except (ConnectionError, TimeoutError):
        comm.abort("gone")
    ringcomm.barrier(comm=comm)
    ringcomm.shutdown()
    return comm.host_of(0)
