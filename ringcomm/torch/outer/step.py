"""OuterStep: ranks train apart for a while, and then bring their models together.

    with OuterStep(model, optimizer, every=30, compression="int4") as outer:
        for batch in loader:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        with outer.anchor():
            evaluate(model)

It consists of these parts:

    rules.py      updates of the anchor          rounds.py       when rounds come, and among whom
    wires.py      exchanges of deltas            inner_steps.py  ends of iterations; skipped steps
    blocks.py     the cut of the model           state.py        checkpoints
    round.py      one round on its way           settings.py     checks of settings
    report.py     counts and times

Invariants: the anchor is the same on all ranks, to the bit if they compute alike. Training without
exchange is intended here, so an idle default process group causes no warning; an OuterStep that
counts no iterations while optimizers step does.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import inspect
import logging
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
from ...core.calls import naming
from ...errors import ConfigError, RingcommError
from ...exact import Checkpointed
from ...membership import Membership
from .. import guards
from ..group import default_comm
from ..optim.exchanging import ExchangingOptimizer
from ..sync.exchange_report import ExchangeReport
from ..wrapped import inner_of
from . import state
from .blocks import fragments_of
from .inner_steps import Guard, follow_scaler, follow_steps, optimizers_of, require_scaler
from .report import OuterReport
from .rounds import FixedPeers, Peers, Rounds
from .rules import Rule
from .settings import OuterSettings, choose, takes_settings

_log = logging.getLogger("ringcomm")
_attached: weakref.WeakSet[OuterStep] = weakref.WeakSet()
_attaching = threading.Lock()


class OuterStep(Checkpointed):
    """Exchanges the ranks' models every so many iterations, and not their gradients.

    Args:
        model: the model that is trained; not in a DDP over the same ranks.
        optimizer: any inner optimizer; a list of several; or None: then call ``outer.tick()`` after
            each iteration.
        every: iterations between two rounds of a parameter; None: one round, at the end, by flush()
            or by leaving the "with".
        outer: how the anchor follows the mean of the deltas: "mean", "nesterov", "sparse", or one
            of Nesterov(gamma, mu), Sparse(density, ...). None: nesterov with gamma .7 and mu .5;
            with every=None mean.
        compression: codec of the deltas; None or "none": no compression. "default": "int4", but
            "bf16" with a sparse rule, which takes no other. (``codec`` is its old name.)
        feedback: None: error feedback if the codec needs it. True: with int8 or fp8, too. False:
            none. A sparse rule takes None only.
        fragments: number of parts in which the parameters are exchanged, at staggered times.
        delay: iterations that continue while another thread exchanges a part; below
            every / fragments. Their training is added to the new anchor.
        scaler: the torch.amp.GradScaler, if there is one: then an iteration in which it skips the
            step is counted, too.
        comm: the communicator; None: that of the default process group if its backend is
            "ringcomm", else ringcomm's default one. Rounds with a delay use one of their own. Or a
            ringcomm.membership.Membership: rounds go on without ranks that are lost or late, and
            with ranks that come back. With a delay nothing else may use its communicator while
            OuterStep is attached.
        timeout: seconds that a rank waits for the others in a round; None: the communicator's.

    A step with a gradient of this rank that is not finite is skipped on this rank, with a warning,
    unless a GradScaler checks it.

    Attributes:
        iteration: number of this rank's iterations.
        rounds: number of finished rounds.

    Raises ConfigError for a setting that cannot work.
    """

    @takes_settings
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        *,
        every: int | None = 30,
        outer: Literal["mean", "nesterov", "sparse"] | Rule | None = None,
        compression: Compression | Literal["default"] | None = "default",
        feedback: bool | None = None,
        fragments: int = 1,
        delay: int = 0,
        scaler: Any = None,
        comm: Communicator | Membership | None = None,
        timeout: float | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model={type(model).__name__}: give a torch.nn.Module")
        guards.require_whole_model(model)
        self._model = model
        self._optimizers, self._scaler = optimizers_of(optimizer), scaler
        require_scaler(scaler)
        chosen = choose(
            every=every,
            outer=outer,
            compression=compression,
            feedback=feedback,
            fragments=fragments,
            delay=delay,
            comm=comm,
            timeout=timeout,
        )
        self._wires, self._peers = chosen.wires, chosen.peers
        self._inner = inner_of(model)
        cut_up = fragments_of(self._inner, fragments, chosen.rule, chosen.wires)
        self._ids = {id(one.tensor) for part in cut_up for one in part.blocks[0].slices}
        _require_own(self._optimizers, self._ids)
        about = [
            [(one.name, one.count, str(one.dtype), one.names) for one in part.blocks]
            for part in cut_up
        ]
        self._about = repr((about, chosen.pace, chosen.rule, chosen.wires, delay)).encode()
        self._first_batch: guards.FirstBatch | None = None
        self._rounds = Rounds(
            cut_up,
            chosen.pace,
            delay,
            chosen.timeout,
            chosen.wires.reset_residuals,
            lambda: self._guard.resume_from_anchor(),
        )
        named = self._inner.named_parameters()
        names = {id(p): name for name, p in named if id(p) in self._ids}
        self._guard = Guard(self._optimizers, names, self._rounds)
        self._hooks = contextlib.ExitStack()  # what detaching undoes
        self._is_attached = self._is_swapped = False
        self._end_warning = _EndWarning(self)
        self._watch_steps()

    def __reduce__(self) -> NoReturn:
        raise TypeError("OuterStep cannot be copied or pickled; use state_dict()")

    # ---- its life ----

    @naming("attach() of OuterStep")
    def attach(self) -> OuterStep:
        """Starts counting iterations. A collective: all ranks take the first rank's weights as the
        anchor, or, if states were loaded, continue from these; attached again, they continue from
        the anchor that they had.

        Raises:
            ConfigError: the model's DDP spans the ranks that this would connect.
            MismatchError: ranks are set up differently.

        It also raises what ``allreduce`` raises.
        """
        if self._is_attached:
            raise ConfigError("OuterStep is attached already")
        self._require_own_weights("attach()")
        had_state, is_added = self._rounds.has_state, False
        try:
            with _attaching:
                if any(not self._ids.isdisjoint(other._ids) for other in _attached):
                    raise ConfigError(
                        "OuterStep: another one is attached to this model; detach that"
                    )
                is_added = True
                _attached.add(self)
            self._connect()
            self._is_attached = True
            self._rounds.account.resume()
        except BaseException:
            if is_added:
                self._rounds.has_state = had_state  # so that the next attach() gets the state anew
                self._disconnect()
                self._watch_steps()
            raise
        if dist.is_initialized():
            guards.unwatch(dist.group.WORLD)
        self._end_warning.was_forgotten = False
        return self

    def _connect(self) -> None:
        round_comm: Communicator | None = None
        self._hooks.callback(lambda: self._rounds.stop(round_comm))
        peers = self._peers_or_default()
        # Settings, and the frozen parameters, which are never exchanged: the same on all ranks.
        frozen = [p for p in self._model.parameters() if id(p) not in self._ids]
        setup = hashlib.blake2b(self._about + guards.digest_of(frozen), digest_size=16).digest()
        hellos = self._rounds.start(peers, setup)
        guards.require_apart(self._ids, [row.default_rank for row in hellos.rows])
        if self._rounds.delay and isinstance(peers, FixedPeers):
            round_comm = peers.comm.split(0)
            assert round_comm is not None
            self._rounds.peers = FixedPeers(round_comm)
        self._watch_steps()
        self._first_batch = guards.FirstBatch(self._model)
        self._hooks.callback(self._first_batch.stop)
        self._guard.follow(self._hooks)
        if self._scaler is not None:
            follow_scaler(self._scaler, self._tick, self._hooks)
        else:
            follow_steps(self._optimizers, self._tick, self._hooks)

    def _watch_steps(self) -> None:
        guards.unwatch(self)
        guards.watch_steps(self, lambda one: one.iteration, _silent, lambda one: one._ids)

    @naming("flush() of OuterStep")
    def flush(self) -> None:
        """Exchanges all unsent training, and brings all ranks to the anchor. A collective. This
        rank takes part in the rounds of ranks that do not flush yet, until they do.

        Raises what ``allreduce`` raises."""
        self._require_attached()
        self._require_own_weights("flush()")
        self._require_same_weights()
        if self._first_batch is not None:
            self._rounds.first_batch = self._first_batch.digest
        with self._rounds.account.paused():
            self._rounds.flush()
        self._end_warning.unsent = self._rounds.unsent

    @naming("detach() of OuterStep")
    def detach(self) -> None:
        """Ends the exchange: applies a round on its way, and leaves the model its local weights. A
        SilenceWarning tells if nothing was exchanged, with every=None and no flush() before. Does
        nothing if it is not attached."""
        if self._is_attached:
            self._require_own_weights("detach()")
            with self._rounds.account.paused():
                self._rounds.finish_round()
            unsent = self._end_warning.unsent
            if self._rounds.pace.every is None and unsent and self.comm.world_size > 1:
                warnings.warn(
                    f"detach() of OuterStep(every=None) without flush(): {unsent} iterations of "
                    "this rank were not exchanged, and the ranks' models differ. Call flush() "
                    "before, on all ranks",
                    guards.SilenceWarning,
                    stacklevel=3,  # the caller, above naming()
                )
            self._disconnect()

    def _disconnect(self) -> None:
        guards.unwatch(self)
        try:
            self._hooks.close()
        finally:
            self._end_warning.unsent = 0
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
        """Flushes and detaches; on an exception it only detaches from the optimizer, and a round on
        its way continues."""
        try:
            if kind is None and self._is_attached:
                self.flush()
        finally:
            unsent = self._end_warning.unsent
            self._disconnect()
            if isinstance(error, SystemExit):  # no traceback shows it
                self._end_warning.unsent = unsent

    # ---- in training ----

    def tick(self) -> None:
        """Counts an iteration, for callers that gave neither an optimizer nor a scaler."""
        if self._optimizers or self._scaler is not None:
            raise ConfigError(
                "outer.tick(): iterations are counted by the optimizer or scaler "
                "that OuterStep was given; give optimizer=None to count them"
            )
        self._require_attached()
        self._tick()

    @contextlib.contextmanager
    def anchor(self) -> Iterator[None]:
        """Puts the anchor's weights and buffers, the same on all ranks, into the model within this
        context, and this rank's own back after it. Nothing is sent. For evaluation and saving."""
        if self._is_swapped:
            raise ConfigError("outer.anchor() is entered already")
        blocks = self._rounds.blocks
        own = [block.local() for block in blocks]
        self._is_swapped = True
        try:
            for block in blocks:
                block.scatter(block.anchor)
            yield
        finally:
            for block, local in zip(blocks, own, strict=True):
                block.scatter(local)
            self._is_swapped = False

    # ---- checkpoints ----

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns anchor, outer momentum, residuals of codecs and the iteration. This rank's own
        state has a round on its way, too, and needs its model's and optimizer's states beside it;
        from the gathered one, without their training since the last round, all ranks continue from
        the anchor."""
        self._rounds.wait_for_round()
        return state.saved(self._rounds, self._wires, self._wires_comm, own=own)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` or ``gather_state_dict`` returned, before or after
        ``attach``. All ranks must load; nothing is sent. This rank's own state does not change the
        model's weights: load its own weights, too, after ``attach`` if that came first. Any other
        state sets the model to the anchor.

        Raises ConfigError for an object that is no such state, a state of another model, rule or
        cut, or ``state_dict`` of a world of another size. (With ``state_dict`` of another rank of
        as many, that rank's own part starts from zero, with a warning.)"""
        self._require_own_weights("load_state_dict()")
        state.restore(self._rounds, self._wires, self._wires_comm, saved)

    # ---- properties and report ----

    @property
    def comm(self) -> Communicator:
        """Communicator that it was given, or that of the latest round's members."""
        return self._peers_or_default().comm

    @property
    def _wires_comm(self) -> Communicator:
        return self._rounds.peers.comm if self._is_attached else self.comm

    @property
    def iteration(self) -> int:
        """Number of this rank's iterations."""
        return self._rounds.iteration

    @property
    def rounds(self) -> int:
        """Number of finished rounds."""
        return self._rounds.number

    def report(self) -> OuterReport:
        """Returns counts and times of this rank so far; ``print`` shows them in a line."""
        account = self._rounds.account
        return dataclasses.replace(
            copy.deepcopy(self._rounds.report),
            payload_bytes=account.payload,
            sent_bytes=account.sent.total,
            training_s=account.training_s,
            waited_s=account.waited_s,
            own_s=account.own_s,
        )

    def exchanges(self) -> ExchangeReport:
        """Returns the figures of the rounds as ``HookState.report`` does of steps: a round is a
        step, from the end of the round before on, and ``exposed_s`` the time that this rank has
        waited in it. Repeated rounds count once."""
        return self._rounds.account.report()

    # ---- helpers ----

    def _peers_or_default(self) -> Peers:
        if self._peers is None:
            self._peers = FixedPeers(default_comm())
        return self._peers

    @naming("a round of OuterStep")
    def _tick(self) -> None:
        if self._is_swapped:
            raise RingcommError(
                "an optimizer steps within outer.anchor(): the weights there are "
                "for evaluation, and what it has learnt would be lost"
            )
        if self._first_batch is not None:
            self._first_batch.stop()
            self._rounds.first_batch, self._first_batch = self._first_batch.digest, None
        rounds = self._rounds.number
        with self._rounds.account.paused():
            self._rounds.tick()
            self._end_warning.unsent = self._rounds.unsent
        if self._rounds.number != rounds:
            self._require_same_weights()

    def _require_own_weights(self, what: str) -> None:
        if self._is_swapped:
            raise ConfigError(
                f"{what} within outer.anchor(): the model holds the anchor's weights "
                "there; leave that first"
            )

    def _require_same_weights(self) -> None:
        """Raises ConfigError if parameters of the model are trained that were not at first."""
        for name, parameter in self._inner.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._ids:
                raise ConfigError(
                    f"OuterStep: {name!r} is trained since it was made, and is not exchanged: "
                    "detach it, and make a new one, which takes all that is trained then"
                )

    def _require_attached(self) -> None:
        if not self._is_attached:
            raise ConfigError('OuterStep is not attached; use it in a "with", or call attach()')


