"""One step of staleness: a backward gets the mean of the step before, and sends its own meanwhile.

    step           3                     4                     5            flush
    travels        g3 ------------------>g4 ------------------>g5 -------->
    handed out     mean of g2            mean of g3            mean of g4   mean of g5

So a transfer may take as long as a whole step before training waits for it. In the first step of a
row there is nothing to hand out, and the optimizer gets zeros; what is in flight at the end is
handed out by ``flush``. So each gradient is handed out once, in order, by one step more than there
are gradients.

Before that come dense steps, which are synchronous: in the beginning weights move far in a step.
After them a gradient is late by one step, which a correction makes up for (correction.py).

Invariants: what is in flight is this module's own memory, one buffer for each bucket, and belongs
to parameters: DDP may lay its buckets out anew at any time. Works of a step are over before those
of the next begin, so the residuals of a step that is dropped are taken back before others use them.
What DDP drops, as no rank has used the parameter in this step, is handed out with the next step.
All ranks hand out the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch

from ..codecs import Codec
from ..errors import ConfigError, RingcommError
from .account import Account
from .backward import after_backward
from .buckets import Bucket, in_shape_of
from .correction import Correction
from .guards import STALE, Unsuited
from .named_feedback import NamedFeedback
from .settings import require_truth, require_whole
from .steps import remove_all
from .streams import future_on
from .transport import GradientFuture, Transport
from .wrapped import inner_of

LEAST_BITS = 4
_Layout = tuple[tuple[int, int], ...]
"""Of a bucket: the parameters by id(), and where their gradients begin."""
_TILE = 1 << 20  # elements that are swapped at once


@dataclasses.dataclass(frozen=True)
class Stale1:
    """One step of staleness, as a setting: ``HookState(..., pace=Stale1(dense_steps=500))``.

    Args:
        dense_steps: so many first steps are synchronous. About a twentieth of all is right.
        correction: each rank does its backward where its optimizer would go by the gradient that
            is in flight, as far as this rank knows it. That takes the memory of the weights and of
            the gradients once more, and the time of another step of the optimizer and of copies of
            its state. There is none for an optimizer whose step needs a closure, nor while the
            model as a whole is in ``eval()``.

    Raises ConfigError for a negative number of steps, or a correction that is no truth value.
    """

    dense_steps: int = 100
    correction: bool = True

    def __post_init__(self) -> None:
        require_whole("dense_steps", self.dense_steps, 0)
        require_truth("correction", self.correction)


@dataclasses.dataclass
class _Late:
    """A parameter's gradient in flight, or arrived and not handed out yet.

    Attributes:
        mean: a view of what travels; the mean once ``future`` is completed.
        future: None: it has arrived.
        used: whether any rank has used the parameter: more than 0; None: some have.
        scale: the loss scale that is in it.
    """

    mean: torch.Tensor
    future: GradientFuture | None
    used: torch.Tensor | None
    scale: float

    def was_used(self) -> bool:
        """Once it has arrived; waits for a GPU."""
        return self.used is None or bool(self.used > 0)


class OneStepStale:
    """See Pace."""

    under_adam: Unsuited | None = STALE

    def __init__(
        self, setting: Stale1, transport: Transport, account: Account, residuals: NamedFeedback
    ) -> None:
        self._setting = setting
        self._transport, self._account, self._residuals = transport, account, residuals
        self._correction = Correction() if setting.correction else None
        self._is_late = False
        self._late: dict[int, _Late] = {}  # by id() of the parameter
        self._dropped: dict[int, torch.Tensor] = {}  # handed out to what this rank did not use
        self._used: set[int] = set()  # by this rank, since the latest bucket of the parameter
        self._noted: set[int] = set()  # parameters whose use is noted
        self._hooks: list[Any] = []
        weakref.finalize(self, remove_all, self._hooks).atexit = False
        self._flying: list[GradientFuture] = []
        self._stores: dict[_Layout, torch.Tensor] = {}  # what is sent, and a flag per parameter
        self._launched: list[_Layout] = []  # in this step

    def take_model(self, model: torch.nn.Module) -> None:
        """See Pace."""
        inner = inner_of(model)
        if self._correction is not None:
            self._correction.attach(inner)
        remove_all(self._hooks)
        self._noted.clear()
        for parameter in inner.parameters():
            if parameter.requires_grad:
                self._note_use_of(parameter)

    def _note_use_of(self, parameter: torch.Tensor) -> None:
        self._noted.add(id(parameter))
        register: Any = parameter.register_post_accumulate_grad_hook
        self._hooks.append(register(_UseNote(self._used)))

    def require(self, codecs: Sequence[Codec]) -> None:
        """See Pace."""
        if not self._residuals.parameter_ids:
            raise ConfigError("pace='stale1' keeps gradients in flight by the names of the model's "
                              "parameters; give HookState(..., model=model)")  # fmt: skip
        for codec in codecs:
            if codec.bits < LEAST_BITS:
                raise ConfigError(
                    f"pace='stale1' with compression={codec.name!r}: what a codec of less than "
                    f"{LEAST_BITS} bits leaves for later would come later still, and training "
                    "diverges; give int4 or a gentler codec, or pace='every'"
                )

    # ---- a step ----

    def settle(self, step: int) -> None:
        """See Pace."""
        self._arrive()
        self._is_late = step >= self._setting.dense_steps or bool(self._late)
        self._account.deferred = self._is_late

    def _arrive(self) -> None:
        """Waits for what is in flight. The transport knows of failures."""
        flying, self._flying = self._flying, []
        if not flying:
            return
        with self._account.stall():
            for future in flying:
                with contextlib.suppress(RuntimeError, RingcommError):
                    future.wait()

    def launch(self, bucket: Bucket, codec: Codec) -> GradientFuture:
        """See Pace."""
        ids = [id(parameter) for parameter, _, _ in bucket.spans]
        for parameter, _, _ in bucket.spans:
            if id(parameter) not in self._noted:  # it is trained since lately
                self._note_use_of(parameter)
                self._used.add(id(parameter))
        used = [key in self._used for key in ids]
        self._used.difference_update(ids)
        if self._is_late:
            future = self._defer(bucket, codec, used)
        else:
            future = self._transport.launch(bucket, codec)
        if bucket.last:
            self._end_step()
        return future

    def _end_step(self) -> None:
        self._stores = {key: self._stores[key] for key in self._launched}
        self._launched = []
        if self._correction is not None and not after_backward(self._correction.end_backward):
            self._correction.end_backward()

    def _defer(self, bucket: Bucket, codec: Codec, used: list[bool]) -> GradientFuture:
        """Sends a copy of the bucket, and puts into the bucket what was sent in the step before."""
        again, waiting = self._take_dropped(bucket), set(self._late)
        store = self._exchange(bucket)
        for start, stop, gradient in again:
            bucket.buffer[start:stop].add_(gradient)
        scale = self._residuals.store.loss_scale
        if self._correction is not None:
            self._correction.note(bucket.spans, store, bucket.buffer, scale)
        self._keep_for_drop(bucket, used, waiting)
        end = bucket.buffer.numel()
        store[end:].copy_(torch.tensor(used, dtype=torch.float32))
        future = self._transport.launch(Bucket(store, bucket.spans, bucket.last), codec)
        self._flying.append(future)
        for index, (parameter, start, stop) in enumerate(bucket.spans):
            flag = store[end + index]
            self._late[id(parameter)] = _Late(store[start:stop], future, flag, scale)
        over = future_on([bucket.buffer.device])
        over.set_result(bucket.buffer)
        return over  # type: ignore[no-any-return]

    def _exchange(self, bucket: Bucket) -> torch.Tensor:
        """The bucket's gradients, in memory of this module; the bucket then has what came late, in
        the units of now, and zeros where nothing did."""
        buffer, count = bucket.buffer, bucket.buffer.numel()
        key = tuple((id(parameter), start) for parameter, start, _ in bucket.spans)
        self._launched.append(key)
        lates = [self._late.pop(id(parameter), None) for parameter, _, _ in bucket.spans]
        for future in {id(late.future): late.future for late in lates if late}.values():
            if future is not None:  # long over; this thread's stream goes on behind it
                future.wait()
        store = self._stores.get(key)
        if store is not None:
            _swap(buffer, store[:count])
        else:
            store = self._stores[key] = buffer.new_empty(count + len(bucket.spans))
            store[:count].copy_(buffer)
            buffer.zero_()
            for (_, start, stop), late in zip(bucket.spans, lates, strict=True):
                if late is not None:
                    buffer[start:stop].copy_(late.mean)
        scale = self._residuals.store.loss_scale
        for (_, start, stop), late in zip(bucket.spans, lates, strict=True):
            if late is not None and late.scale != scale:
                buffer[start:stop].mul_(scale / late.scale)
        return store

    def _take_dropped(self, bucket: Bucket) -> list[tuple[int, int, torch.Tensor]]:
        """(start, stop, gradient) of what DDP has dropped in the step before, as no rank used the
        parameter."""
        taken = []
        for parameter, start, stop in bucket.spans:
            gradient = self._dropped.pop(id(parameter), None)
            late = self._late.get(id(parameter))
            if gradient is not None and late is not None and not late.was_used():
                taken.append((start, stop, gradient))
        return taken

    def _keep_for_drop(self, bucket: Bucket, used: list[bool], waiting: Container[int]) -> None:
        """Keeps what is handed out, if anything waited, to parameters that this rank has not used,
        until it is known whether another one has."""
        for (parameter, start, stop), mine in zip(bucket.spans, used, strict=True):
            if not mine and id(parameter) in waiting:
                self._dropped[id(parameter)] = bucket.buffer[start:stop].clone()

    # ---- between steps ----

    def flush(self) -> bool:
        """See Pace."""
        arrived = self._arrived()
        for parameter, mean in arrived.values():
            gradient = in_shape_of(parameter, mean)
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
        self._late, self._dropped, self._stores = {}, {}, {}
        if self._correction is not None:
            self._correction.end_backward()
            self._correction.forget()
        return bool(arrived)

    def _arrived(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """By name, the parameter and what is to be handed out to it, in the units of now. Raises
        the transport's error."""
        self._arrive()
        if self._transport.error is not None:
            raise self._transport.error
        arrived, scale = {}, self._residuals.store.loss_scale
        for name, parameter in self._residuals.named().items():
            late = self._late.get(id(parameter))
            if late is None:
                continue
            if late.future is not None:
                late.future.wait()
            mean = late.mean if late.scale == scale else late.mean * (scale / late.scale)
            if not late.was_used():
                dropped = self._dropped.get(id(parameter))
                if dropped is None:
                    continue
                mean = mean + dropped
            arrived[name] = (parameter, mean)
        return arrived

    def state_dict(self, own: bool) -> dict[str, Any]:
        """See Pace. The means are the same on all ranks, and fit a world of any size; where the
        coming backward takes place is each rank's own."""
        means = {
            name: in_shape_of(parameter, mean).clone()
            for name, (parameter, mean) in self._arrived().items()
        }
        scale = self._residuals.store.loss_scale
        state: dict[str, Any] = {"means": means, "loss_scale": scale}
        if own and self._correction is not None:
            state["correction"] = self._correction.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Pace. Raises ConfigError for a state of another model."""
        means, named = state["means"], self._residuals.named()
        for name, mean in means.items():
            if name not in named or named[name].numel() != mean.numel():
                raise ConfigError(f"the state is of another model: it has a gradient of {name!r} "
                                  f"with {mean.numel()} elements")  # fmt: skip
        correction = state.get("correction", {})
        if self._correction is not None:
            self._correction.require(correction)
        self._arrive()
        self._late = {}
        for name, mean in means.items():
            parameter = named[name]
            flat = torch.empty(mean.numel(), dtype=mean.dtype, device=parameter.device)
            in_shape_of(parameter, flat).copy_(mean.view(parameter.shape))
            self._late[id(parameter)] = _Late(flat, None, None, state["loss_scale"])
        self._dropped, self._stores = {}, {}
        if self._correction is not None:
            self._correction.load_state_dict(correction)


class _UseNote:
    """Notes which parameters this rank has used."""

    def __init__(self, used: set[int]) -> None:
        self._used = used

    def __call__(self, parameter: torch.Tensor) -> None:
        self._used.add(id(parameter))


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    for start in range(0, one.numel(), _TILE):
        a, b = one[start : start + _TILE], other[start : start + _TILE]
        tile = a.clone()
        a.copy_(b)
        b.copy_(tile)
