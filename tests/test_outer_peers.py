"""OuterStep among peers that are killed, stopped, and come back; and beside DDP: in processes."""

from __future__ import annotations

import importlib.util
import signal
import time
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
from faults import outer as ranks
from faults.job import Job, Nursery
from outer_training import LESSONS, learn, pupil
from patience import PATIENCE, PROMPT
from ranks import run_ranks

from ringcomm import Communicator
from ringcomm.torch import OuterStep

pytestmark = pytest.mark.torch

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "RINGCOMM_INTERFACES": "lo"}


def round_of(job: Job, rank: int, members: list[int], least: int = 0) -> dict[str, Any]:
    """The rank's next round among these members, of at least that number."""
    give_up = time.monotonic() + PATIENCE
    while time.monotonic() < give_up:
        one = job.expect(rank, "round")
        if one["members"] == members and one["number"] >= least:
            return one
    raise AssertionError(f"rank {rank} had no round with {members}\n{job.story()}")


def ends_alike(job: Job, *ranks_: int) -> list[dict[str, Any]]:
    """Tells the ranks to stop, and they end with the same weights."""
    job.go(*ranks_)
    ends = [job.expect(rank, "end") for rank in ranks_]
    assert len({end["weights"] for end in ends}) == 1, ends
    assert len({end["number"] for end in ends}) == 1, ends
    return ends


def anchors(job: Job, members: list[int], least: int = 0) -> None:
    """Members have the same anchors in the same rounds."""
    seen: dict[int, str] = {}
    for rank in members:
        for one in [round_of(job, rank, members, least) for _ in range(3)]:
            assert seen.setdefault(one["number"], one["anchor"]) == one["anchor"]


WAYS = {"delayed": {"fragments": 2, "delay": 1}, "sparse, at once": {"outer": "sparse"}}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_peer_that_is_killed(torch_nursery: Nursery, way: dict[str, Any]) -> None:
    """The others repeat the round, at once, and go on; at the end they are alike."""
    with Job(torch_nursery, 3, LOOPBACK) as job:
        for rank in range(3):
            job.start(ranks.rounds, ranks=[rank], hold=2 if rank == 1 else -1, **way)
        job.expect(1, "holds")
        since = job.signal(1, signal.SIGKILL)
        for rank in (0, 2):
            assert round_of(job, rank, [0, 2])["at"] - since < PROMPT
        anchors(job, [0, 2])
        for end in ends_alike(job, 0, 2):
            assert end["left"] == [1]


def test_a_peer_that_is_late_and_comes_back(torch_nursery: Nursery) -> None:
    """The others go on after the grace time; it gets the state, and drops its own delta."""
    grace_s = 1.0
    with Job(torch_nursery, 3, LOOPBACK) as job:
        for rank in range(3):
            job.start(ranks.rounds, ranks=[rank], hold=2 if rank == 2 else -1, grace_s=grace_s)
        job.expect(2, "holds")
        since = job.signal(2, signal.SIGSTOP)
        for rank in (0, 1):
            assert round_of(job, rank, [0, 1])["at"] - since < grace_s + PROMPT
        job.signal(2, signal.SIGCONT)
        job.go(2)
        back = round_of(job, 2, [0, 1, 2], least=3)
        for rank in (0, 1):
            one = round_of(job, rank, [0, 1, 2], least=back["number"])
            assert (one["number"], one["anchor"]) == (back["number"], back["anchor"])
            assert one["iteration"] == back["iteration"]
        ends_alike(job, 0, 1, 2)


def test_a_peer_that_is_started_again(torch_nursery: Nursery) -> None:
    """A new process gets anchor, momentum and iteration, and trains on with the others."""
    with Job(torch_nursery, 3, LOOPBACK) as job:
        for rank in range(3):
            job.start(ranks.rounds, ranks=[rank], hold=2 if rank == 2 else -1)
        job.expect(2, "holds")
        job.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            round_of(job, rank, [0, 1])
        job.start(ranks.rounds, ranks=[2], rejoin=True)
        number = job.expect(2, "attached")["number"]
        assert number > 2
        anchors(job, [0, 1, 2], least=number + 1)
        ends_alike(job, 0, 1, 2)


LEARNING = {"every": 6, "fragments": 2, "delay": 2}


def undisturbed(seed: int) -> list[float]:
    """The curve of a seed whose three ranks stay."""

    def rank(comm: Communicator) -> list[float]:
        model = pupil(seed)
        optimizer = torch.optim.AdamW(model.parameters(), 0.02)
        outer = OuterStep(model, optimizer, comm=comm, **LEARNING)
        return learn(outer, model, optimizer, seed, comm.rank)

    curve: list[float] = run_ranks(3, rank)[0]
    return curve


def test_a_lost_peer_leaves_the_loss_in_the_band_of_the_seeds(torch_nursery: Nursery) -> None:
    """It is killed half way, with a round on its way; the others learn on without its data."""
    curves = [undisturbed(seed) for seed in range(5)]
    seed = sorted(range(len(curves)), key=lambda one: curves[one][-1])[len(curves) // 2]
    half = LESSONS // 2 + 1
    with Job(torch_nursery, 3, LOOPBACK) as job:
        for rank in range(3):
            hold = half if rank == 2 else -1
            job.start(ranks.lessons, ranks=[rank], seed=seed, hold=hold, settings=LEARNING)
        job.expect(2, "holds")
        job.signal(2, signal.SIGKILL)
        ends = [job.expect(rank, "learnt") for rank in (0, 1)]
    assert ends[0]["curve"] == ends[1]["curve"]
    assert ends[0]["left"] == [2]
    band = [(min(at), max(at)) for at in zip(*curves, strict=True)]
    before = half * LEARNING["fragments"] // LEARNING["every"]  # rounds; who starts late joins late
    for loss, (least, most) in list(zip(ends[0]["curve"], band, strict=True))[before:]:
        assert least <= loss <= most
    assert band[len(band) // 3][0] > band[-1][1], "a third of the training ends in the band, too"


def test_beside_ddp(torch_nursery: Nursery) -> None:
    """Over the same ranks it is refused on all of them; over those of a host it is not. And ranks
    that train apart by OuterStep are not warned of."""
    with Job(torch_nursery, 4, LOOPBACK) as job:
        job.start(ranks.beside_ddp)
        for how in ("ddp", "local ddp", "apart"):
            ends = job.expect_all("attached")
            warned = job.expect_all("warned")
            for event in ends:
                if how == "ddp":
                    assert event["kind"] == "ConfigError"
                    assert "over ranks [0, 1, 2, 3], which OuterStep connects as" in event["text"]
                else:
                    assert event["kind"] is None
            assert all(event["texts"] == [] for event in warned), warned
            if how != "ddp":
                assert len({event["weights"] for event in warned}) == 1
        job.finish(quietly=False)


def test_what_the_refusal_of_a_ddp_names_works(torch_nursery: Nursery) -> None:
    with Job(torch_nursery, 2, LOOPBACK) as job:
        job.start(ranks.remedies)
        for _ in range(2):
            (text, _) = [event["text"] for event in job.expect_all("refused")]
            followed = job.expect_all("followed")
            assert followed[0]["remedy"] in text
            assert "ringcomm.torch.attach" not in text  # it gives such a DDP a hook
            assert all(event["rounds"] >= 2 for event in followed), followed
            assert len({event["weights"] for event in followed}) == 1
        job.finish(quietly=False)
