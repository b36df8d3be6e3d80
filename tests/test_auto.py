"""How a codec is chosen by itself: forecasts, the law, and what the ranks agree on. A clock that is
only counted, a link and a processor that are only arithmetic; no sockets, no torch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest

from ringcomm import ConfigError
from ringcomm.adaptive import codec_agreement, law
from ringcomm.adaptive.codec_agreement import Agreement
from ringcomm.adaptive.law import (
    BucketSize,
    Law,
    Link,
    Rates,
    Rung,
    StepTimes,
    Window,
    WindowMedians,
    encoded_bytes,
    exposed_s,
    ladder,
    transfer_s,
)
from ringcomm.codecs import CODECS, Codec, parse

NONE, BF16, INT8, INT4 = (CODECS[name] for name in ("none", "bf16", "int8", "int4"))
GBIT = 1e9 / 8 * 0.94 / 1.5  # encoded bytes a second of 1 Gbit/s among 4 ranks


# ---- forecasts ----


def test_a_bucket_counts_what_travels_at_bf16_and_what_travels_as_it_is() -> None:
    bucket = BucketSize(large=1000, small=100, plain=10)
    assert bucket.bytes_in(NONE) == 4410
    assert bucket.bytes_in(BF16) == 2210
    assert bucket.bytes_in(INT8) == pytest.approx(1000 * 8.0625 / 8 + 200 + 10)
    assert BucketSize(large=1000, width=8).bytes_in(NONE) == 8000


def test_a_bucket_waits_for_the_link_and_for_backward() -> None:
    load, link = [BucketSize(250)] * 3, Link(rate=1000.0, latency_s=0.5)  # a second each
    assert transfer_s(load, NONE, link) == 3.5
    assert exposed_s(load, NONE, link, [0, 0, 0]) == 3.5
    assert exposed_s(load, NONE, link, [0, 2, 4]) == 1.5
    assert exposed_s(load, NONE, link, [0, 0.5, 1.0]) == 2.5


def test_the_slower_of_wire_and_codec_counts() -> None:
    link = Link(rate=1000.0, codec_s={"int8": 1.0, "onebit": 2.0})
    assert link.seconds(BucketSize(100), INT8) == 100.0
    assert link.seconds(BucketSize(100), parse("onebit")) == 200.0
    assert link.seconds(BucketSize(100), NONE) == 0.4


# ---- measurements ----


def test_a_window_goes_by_medians_and_is_a_row() -> None:
    window = Window()
    assert window.medians() == WindowMedians()
    for busy in (1.0, 50.0, 2.0):
        window.steps.append(StepTimes(3.0, 2.0, False, busy, 8, (0.0, 2.0)))
    seen = window.medians()
    assert (seen.steps, seen.busy_s) == (3, 2.0)
    assert WindowMedians(*map(float, seen)) == seen
    assert window.ready_s() == (0.0, 2.0)
    assert Window().ready_s() == ()


# ---- a world that is only arithmetic ----


@dataclasses.dataclass
class Site:
    """What the simulated hosts do; all of it may change in mid-run.

    Attributes:
        rate: encoded bytes a second.
        compute_s: of a step, a third of it forward.
        codec_s: seconds an element, of each codec.
        noise: relative deviation of every time.
    """

    rate: float = GBIT
    compute_s: float = 0.3
    load: Sequence[BucketSize] = (BucketSize(1_000_000),) * 8
    codec_s: dict[str, float] = dataclasses.field(default_factory=dict)
    latency_s: float = 1e-3
    noise: float = 0.0

    def step_s(self, codec: Codec) -> float:
        """What a step takes without noise."""
        link = Link(self.rate, self.latency_s, self.codec_s)
        return self.compute_s + exposed_s(self.load, codec, link, self.ready_s())

    def cpu_s(self, codec: Codec) -> float:
        """The engine's: of the codec, and of what it sends."""
        own = sum(bucket.large for bucket in self.load) * self.codec_s.get(codec.name, 0.0)
        return own + 0.3e-9 * encoded_bytes(self.load, codec)

    def ready_s(self) -> list[float]:
        """When buckets are ready."""
        each = self.compute_s * 2 / 3 / len(self.load)
        return [each * number for number in range(len(self.load))]


