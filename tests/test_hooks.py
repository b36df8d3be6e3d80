"""DDP with ringcomm's hook, in two processes: exact means, overlap, and failures in backward."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import pickle
import re
import signal
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from faults import training
from faults.job import Job, Nursery
from patience import PROMPT
from ranks import World
from torch.nn.parallel import DistributedDataParallel

from ringcomm import ConfigError, NotInitializedError

pytestmark = pytest.mark.torch


#: Twice the rounding error of a number: once when it is sent, once when the mean is.
BF16, FP16 = 2 * 2**-8, 2 * 2**-11

UNCHECKED = pytest.mark.skipif(
    "init_sync" not in inspect.signature(DistributedDataParallel).parameters,
    reason="this PyTorch's DDP compares models in any case",
)
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module")
def nursery(torch_nursery: Nursery) -> Nursery:
    return torch_nursery


# ---- means ----


@pytest.mark.parametrize(
    ("mode", "compression", "dtype", "allowed"),
    [
        ("plain", None, "float32", 0.0),
        ("plain", "none", "float64", 0.0),
        ("plain", "fp16", "float32", FP16),
        ("plain", "bf16", "bfloat16", BF16),  # travels as it is
        ("no_sync", None, "float32", 0.0),
        ("find_unused_parameters", "bf16", "float32", BF16),
        ("static_graph", "bf16", "float32", BF16),
    ],
)
def test_gradients_are_means(
    nursery: Nursery, mode: str, compression: str | None, dtype: str, allowed: float
) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.means, compression=compression, dtype=dtype, mode=mode)
        for event in job.expect_all("means"):
            assert event["equal"], "the ranks' gradients differ"
            assert event["worst"] <= allowed, event
            buckets = event["buckets"]
            assert min(buckets) >= 1
            if mode != "find_unused_parameters":  # then DDP keeps its first layout
                assert buckets[-1] > buckets[0], "the buckets were not rebuilt"
        job.finish(quietly=mode != "find_unused_parameters")  # on which torch has an opinion


@pytest.mark.parametrize(
    ("mode", "compression"),
    [("no_sync", "int4"), ("find_unused_parameters", "onebit"), ("static_graph", "int8")],
)
def test_what_gradients_lack_is_kept_by_name(nursery: Nursery, mode: str, compression: str) -> None:
    """Also when the buckets change, a parameter goes unused, and the run is taken up again."""
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.feeds_back, compression=compression, mode=mode)
        for event in job.expect_all("feeds_back"):
            weights = [f"row.{i}.weight" for i in range(6)]
            assert event["names"] == ["aside.weight", *weights]
            assert event["equal"], "the ranks' gradients differ"
            assert event["lacks"] > 1e-3, event
            assert event["worst"] < 1e-5, event
            buckets = event["buckets"]
            if mode != "find_unused_parameters":
                assert buckets[2] > buckets[0], "the buckets were not rebuilt"
        job.finish(quietly=mode != "find_unused_parameters")


def test_report(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.account)
        for event in job.expect_all("account"):
            report = event["report"]
            assert report["buckets"] > 3
            assert report["payload_bytes"] == 3 * 4 * event["elements"]
            assert report["shared_bytes"] == 3 * 2 * event["elements"]  # two ranks
            assert report["wire_bytes"] == 0  # of one host
            assert report["comm_s"] > 0
            assert event["in_order"]
            check_steps(report)
            assert event["rest"] == {
                "buckets": 0,
                "payload_bytes": 0,
                "wire_bytes": 0,
                "shared_bytes": 0,
                "rail_bytes": [],
                "comm_s": 0,
                "works": [],
                "steps": [],
                "codecs": [{"codec": "bf16", "first": 0, "last": 2}],
            }
            assert not event["error"]
            assert event["pickled"] == "bf16"
        job.finish()


def check_steps(report: dict[str, Any]) -> None:
    """A report of three steps."""
    steps = report["steps"]
    assert len(steps) == 3
    for step in steps:
        assert step["step_s"] == pytest.approx(step["compute_s"] + step["exposed_s"])
        assert step["exposed_s"] > 0
        assert 0 <= step["hidden_s"] < step["compute_s"] + 1e-9
    for part in ("buckets", "payload_bytes", "wire_bytes", "shared_bytes"):
        assert sum(step[part] for step in steps) == report[part]


@pytest.mark.parametrize("shared", [False, True])
def test_the_profiler_shows_each_bucket_in_flight(nursery: Nursery, shared: bool) -> None:
    env = {**LOOPBACK, "RINGCOMM_INTERFACES": "lo,lo", "RINGCOMM_SHARED_MEMORY": str(int(shared))}
    with Job(nursery, 2, env) as job:
        job.start(training.profiled)
        for event in job.expect_all("profiled"):
            report = event["report"]
            count, sent = report["buckets"], report["wire_bytes"] + report["shared_bytes"]
            flights, told = event["ranges"][:count], event["ranges"][count:]
            assert count >= 3
            assert len(told) == count
            for number, (name, begin, end) in enumerate(flights):
                assert name.startswith(f"ringcomm:bucket {number} bf16, ")
                submitted, done = sorted(report["works"])[number]
                assert (end - begin) / 1e6 >= (done - submitted) - 1e-5
            for number, (name, begin, _) in enumerate(told):
                assert name.startswith(f"ringcomm:bucket {number} sent ")
                assert begin > max(end for _, _, end in flights)
                way = " through shared memory" if shared else r" over lo \d+ %(, lo \d+ %)?"
                assert re.fullmatch(rf".* sent \d+\.\d+ KB{way}", name), name
            kilobytes = [float(name.split(" sent ")[1].split()[0]) for name, _, _ in told]
            assert sum(kilobytes) == pytest.approx(sent / 1e3, abs=0.01 * count)
        job.finish(quietly=False)


def test_transfer_overlaps_backward(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.overlap)
        for event in job.expect_all("overlap"):
            assert event["buckets"] > 3, event
            assert event["early"] >= event["buckets"] - 2, event
        job.finish()


# ---- failures ----


def check_lost(event: dict[str, Any], since: float, kind: str = "PeerLostError") -> None:
    """The event is this error about rank 1, or a RuntimeError with its name and text."""
    assert "RuntimeError" in event["kinds"], event
    assert event["kind"] == kind or kind in event["text"], event
    assert "rank 1" in event["text"]
    took = event["at"] - since
    assert took < PROMPT, f"known after {took:.2f} s"


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_goes_in_backward(nursery: Nursery, how: str) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.lost, how=how)
        since = job.expect(1, "going")["at"]
        failed, state = job.expect(0, "failed"), job.expect(0, "state")
        assert state["rank"] == 1
        if how == "killed":
            check_lost(failed, since)
            assert state["kind"] == "PeerLostError"
        else:  # it leaves at its exit, in order, with or without buckets in flight
            assert state["kind"] in ("PeerLostError", "AbortedError")
            check_lost(failed, job.wait_exit(1).at, state["kind"])
        for name in ("again", "direct"):
            event = job.expect(0, name)
            assert event["kind"] == state["kind"], event
            assert event["rank"] == 1
        job.finish([0], quietly=False)


def test_use_without_init(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.unprepared)
        for event in job.expect_all("refused"):
            assert event["kind"] == "ConfigError"
        for event in job.expect_all("failed"):
            assert event["kind"] == "NotInitializedError", event
            assert "ringcomm.init()" in event["text"]
        job.finish()


@pytest.mark.parametrize(
    ("what", "kind", "text"),
    [
        ("no state", "ConfigError", "ddp.register_comm_hook(HookState(...), allreduce_hook)"),
        ("sparse", "TensorError", "make the layer with sparse=False"),
        pytest.param("meta", "TensorError", "device 'meta' is not supported", marks=UNCHECKED),
        ("shapes", "RuntimeError", ""),  # of which DDP speaks
        pytest.param("unchecked shapes", "RuntimeError", "MismatchError", marks=UNCHECKED),
        ("codecs", "RuntimeError", "MismatchError"),
    ],
)
def test_what_cannot_be_trained_is_refused_on_every_rank(
    nursery: Nursery, what: str, kind: str, text: str
) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.refused, what=what)
        for event in job.expect_all("refused"):
            assert event["kind"] == kind, event
            assert text in event["text"]
            if what == "codecs":
                assert "compression is bf16 on rank 0 and fp16 on rank 1" in event["text"]
            elif text == "MismatchError":
                assert "rank 0 called" in event["text"]
                assert "rank 1 called" in event["text"]
        job.finish(quietly=False)


def test_a_state_is_checked_and_survives_copies_without_its_communicator() -> None:
    """torch.save of a wrapped model takes the hook's state along."""
    kind = pytest.importorskip("ringcomm.torch").HookState
    with pytest.raises(ConfigError, match="is unknown; give one of none, bf16, fp16"):
        kind("int3")
    for neither in (8, ["bf16"]):
        with pytest.raises(ConfigError, match='give a codec, "auto" or a CodecPolicy'):
            kind(neither)
    with World(1) as world:
        state = kind("bf16", world.comms[0])
        state.report()
        for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert (other.compression, other.error) == ("bf16", None)
            assert other.report().buckets == 0
            with pytest.raises(NotInitializedError):
                other.comm  # noqa: B018


# ---- workers ----


def test_forked_workers_are_harmless(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.with_loader, wrong=False)
        for event in job.expect_all("epochs"):
            assert event["kind"] is None, event
        for event in job.expect_all("equal"):
            assert event["equal"]
        job.finish()


def test_forked_workers_that_use_it_are_told(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.with_loader, wrong=True)
        for event in job.expect_all("epochs"):
            assert event["kind"] == "NotInitializedError", event
            assert "forked child" in event["text"]
            assert "spawn" in event["text"]
        for event in job.expect_all("equal"):  # and the ranks themselves go on
            assert event["equal"]
        job.finish()


def test_a_killed_rank_with_workers(nursery: Nursery) -> None:
    with Job(nursery, 2, LOOPBACK) as job:
        job.start(training.lost_with_loader)
        for _ in range(3):  # until DDP has laid out its buckets anew, for which it uses gloo
            job.expect_all("step")
        since = job.signal(1, signal.SIGKILL)
        check_lost(job.expect(0, "failed"), since)
        job.finish([0], quietly=False)
