"""Members agree whatever the network does: what ranks and the network do is drawn by chance, over a
clock that is set. membership_world.py has both.

    Punctual    nobody fails: every round is one of all, by the first communicator
    Hurt        processes end and come back, connections are cut, networks are dark for a while,
                ranks are late: no two rounds disagree, none is done behind a later one, all members
                of a round work on the same, and all who live come together again
"""

from __future__ import annotations

import random

import pytest
from membership_world import World

from ringcomm.membership.decision import TAKEOVER_S

MOMENTS = [0.0, 0.06, 0.3, 2.0]
"""Seconds; a rank that has waited 0.05 s repeats its READY."""
STEPS = 30
MOST_EPOCHS = 50  # more: formations fail one after the other


class Punctual:
    """Ranks that come to rounds, and a network that is slow and repeats."""

    grace_s, timeout = 100.0, 100.0
    sizes = 2, 3, 4
    slowest = 0.4
    """Seconds; of two messages, one after the other, below decision.TAKEOVER_S."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        size = self.chance.choice(self.sizes)
        self.world = World(size, size // 2 + 1, self.grace_s, self.timeout)
        self.steps = [self.come, self.time_passes, self.be_slow, self.repeat]

    def walk(self) -> None:
        for _ in range(STEPS):
            self.chance.choice(self.steps)()
            self.check()
        self.settle()
        self.check()

    def check(self) -> None:
        """All are in every round."""
        world = self.world
        assert world.done == [(0, number, 0) for number in range(len(world.done))]
        for key, inside in world.rounds.items():
            for go in inside.values():
                assert (key, go.members, go.is_new) == (key, tuple(range(world.size)), False)

    def rank(self) -> int:
        return self.chance.randrange(self.world.size)

    # ---- what happens ----

    def come(self) -> None:
        """All who work come to the next round, each in its time; the last may still be on its way
        when the next thing happens."""
        world, first = self.world, self.world.now
        after = [self.chance.choice(MOMENTS) for _ in world.processes]
        for one, seconds in zip(world.processes, after, strict=True):
            world.later(first + seconds, one.come)
        ends = sorted(after)
        world.run(lambda: False, first + self.chance.choice([ends[-1] + 1.0, ends[-2]]))

    def time_passes(self) -> None:
        self.world.run(lambda: False, self.world.now + self.chance.choice(MOMENTS))

    def be_slow(self) -> None:
        self.world.delay[self.rank(), self.rank()] = self.chance.choice([0, 0.1, 1]) * self.slowest

    def repeat(self) -> None:
        self.world.processes[self.rank()].wire.repeat(self.rank(), self.chance.randrange(8))

    def settle(self) -> None:
        """Everyone comes, until all who live are through a round together."""
        world = self.world
        world.delay.clear()
        world.lighten()
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
        if not living or any(one.why for one in self.world.processes):
            return True
        together = ("works", tuple(one.rank for one in living), living[0].history)
        return all((one.state, one.members, one.history) == together for one in living)


class Hurt(Punctual):
    """See above."""

    grace_s, timeout = 3.0, 1000.0
    sizes = 3, 4
    slowest = 3.0
    was_apart = False

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.steps += [self.one_comes, self.be_late, self.cut]
        self.steps += 2 * [self.die_or_come_back, self.be_dark_or_light, self.die_amid_gos]

    def check(self) -> None:
        """The world asserts what holds of each round."""

    def one_comes(self) -> None:
        self.world.processes[self.rank()].come()

    def die_or_come_back(self) -> None:
        living = [one for one in self.world.processes if one.lives]
        for rank in [one.rank for one in self.world.processes if not one.lives]:
            self.world.restart(rank)
            self.world.processes[rank].come()
        if len(living) == self.world.size:
            self.chance.choice(living).end()
            self.was_apart = True

    def die_amid_gos(self) -> None:
        if all(one.lives and not one.wire.unsaid for one in self.world.processes):
            self.world.processes[self.rank()].wire.unsaid = {self.rank()}
            self.was_apart = True

    def cut(self) -> None:
        a, b = self.chance.sample(self.world.processes, 2)
        if a.lives:
            a.wire.cut(b.rank)
            self.was_apart = True

    def be_dark_or_light(self) -> None:
        one = self.chance.choice(self.world.processes)
        if self.world.dark:
            self.world.lighten()
        elif one.lives:
            self.world.darken(one)
            self.was_apart = True

    def be_late(self) -> None:
        self.world.run(lambda: False, self.world.now + 2 * self.grace_s)

    def settle(self) -> None:
        """Too few may be left where processes ended or connections were cut, and be told so; enough
        do not wait for each other until the timeout."""
        super().settle()
        assert not any(one.in_vain for one in self.world.processes)
        assert max(one.agreement._seen for one in self.world.processes) < MOST_EPOCHS
        assert self.was_apart or not any(one.why for one in self.world.processes)


def come(world: World, *ranks: int) -> None:
    """These come, and a round is done."""
    done = len(world.done)
    for rank in ranks:
        world.processes[rank].come()
    assert world.run(lambda: len(world.done) > done, world.now + 100.0)


@pytest.mark.parametrize("kind", [Punctual, Hurt])
def test_members_agree(kind: type[Punctual]) -> None:
    for seed in range(200):
        try:
            kind(seed).walk()
        except Exception as error:
            raise AssertionError(f"{kind.__name__}({seed}).walk()") from error


@pytest.mark.parametrize("seed", [1068, 1512, 2889, 5791, 6711])
def test_what_seeds_have_found(seed: int) -> None:
    """Faults that the first seeds do not show; `make mutants` plants them."""
    Hurt(seed).walk()


def test_who_went_on_apart_is_given_the_work_of_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank 1 is started again, and makes a formation with rank 2 of the same epoch as that which it
    had made with rank 0, and of as many rounds."""
    world = World(3, 2, grace_s=3.0, timeout=1000.0)
    zero, one, two = world.processes
    come(world, 0, 1, 2)
    world.darken(two)
    two.come()
    come(world, 0, 1)
    one.end()
    world.restart(1)
    world.lighten()
    come(world, 1)
    assert (two.members, two.history[:2], world.may_part) == ((1, 2), zero.history[:2], True)
    assert two.work != zero.work
    come(world, 0, 1, 2)
    assert {one.history for one in world.processes} == {world.done[-1]}
    assert len({one.work for one in world.processes}) == 1
    assert "rank 0 and rank 1 have gone on apart, in two formations of epoch 1" in caplog.text


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("slow", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("hears", [1, 2])
def test_a_decider_that_ends_between_two_gos(size: int, slow: tuple[int, int], hears: int) -> None:
    """Who has its GO comes back from a round that fails. Who has not holds the READY of the dead
    rank, which counts no more, and one of the other that is over."""
    world = World(size, size // 2 + 1, grace_s=3.0, timeout=1000.0)
    world.processes[0].wire.unsaid = set(range(size)) - {hears}
    world.delay[slow] = 0.01
    began = world.now
    for one in world.processes:
        one.come()
    assert world.run(lambda: len(world.done) == 1, began + 100.0)
    assert world.now < began + 2 * TAKEOVER_S
    assert {one.members for one in world.processes if one.lives} == {tuple(range(1, size))}


def test_a_go_of_an_epoch_that_its_member_has_seen() -> None:
    """Rank 1 has learned behind its READY that somebody has made a formation of that epoch: it
    says so, and the decider takes a higher one, instead of waiting for it."""
    world = World(3, 2, grace_s=3.0, timeout=1000.0)
    zero, one, two = world.processes
    zero.come()
    one.come()
    world.run(lambda: False, world.now + 0.1)
    one.agreement._seen = 1
    two.end()
    ended = world.now
    assert world.run(lambda: len(world.done) == 1, ended + 100.0)
    assert world.now < ended + 1.0
    assert (zero.epoch, one.epoch) == ((2, 1024), (2, 1024))


def test_two_deciders_of_one_epoch_do_not_wait_for_each_other() -> None:
    """Rank 2 is late. Rank 0's GO is under way for so long that rank 1 takes over, and takes rank 0
    for a member: the higher gives its own formation up."""
    world = World(3, 2, grace_s=3.0, timeout=1000.0)
    zero, one, _ = world.processes
    began = world.now
    zero.come()
    one.come()
    world.later(began + 2.5, lambda: world.delay.update({(0, 1): 2.0}))
    world.later(began + 3.5, world.delay.clear)
    assert world.run(lambda: zero.agreement.formation is not None, began + 100.0)
    assert world.run(lambda: one.agreement.formation is not None, began + 100.0)
    rivals = [rank.agreement.formation for rank in (zero, one)]
    assert [(way.decider, way.go.epoch) for way in rivals if way is not None] == [(0, 1), (1, 1)]
    assert world.run(lambda: len(world.done) == 1, began + 100.0)
    assert world.now < began + 5.5
    assert zero.members == one.members == (0, 1)


def test_who_has_lost_a_go_is_let_in_again() -> None:
    """Its network goes dark with the GO that counts its READY on its way, and the others form anew:
    nobody says that GO again, and the READY has had its consequence."""
    world = World(3, 2, grace_s=3.0, timeout=1000.0)
    zero, _, two = world.processes
    world.delay[0, 2] = 1.0
    for one in world.processes:
        one.come()
    assert world.run(lambda: zero.state == "inside", world.now + 100.0)
    world.darken(two)
    assert world.run(lambda: len(world.done) == 1, world.now + 100.0)
    world.delay.clear()
    world.lighten()
    for _ in range(2):
        come(world, 0, 1)
    assert (two.state, two.history) == ("works", zero.history)