class Ranks:
    """Ranks in lockstep, each with an Agreement of its own."""

    def __init__(self, site: Site, rungs: Sequence[Rung] = (), seed: int = 0) -> None:
        self.site = site
        self.random = random.Random(seed)
        self.ranks = [Agreement(Law(rungs or ladder()), rank == 0) for rank in range(4)]
        self.step = 0
        self.changes: list[law.Change] = []
        self.used: list[str] = []
        self._rows: list[list[float]] = []
        self._text = ""

    def gather(self, row: Sequence[float]) -> codec_agreement.Later[list[list[float]]]:
        self._rows.append(list(row))
        rows = self._rows
        return lambda: rows

    def spread(self, text: str) -> codec_agreement.Later[str]:
        self._text = text or self._text
        told = self
        return lambda: told._text

    def run(self, steps: int) -> Ranks:
        """So many steps."""
        for _ in range(steps):
            self._begin()
            for rank in self.ranks:
                rank.window.steps.append(self._took(rank.rung.codec))
                rank.window.cpu_s += self.site.cpu_s(rank.rung.codec)
            self.used.append(str(self.ranks[0].rung))
            self.step += 1
        return self

    def _begin(self) -> None:
        self._rows, changes = [], []
        site = self.site
        for rank in self.ranks:
            changes.append(rank.begin(self.step, self, site.load, site.ready_s(), site.latency_s))
        assert len({rank.rung for rank in self.ranks}) == 1
        if changes[0] is not None:
            self._text = ""
            self.changes.append(changes[0])

    def _took(self, codec: Codec) -> StepTimes:
        def shaken(seconds: float) -> float:
            return seconds * (1 + site.noise * abs(self.random.gauss(0, 1)))

        site, ready = self.site, self.site.ready_s()
        slowness = shaken(1.0)
        link = Link(site.rate / shaken(1.0), site.latency_s, site.codec_s)
        free, busy, over, forward = 0.0, 0.0, 0.0, site.compute_s / 3
        for bucket, at in zip(site.load, ready, strict=True):
            submitted = (forward + at) * slowness
            free = max(submitted, free) + link.seconds(bucket, codec)
            busy += free + site.latency_s - max(submitted, over)
            over = free + site.latency_s
        first = (forward + ready[0]) * slowness
        return StepTimes(submitted, submitted - first, False, busy, 0, tuple(ready))


def best(site: Site, names: Sequence[str] = ("none", "bf16", "int8")) -> float:
    return min(site.step_s(CODECS[name]) for name in names)


def near_best(ranks: Ranks) -> bool:
    site = ranks.site
    return site.step_s(ranks.ranks[0].rung.codec) <= 1.05 * best(site)


# ---- the law ----


