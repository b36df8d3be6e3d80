"""OuterStep: ranks train apart for a while, and then bring their models together.

    with OuterStep(model, optimizer, every=30, compression="int4") as outer:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with outer.anchor():
            evaluate(model)

It is put together from parts that do not know each other:

    ticks.py      what ends an iteration         pace.py      when a round is due
    fragments.py  what travels together          wires.py     how deltas become their mean
    rules.py      how the anchor follows them    peers.py     who takes part
    rounds.py     the rounds, and their end      guard.py     steps that are left out
    settings.py   what may be set                last_word.py  an end that was forgotten

Invariants: the anchor is the same on all ranks, to the bit where they compute alike. Training
without exchange is intended here, so the default process group is not warned of; an OuterStep that
counts no iterations while optimizers step is.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from ...codecs import Compression
from ...communicator import Communicator
from ...errors import ConfigError, RingcommError, naming
from ...exact import without_exact
from ...membership import Membership
from .. import guards
from ..group import default_comm
from ..optim.exchanging import ExchangingOptimizer
from ..settings import takes
from ..wrapped import inner_of
from . import state
from .blocks import Block
from .flight import Fragment, Unit
from .fragments import buffers_of, cut, trained_of
from .guard import Guard
from .last_word import LastWord
from .peers import FixedPeers, Peers
from .report import OuterReport
from .rounds import Rounds
from .rules import MEAN, Rule
from .settings import OuterSettings, choose
from .ticks import NoTicks, optimizers_of, ticks_of
from .wires import DenseWire, LargestWire, Wires

_attached: weakref.WeakSet[OuterStep] = weakref.WeakSet()
_attaching = threading.Lock()


class OuterStep:
    """Exchanges the ranks' models every so many iterations, and not their gradients.

    Args:
        model: the model that is trained; not in a DDP over the same ranks.
        optimizer: the inner optimizer, whichever it is; a list of several; or None, and
            ``outer.tick()`` is called after each iteration.
        every: iterations between two rounds of a parameter; None: one round, at the end, by flush()
            or by leaving the "with".
        outer: how the anchor follows the mean of the deltas: "mean", "nesterov", "sparse", or one
            of Nesterov(gamma, mu), Sparse(density, ...). None: nesterov with gamma .7 and mu .5;
            with every=None mean.
        compression: how deltas travel: "int4" and the other codecs; None or "none": as they are.
            What a sparse rule sends travels as it does, in bf16. (``codec`` is its old name.)
        feedback: None: error feedback where the codec needs it. True: with int8, too. False: none.
        fragments: in so many parts the parameters travel, at staggered times.
        delay: iterations that go on while a part travels, which another thread sees to; below
            every / fragments. What is trained meanwhile is added to the new anchor.
        scaler: the torch.amp.GradScaler, if there is one: iterations in which it skips the step
            count as well then.
        comm: the communicator; None: that of the default process group if its backend is
            "ringcomm", else ringcomm's default one. Rounds with a delay go by one of their own.
        min_peers: go on without ranks that are lost or late, with so many at least, and with those
            that come back. The ranks join each other in ``attach`` then, as ringcomm.init does.
        grace_s: seconds that a round waits for late ranks once min_peers are there.
        peers: who takes part in a round, instead of ``comm`` and min_peers: a
            ringcomm.membership.Membership, as one with rejoin=True. With a delay its communicator
            is for nothing else while OuterStep is attached.
        timeout: seconds that a rank waits for the others in a round; None: the communicator's.

    A step for which a gradient of this rank is not finite is left out on this rank, with a warning,
    unless a GradScaler looks after it.

    Attributes:
        iteration: how many this rank has made.
        rounds: how many are over.

    Raises ConfigError for a setting that cannot work.
    """

    @takes(
        OuterSettings,
        {"codec": "compression"},
        {"merge": "is gone: what is trained during a delay is added to the new anchor"},
    )
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        *,
        every: int | None = 30,
        outer: Literal["mean", "nesterov", "sparse"] | Rule | None = None,
        compression: Compression | None = "int4",
        feedback: bool | None = None,
        fragments: int = 1,
        delay: int = 0,
        scaler: Any = None,
        comm: Communicator | None = None,
        min_peers: int | None = None,
        grace_s: float = 30.0,
        peers: Peers | None = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__}: give a torch.nn.Module")
        guards.require_whole_model(model)
        self._model = model
        optimizers = optimizers_of(optimizer)
        self._ticks = ticks_of(optimizers, scaler)
        chosen = choose(
            every=every,
            outer=outer,
            compression=compression,
            feedback=feedback,
            fragments=fragments,
            delay=delay,
            comm=comm,
            min_peers=min_peers,
            grace_s=grace_s,
            peers=peers,
            timeout=timeout,
        )
        pace, rule, self._wires = chosen.pace, chosen.rule, chosen.wires
        cut_up = _fragments(inner_of(model), fragments, rule, self._wires)
        trained = [tensor for unit_ in cut_up for _, tensor in unit_.units[0].block.tensors]
        self._ids = {id(tensor) for tensor in trained}
        _require_own(optimizers, self._ids)
        self._comm, self._peers, self._members = comm, peers, chosen.members
        self._made: Membership | None = None
        self._own: Communicator | None = None
        self._delay = delay
        about = repr(
            (
                [
                    [
                        (u.name, u.block.count, str(u.block.dtype), [n for n, _ in u.block.tensors])
                        for u in fragment.units
                    ]
                    for fragment in cut_up
                ],
                pace,
                rule,
                self._wires,
                delay,
            )
        )
        self._about = about.encode()
        self._first_batch: guards.FirstBatch | None = None
        self._core = Rounds(
            cut_up,
            pace,
            delay,
            self._digest,
            chosen.timeout,
            self._wires.forget,
            lambda: self._guard.take_up_again(),
        )
        names = {id(p): name for name, p in inner_of(model).named_parameters()}
        self._guard = Guard(optimizers, {one: names[one] for one in self._ids}, self._core)
        self._is_attached = self._is_swapped = False
        self._has_end_only = every is None
        self._last_word = LastWord(self)
        self._watch_steps()

    def __reduce__(self) -> NoReturn:
        raise TypeError("OuterStep cannot be copied or pickled; use state_dict()")

    # ---- its life ----

    @naming("attach() of OuterStep")
    def attach(self) -> OuterStep:
        """Begins: a collective. All ranks go on from the anchor of the first one, or, where states
        were loaded, from these.

        Raises:
            ConfigError: the model's DDP spans the ranks that this would connect.
            MismatchError: ranks are set up differently. Else as ``allreduce``.
        """
        if self._is_attached:
            raise ConfigError("OuterStep is attached already")
        self._require_own_weights("attach()")
        with _attaching:
            if any(not self._ids.isdisjoint(other._ids) for other in _attached):
                raise ConfigError("OuterStep: another one is attached to this model; detach that")
        if self._members is not None:
            min_peers, grace_s = self._members
            self._peers = self._made = Membership(min_peers=min_peers, grace_s=grace_s)
        peers = self._peers or FixedPeers(self.comm)
        hellos = self._core.start(peers, self._setup())
        guards.require_apart(self._ids, [row.place for row in hellos.rows])
        if self._delay and isinstance(peers, FixedPeers):
            self._own = peers.comm.split(0)
            assert self._own is not None
            self._core.use(FixedPeers(self._own))
        if dist.is_initialized():
            guards.forget(dist.group.WORLD)
        self._last_word.was_forgotten = False
        self._watch_steps()
        self._first_batch = guards.FirstBatch(self._model)
        self._guard.start()
        self._ticks.start(self._tick)
        self._is_attached = True
        with _attaching:
            _attached.add(self)
        self._core.watch.begin()
        return self

    def _setup(self) -> bytes:
        """A digest of all that must be the same on all ranks: settings, and what is not trained of
        the model and so never exchanged."""
        frozen = [p for p in self._model.parameters() if id(p) not in self._ids]
        return hashlib.blake2b(self._about + guards.digest_of(frozen), digest_size=16).digest()

    def _watch_steps(self) -> None:
        guards.forget(self)
        guards.watch_steps(self, lambda one: one.iteration, _silent, lambda one: one._ids)

    @naming("flush() of OuterStep")
    def flush(self) -> None:
        """Brings all ranks to the anchor, with all that they have trained: a collective. Ranks that
        do not flush yet are waited for, and their rounds taken part in.

        Raises what ``allreduce`` raises."""
        self._require_attached()
        self._require_own_weights("flush()")
        self._require_same_weights()
        with self._core.watch.paused():
            self._core.flush()
        self._last_word.unsent = self._core.unsent

    @naming("detach() of OuterStep")
    def detach(self) -> None:
        """Ends: a round on its way is applied, and the model keeps its local weights; with
        every=None and no flush() before, nothing was exchanged, and a SilenceWarning says so.
        Where it is not attached, nothing happens."""
        if self._is_attached:
            self._require_own_weights("detach()")
            with self._core.watch.paused():
                self._core.land()
            if self._has_end_only and self._last_word.unsent:
                warnings.warn(
                    f"detach() of OuterStep(every=None) without flush(): {self._last_word.unsent} "
                    "iterations of this rank were not exchanged, and the ranks' models differ. "
                    "Call flush() before, on all ranks",
                    guards.SilenceWarning,
                    stacklevel=3,  # behind naming()
                )
            self._let_go()

    def _let_go(self) -> None:
        self._ticks.stop()
        self._guard.stop()
        guards.forget(self)
        if self._first_batch is not None:
            self._first_batch.stop()
        if self._made is not None:
            self._made.close()
            self._peers = self._made = None
        self._core.stop(self._own)
        self._last_word.unsent = 0
        self._own = None
        self._is_attached = False
        with _attaching:
            _attached.discard(self)

    def __enter__(self) -> OuterStep:
        return self.attach()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Flushes and detaches; on an exception it only lets go of the optimizer, and lets a round
        on its way go on."""
        try:
            if kind is None and self._is_attached:
                self.flush()
        finally:
            unsent = self._last_word.unsent
            self._let_go()
            if isinstance(error, SystemExit):  # which nobody is told of
                self._last_word.unsent = unsent

    # ---- in training ----

    def tick(self) -> None:
        """An iteration is over. For who has given neither an optimizer nor a scaler."""
        if not isinstance(self._ticks, NoTicks):
            raise ConfigError(
                "outer.tick(): iterations are counted by the optimizer or scaler "
                "that OuterStep was given; give optimizer=None to count them"
            )
        self._require_attached()
        self._tick()

    @contextlib.contextmanager
    def anchor(self) -> Iterator[None]:
        """Within, the model's weights and buffers are the anchor's, which are the same on all
        ranks; after it they are this rank's own again. Nothing is sent. For evaluation and saving.
        """
        if self._is_swapped:
            raise ConfigError("outer.anchor() is entered already")
        blocks = [unit.block for fragment in self._core.fragments for unit in fragment.units]
        own = [block.local() for block in blocks]
        self._is_swapped = True
        try:
            for block in blocks:
                block.set_local(block.anchor)
            yield
        finally:
            for block, local in zip(blocks, own, strict=True):
                block.set_local(local)
            self._is_swapped = False

    # ---- checkpoints ----

    @without_exact
    def state_dict(self) -> dict[str, Any]:
        """What this rank must keep: anchor, outer momentum, what codecs have left, a round on its
        way, iteration. Nothing is sent. Together with this rank's model and optimizer states the
        same rank of a world of the same size goes on from it to the bit."""
        self._core.settle()
        return state.told(self._core, self._wires, self._wires_comm, own=True)

    @naming("gather_state_dict() of OuterStep")
    def gather_state_dict(self) -> dict[str, Any]:
        """The state for a world of any size, the same on all ranks. A collective. All ranks go on
        from the anchor; what they have trained since the last round is left out.

        Raises what ``allreduce`` raises."""
        self._core.settle()
        return state.told(self._core, self._wires, self._wires_comm, own=False)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` or ``gather_state_dict`` returned, before or (with
        min_peers only) after ``attach``. All ranks must load; nothing is sent. This rank's own
        state leaves the model's weights as they are: load its own weights, too, after ``attach``
        where that came first. Any other state brings the model to the anchor.

        Raises ConfigError for the state of something else, of another model, rule or cut, or one
        that a rank saved for itself in a world of another size. (If another rank of as many did,
        what that rank alone had starts from zero, with a warning.)"""
        self._require_own_weights("load_state_dict()")
        state.load(self._core, self._wires, self._wires_comm, saved)

    # ---- what it tells ----

    @property
    def comm(self) -> Communicator:
        """The communicator that it was given, or of the latest round's members."""
        if self._peers is not None:
            return self._peers.comm
        if self._members is not None:
            raise ConfigError(
                "OuterStep with min_peers joins the other ranks in attach(): attach it first"
            )
        if self._comm is None:
            self._comm = default_comm()
        return self._comm

    @property
    def _wires_comm(self) -> Communicator:
        return self.comm if self._own is None else self._own

    @property
    def iteration(self) -> int:
        """How many iterations this rank has made."""
        return self._core.iteration

    @property
    def rounds(self) -> int:
        """How many rounds are over."""
        return self._core.number

    def report(self) -> OuterReport:
        """What was sent and how long was waited; ``print`` shows it in a line."""
        return self._core.report

    # ---- helpers ----

    @naming("a round of OuterStep")
    def _tick(self) -> None:
        if self._is_swapped:
            raise RingcommError(
                "an optimizer steps within outer.anchor(): the weights there are "
                "for evaluation, and what it has learnt would be lost"
            )
        if self._first_batch is not None:
            self._first_batch.stop()
        rounds = self._core.number
        with self._core.watch.paused():
            self._core.tick()
            self._last_word.unsent = self._core.unsent
        if self._core.number != rounds:
            self._require_same_weights()

    def _digest(self) -> bytes:
        return self._first_batch.digest if self._first_batch is not None else bytes(16)

    def _require_own_weights(self, what: str) -> None:
        if self._is_swapped:
            raise ConfigError(
                f"{what} within outer.anchor(): the model holds the anchor's weights "
                "there; leave that first"
            )

    def _require_same_weights(self) -> None:
        """Raises ConfigError where more of the model is trained than at first."""
        for name, parameter in inner_of(self._model).named_parameters():
            if parameter.requires_grad and id(parameter) not in self._ids:
                raise ConfigError(
                    f"OuterStep: {name!r} is trained since it was made, and is not exchanged: "
                    "detach it, and make a new one, which takes all that is trained then"
                )

    def _require_attached(self) -> None:
        if not self._is_attached:
            raise ConfigError('OuterStep is not attached; use it in a "with", or call attach()')


def require_settings(**settings: Unpack[OuterSettings]) -> None:
    """Raises ConfigError for settings that OuterStep refuses whatever the model."""
    known = inspect.signature(OuterStep).parameters.items()
    others = {"model", "optimizer", "scaler"}
    defaults: Any = {name: one.default for name, one in known if name not in others}
    choose(**{**defaults, **settings})


def _fragments(model: nn.Module, count: int, rule: Rule, wires: Wires) -> list[Fragment]:
    """The model's fragments. Buffers travel with the last one, exactly: to their mean, and integers
    to the largest."""
    fragments = []
    for number, named in enumerate(cut(trained_of(model), count)):
        block = Block(named, wires.align, wires.repeats)
        name = f"fragment {number}"
        fragments.append(Fragment([Unit(name, block, rule, wires.wire(name, block.count))]))
    floating, whole = buffers_of(model)
    if floating:
        wire = DenseWire(None, None)
        unit = Unit("buffers", Block(floating), MEAN(), wire)
        fragments[-1].units.append(unit)
    if whole:
        unit = Unit("counters", Block(whole), MEAN(), LargestWire())
        fragments[-1].units.append(unit)
    return fragments


def _require_own(optimizers: Sequence[torch.optim.Optimizer], ids: set[int]) -> None:
    for one in optimizers:
        if not any(id(p) in ids for group in one.param_groups for p in group["params"]):
            raise ConfigError(
                f"OuterStep: {type(one).__name__} has none of the model's trained "
                "parameters: is it of another model, or of a copy?"
            )
        if isinstance(one, ExchangingOptimizer):
            raise ConfigError(
                f"OuterStep: {type(one).__name__} exchanges in each of its steps, so that nothing "
                "is left for an outer step to do; use it alone, or OuterStep with a plain optimizer"
            )


def _silent(outer: OuterStep) -> str:
    if not outer._is_attached:
        outer._last_word.was_forgotten = True
        return (
            f"{guards.SILENT_STEPS} steps of an optimizer of its model, and OuterStep is not "
            'attached: the ranks train apart. Train in a "with" of it, or call attach()'
        )
    return (
        f"{guards.SILENT_STEPS} steps of an optimizer of its model, and OuterStep has counted no "
        "iteration: it would never exchange anything, and the ranks would train apart for ever. "
        "Give it the optimizer that steps, not one that was made anew since; with a scaler call "
        "scaler.update(); without an optimizer call outer.tick()"
    )