# ---- warnings and checks ----


class _EndWarning:
    """Logs a warning when an OuterStep is deleted, or at exit, without its end: only this rank's
    model has its training, and no other error would show that.

        never attached                  a forgotten "with": repeats the SilenceWarning
        attached, and never detached    iterations of this rank are in no round
        left by SystemExit              the same; other exceptions need no warning

    It logs once, and does not keep the OuterStep alive.

    Args:
        owner: that OuterStep.

    Attributes:
        unsent: iterations of this rank that are in no round yet.
        was_forgotten: whether optimizers of its model have stepped while it was not attached.
    """

    def __init__(self, owner: object) -> None:
        self.unsent = 0
        self.was_forgotten = False
        weakref.finalize(owner, self._say)

    def _say(self) -> None:
        if self.was_forgotten:
            _log.warning(
                "OuterStep was never attached, and the ranks have trained apart: train "
                'in a "with" of it, or call attach()'
            )
        elif self.unsent:
            _log.warning(
                "OuterStep was left without its end: %d iterations of this rank are in no "
                'round, and the ranks\' models differ. Leave its "with", or call flush() '
                "and detach()",
                self.unsent,
            )


def require_settings(**settings: Unpack[OuterSettings]) -> None:
    """Raises ConfigError for settings that OuterStep refuses whatever the model."""
    known = inspect.signature(OuterStep).parameters
    defaults: Any = {name: known[name].default for name in OuterSettings.__annotations__}
    choose(**{**defaults, **settings})


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
        outer._end_warning.was_forgotten = True
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