@pytest.mark.parametrize("gbit", [0.1, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("compute_s", [0.03, 0.3])
def test_it_settles_within_5_percent_of_the_best(gbit: float, compute_s: float) -> None:
    site = Site(gbit * GBIT, compute_s, codec_s={"int8": 1.5e-9, "int4": 2e-9})
    ranks = Ranks(site).run(100)
    assert near_best(ranks), (ranks.used[-1], ranks.changes)
    assert len(ranks.changes) <= 1
    ranks.run(500)  # it looks for a gentler one now and then
    taken = [site.step_s(CODECS[name]) for name in ranks.used[60:]]
    assert sum(taken) <= 1.05 * best(site) * len(taken)


def test_the_gentlest_that_hides_is_taken() -> None:
    assert Ranks(Site(10 * GBIT, 1.0)).run(60).used[-1] == "none"
    assert Ranks(Site(GBIT / 1.5, 1.0)).run(60).used[-1] == "bf16"
    assert Ranks(Site(GBIT / 10, 1.0)).run(60).used[-1] == "int8"


def test_codecs_that_need_feedback_are_taken_only_where_allowed() -> None:
    site = Site(GBIT / 10, 0.1)
    assert "int4" not in Ranks(site).run(100).used
    assert Ranks(site, rungs=ladder(["int4"])).run(100).used[-1] == "int4"
    assert Ranks(site, rungs=ladder(["int4", "onebit"])).run(100).used[-1] == "int4"
    linear = ladder(["onebit", "int4"], linear=True)
    assert [str(rung) for rung in linear] == ["none", "bf16", "int8", "int4", "onebit"]
    assert Ranks(site, rungs=linear).run(100).used[-1] == "onebit"
    for name in ("fp16", "int8", "topk:0.01"):
        with pytest.raises(ConfigError, match="allow="):
            ladder([name])


def test_accumulation_comes_before_a_harsher_codec() -> None:
    rungs = ladder(["int4"], max_accumulate=4)
    assert [str(rung) for rung in rungs] == [
        "none",
        "bf16",
        "int8",
        "int8 over 2",
        "int8 over 3",
        "int8 over 4",
        "int4",
    ]


def test_adapters_travel_at_bf16_at_most() -> None:
    rungs = ladder(["int4"], adapters=True, linear=True)
    assert [str(rung) for rung in rungs] == ["none", "bf16"]


@pytest.mark.parametrize("seed", range(2))
def test_it_follows_a_tenfold_drop_and_comes_back(seed: int) -> None:
    site = Site(10 * GBIT, 0.25, noise=0.05)
    ranks = Ranks(site, seed=seed).run(157)
    assert ranks.used[-1] == "none"
    site.rate /= 10
    ranks.run(60)
    assert near_best(ranks), ranks.changes
    site.rate /= 10
    ranks.run(60)
    assert ranks.used[-1] == "int8"
    site.rate *= 100
    ranks.run(300)
    assert near_best(ranks), ranks.changes
    assert len(ranks.changes) <= 6


@pytest.mark.parametrize("seed", range(2))
def test_noise_makes_it_change_hardly_ever(seed: int) -> None:
    """On links where two codecs are about as good, too."""
    for gbit in (0.5, 0.66, 1.0, 1.3, 2.0, 2.6):
        ranks = Ranks(Site(gbit * GBIT, 0.3, noise=0.1), seed=seed).run(1000)
        assert len(ranks.changes) <= 3, (gbit, ranks.changes)


def test_a_codec_that_is_slower_than_thought_is_left_and_not_tried_all_the_time() -> None:
    site = Site(GBIT, 0.1, codec_s={"int8": 50e-9})
    ranks = Ranks(site).run(1000)
    assert ranks.used[-200:] == ["bf16"] * 200
    assert ranks.used.count("int8") <= 60


def test_a_gentler_codec_is_found_where_the_harsher_one_is_what_takes_time() -> None:
    """The wire is not seen while the processor encodes; it is tried, and kept."""
    site = Site(GBIT / 10, 0.4, codec_s={"int8": 20e-9})
    ranks = Ranks(site).run(100)
    assert ranks.used[-1] == "int8"
    site.rate *= 100
    ranks.run(500)
    assert ranks.used[-1] == "none"
    assert len(ranks.changes) <= 4


def test_the_slowest_rank_counts_and_one_decides() -> None:
    """Others wait for it in their exchanges; what they measure says nothing of the link."""
    site = Site(10 * GBIT, 0.3)
    ready = site.ready_s()
    fast = WindowMedians(10, 0.1, 0.07, busy_s=0.29)
    slow = WindowMedians(10, 0.3, ready[-1], busy_s=0.02)
    one = Law(ladder(), first_steps=0)
    change = one.decide(20, [fast, slow, fast, fast], site.load, ready)
    assert change is not None
    assert change.rung.codec is NONE
    assert change.step == 20 + law.DELAY


def test_ranks_that_measure_apart_change_at_the_same_step() -> None:
    """Asserted in every step of Ranks; here with measurements that differ widely."""
    ranks = Ranks(Site(GBIT, 0.2, noise=0.5)).run(400)
    assert ranks.used


def test_nothing_is_decided_without_measurements_of_all() -> None:
    one = Law(ladder(), first_steps=0)
    seen = WindowMedians(10, 0.1, 0.07, busy_s=0.29)
    assert one.decide(20, [seen, WindowMedians()], [BucketSize(10)], [0.0]) is None
    assert one.decide(20, [seen, seen], [], []) is None
    assert one.decide(20, [seen, seen], [BucketSize(0)], [0.0]) is None


class Asked:
    """A Law on a link of its own, asked after each window; backward takes .2 s of .3.

    Args:
        deferred: a step's means are for the one after.
    """

    def __init__(self, codec: str, rungs: Sequence[Rung] = (), deferred: bool = False) -> None:
        self.deferred = float(deferred)
        self.law = Law(rungs or ladder(), Rung(CODECS[codec]), first_steps=0)
        self.load, self.ready_s = [BucketSize(250_000)] * 32, [0.2 * at / 31 for at in range(32)]
        self.step = 300  # the change before is long ago

    def window(self, busy_s: float) -> str | None:
        """What it says of a window in which the wire was busy for that long in each step."""
        self.step += law.WINDOW
        compute = 0.3 * self.law.rung.accumulate
        seen = WindowMedians(law.WINDOW, compute, 0.2, self.deferred, busy_s)
        change = self.law.decide(self.step, [seen, seen], self.load, self.ready_s)
        return None if change is None else str(change.rung)


def test_a_harsher_codec_takes_three_windows_in_a_row() -> None:
    asked = Asked("bf16")
    told = [asked.window(busy) for busy in (0.19, 0.25, 0.25, 0.19, 0.25, 0.25, 0.25)]
    assert told == [None] * 6 + ["int8"]  # a step of .33 s, where .3 could be had


def test_a_gross_misfit_takes_one() -> None:
    asked = Asked("bf16")
    assert [asked.window(busy) for busy in (0.19, 0.9)] == [None, "int8"]


def test_a_gentler_codec_takes_two_windows_and_a_margin() -> None:
    asked = Asked("int8")
    told = [asked.window(busy) for busy in (0.19, 0.094, 0.094, 0.07, 0.094, 0.07, 0.07)]
    assert told == [None] * 6 + ["bf16"]


def test_a_gentler_codec_waits_after_a_change() -> None:
    asked = Asked("bf16")
    told = [asked.window(busy) for busy in (0.19, 0.25, 0.25, 0.25)]
    assert told[-1] == "int8"
    changed = asked.step + law.DELAY
    told = [asked.window(0.05) for _ in range(30)]
    gentler = next(at for at, rung in enumerate(told) if rung is not None)
    assert told[gentler] == "bf16"
    assert (gentler + 1) * law.WINDOW >= 200 + law.DELAY > gentler * law.WINDOW
    assert asked.step > changed


def test_more_micro_batches_come_before_what_has_to_be_allowed() -> None:
    asked = Asked("int8", ladder(["int4"], max_accumulate=4))
    assert asked.window(2.0) == "int8 over 4"  # 2.1 s of .3 + 1.8
    assert [asked.window(2.0) for _ in range(6)] == [None] * 6


def test_what_a_late_step_hides_is_not_exposed() -> None:
    """The next forward hides .1 s more."""
    at_once, late = Asked("bf16"), Asked("bf16", deferred=True)
    assert [at_once.window(0.28) for _ in range(3)] == ["int8", None, None]
    assert [late.window(0.28) for _ in range(3)] == [None] * 3
    assert [late.window(0.35) for _ in range(3)] == [None, None, "int8"]


def test_more_micro_batches_hide_more_of_a_late_step() -> None:
    late = Asked("int8", ladder(max_accumulate=4), deferred=True)
    assert late.window(0.8) == "int8 over 3"  # .9 s of compute, where one or two hide .3 or .6


# ---- what the link does ----


@pytest.mark.parametrize(
    ("cpu_s", "is_first", "codec_is_slow"),
    [(0.01, True, False), (0.05, True, True), (0.05, False, False), (0.1, False, True)],
)
def test_processor_time_tells_the_codec_from_the_wire(
    cpu_s: float, is_first: bool, codec_is_slow: bool
) -> None:
    load, rates = [BucketSize(1_000_000)], Rates()
    before = rates.learn(BF16, load, 0.2, 0.0, 0.0, True).rate
    assert before == pytest.approx(1e7)
    link = rates.learn(INT8, load, 0.2, cpu_s, 0.0, is_first)  # the wire alone would take .1
    if codec_is_slow:
        assert link.rate >= before
        assert link.codec_s["int8"] == pytest.approx(2e-7)
    else:
        assert link.rate == pytest.approx(before * 8.0625 / 16)
        assert link.codec_s["int8"] < 1e-8


def test_latency_is_no_rate() -> None:
    assert Rates().learn(BF16, [BucketSize(1000)], 0.1, 0.0, 0.08, True).rate == pytest.approx(1e5)


# ---- the agreement ----


def test_only_one_rank_decides_and_a_window_has_steps_of_one_codec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Law, float]] = []
    decide = Law.decide

    def spied(
        self: Law, step: int, ranks: Sequence[WindowMedians], *rest: Any
    ) -> law.Change | None:
        asked.append((self, ranks[0].steps))
        return decide(self, step, ranks, *rest)

    monkeypatch.setattr(Law, "decide", spied)
    ranks = Ranks(Site(GBIT / 10, 0.3)).run(60)
    assert {id(one) for one, _ in asked} == {id(ranks.ranks[0]._law)}
    first, following = law.FIRST_WINDOW, law.WINDOW
    assert [change.step for change in ranks.changes] == [first + 1 + following + law.DELAY]
    assert [steps for _, steps in asked] == [
        first + 1,
        following,
        first,
        following,
        following,
        following,
    ]


