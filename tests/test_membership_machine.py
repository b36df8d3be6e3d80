"""Members agree whatever the network does: what hypothesis lets ranks and the network do, over a
clock that is set. membership_world.py has both.

    Punctual    nobody fails: every round is one of all, by the first communicator
    Hurt        processes end and come back, connections are cut, ranks are late: no two rounds
                disagree, none is done behind a later one, and all who live come together again
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from membership_world import World

RANKS = st.integers(0, 3)
MOMENTS = st.sampled_from([0.0, 0.06, 0.3, 2.0])
"""Seconds; a rank that has waited 0.05 s repeats its READY."""


class _Machine(RuleBasedStateMachine):
    """Ranks that come to rounds, and a network that is slow and repeats."""

    grace_s, timeout = 100.0, 100.0
    slowest = 0.4
    """Seconds; of two messages, one after the other, below decision.TAKEOVER_S."""

    @initialize(size=st.integers(2, 4))
    def begin(self, size: int) -> None:
        self.world = World(size, size // 2 + 1, self.grace_s, self.timeout)

    @rule(after=st.lists(MOMENTS, min_size=4, max_size=4), on_time=st.booleans())
    def come(self, after: list[float], on_time: bool) -> None:
        """All who work come to the next round, each in its time; the last may still be on its way
        when the next thing happens."""
        world, first = self.world, self.world.now
        for one, seconds in zip(world.processes, after, strict=False):
            world.later(first + seconds, one.come)
        ends = sorted(after[: world.size])
        world.run(lambda: False, first + (ends[-1] + 1.0 if on_time else ends[-2]))

    @rule(seconds=MOMENTS)
    def time_passes(self, seconds: float) -> None:
        self.world.run(lambda: False, self.world.now + seconds)

    @rule(a=RANKS, b=RANKS, part=st.sampled_from([0.0, 0.1, 1.0]))
    def be_slow(self, a: int, b: int, part: float) -> None:
        self.world.delay[a % self.world.size, b % self.world.size] = part * self.slowest

    @rule(a=RANKS, b=RANKS, which=st.integers(0, 7))
    def repeat(self, a: int, b: int, which: int) -> None:
        self.world.processes[a % self.world.size].wire.repeat(b % self.world.size, which)

    def settle(self) -> None:
        """Everyone comes, until all who live are through a round together."""
        world = self.world
        world.delay.clear()
        world.run(lambda: False, world.now + 3.0)  # who is on its way has come
        for _ in range(4):
            for one in world.processes:
                one.come()
            if world.run(self._are_together, world.now + 3 * (self.grace_s + self.timeout)):
                return
        raise AssertionError([vars(one) for one in world.processes])

    def _are_together(self) -> bool:
        """Or the job has ended, and they know."""
        living = [one for one in self.world.processes if one.lives]
        if any(one.why for one in self.world.processes):
            return True
        together = ("works", tuple(one.rank for one in living), living[0].history)
        return all((one.state, one.members, one.history) == together for one in living)


class Punctual(_Machine):
    """See above."""

    @invariant()
    def all_are_in_every_round(self) -> None:
        world = self.world
        assert world.done == [(0, number) for number in range(len(world.done))]
        for key, inside in world.rounds.items():
            for go in inside.values():
                assert (key, go.members, go.is_new) == (key, tuple(range(world.size)), False)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.all_are_in_every_round()  # else there is nothing to settle
            self.settle()
            self.all_are_in_every_round()


class Hurt(_Machine):
    """See above."""

    grace_s, timeout = 3.0, 1000.0
    slowest = 3.0
    was_apart = False

    @rule(rank=RANKS)
    def die(self, rank: int) -> None:
        world = self.world
        living = [one.rank for one in world.processes if one.lives]
        if rank in living and len(living) > world.min_peers:
            world.processes[rank].end()
            self.was_apart = True

    @rule(rank=RANKS)
    def come_back(self, rank: int) -> None:
        if rank < self.world.size and not self.world.processes[rank].lives:
            self.world.restart(rank)

    @rule(a=RANKS, b=RANKS)
    def cut(self, a: int, b: int) -> None:
        if a != b and max(a, b) < self.world.size and self.world.processes[a].lives:
            self.world.processes[a].wire.cut(b)
            self.was_apart = True

    @rule()
    def be_late(self) -> None:
        self.world.run(lambda: False, self.world.now + 2 * self.grace_s)

    def teardown(self) -> None:
        """Too few may be left where processes ended or connections were cut, and be told so."""
        if hasattr(self, "world"):
            self.settle()
            assert self.was_apart or not any(one.why for one in self.world.processes)


BUDGET = settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
"""Nothing is shrunk: where members do not come together, every try takes hours of their clock."""
TestPunctual = Punctual.TestCase
TestPunctual.settings = BUDGET
TestHurt = Hurt.TestCase
TestHurt.settings = BUDGET