# ---- the first steps ----


def test_rungs_that_quantise_wait_for_the_first_steps() -> None:
    ranks = Ranks(Site(GBIT / 10, 0.1)).run(40)
    assert set(ranks.used[: law.FIRST_STEPS]) == {"bf16"}
    assert ranks.used[-1] == "int8"


# ---- what is said, and kept ----


def test_a_change_says_what_was_measured() -> None:
    ranks = Ranks(Site(GBIT / 10, 0.3)).run(60)
    (change,) = ranks.changes
    assert change.rung.codec is INT8
    words = change.reason.split()
    assert words[:2] == ["bf16", "needs"]
    assert "on the wire at" in change.reason
    assert "backward hides" in change.reason
    assert change.reason.partition("; int8 ")[2].endswith("ms")


def test_a_restart_goes_on_where_it_stood() -> None:
    ranks = Ranks(Site(GBIT / 10, 0.3)).run(60)
    before = ranks.ranks[0]
    state = before._law.state_dict()
    after = Law(ladder())
    after.load_state_dict(state, Rung(INT8))
    assert after.state_dict() == state
    assert after.rung == Rung(INT8)


def test_encoded_bytes_add_up() -> None:
    assert encoded_bytes([BucketSize(8), BucketSize(8)], INT4) == 2 * 8 * 4.25 / 8
