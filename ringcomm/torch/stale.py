"""One step of staleness: a backward gets the mean of the step before, and sends its own meanwhile.

    step           3                     4                     5            flush
    travels        g3 ------------------>g4 ------------------>g5 -------->
    applied        mean of g2            mean of g3            mean of g4   mean of g5

So a transfer may take as long as a whole step before training waits for it. The first such step has
no mean yet, and its optimizer step gets zeros; ``flush`` applies the gradient in flight at the end.
So each gradient is applied once, in order, in one step more than there are gradients.

Dense steps come first, which are synchronous: in the beginning weights move far in a step. After
them a gradient is late by one step, which a correction makes up for (correction.py).

Invariants: gradients in flight lie in this module's own memory, one buffer for each bucket, and are
looked up by parameter: DDP may lay its buckets out anew at any time. Works of a step are over
before those of the next begin, so the residuals of a step that is dropped are restored before the
next step uses them. All ranks apply the same means, to all parameters in each step: a DDP that
drops the mean of a parameter that no rank has used is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..codecs import Codec
from ..errors import ConfigError, did_you_mean
from ..exact import is_exact, is_own, require_world
from .argument_checks import require_truth, require_whole
from .buckets import GradientBucket, in_shape_of
from .correction import Correction
from .guards import STALE
from .named_feedback import NamedFeedback
from .pace import Pace
from .steps import after_backward
from .streams import future_on
from .sync.account import Account
from .transport import GradientFuture, Transport
from .wrapped import inner_of, wrappers_of

_LEAST_BITS = 4
_Layout = tuple[tuple[int, int], ...]
"""Layout of a bucket: id() of each parameter, and the start of its gradient."""
_TILE = 1 << 20  # elements that _swap moves at once


@dataclasses.dataclass(frozen=True)
class Stale1:
    """One step of staleness, as a setting: ``HookState(..., pace=Stale1(dense_steps=500))``.

    Args:
        dense_steps: number of first steps that are synchronous. About a twentieth of all is right.
        correction: each rank runs its backward at the weights that its optimizer would reach with
            its own part of the gradient in flight. That takes the memory of the weights and of
            the gradients once more, and the time of another step of the optimizer and of copies of
            its state. Skipped for an optimizer whose step needs a closure, and while the model as
            a whole is in ``eval()``.

    Raises ConfigError for a negative number of steps, or a correction that is no bool.
    """

    dense_steps: int = 100
    correction: bool = True

    def __post_init__(self) -> None:
        require_whole("dense_steps", self.dense_steps, 0)
        require_truth("correction", self.correction)


@dataclasses.dataclass
class _PendingMean:
    """A parameter's gradient in flight, or arrived and not applied yet.

    Attributes:
        mean: a view of the buffer that is sent; the mean once ``future`` is completed.
        future: None: it has arrived.
        scale: the loss scale that is in it.
    """

    mean: torch.Tensor
    future: GradientFuture | None
    scale: float


class OneStepStale(Pace):
    """Gives each step the mean of the step before."""

    under_adam = STALE

    def __init__(
        self, setting: Stale1, transport: Transport, account: Account, residuals: NamedFeedback
    ) -> None:
        super().__init__(transport)
        self._setting, self._account, self._residuals = setting, account, residuals
        self._correction = Correction() if setting.correction else None
        self._is_late = self._suits_ddp = False
        self._pending: dict[int, _PendingMean] = {}  # by id() of the parameter
        self._stores: dict[_Layout, torch.Tensor] = {}  # buffers that are sent
        self._launched: list[_Layout] = []  # layouts of this step's buckets

    def take_model(self, model: torch.nn.Module) -> None:
        self._suits_ddp = False
        if self._correction is not None:
            self._correction.attach(inner_of(model))

    def require(self, codecs: Sequence[Codec]) -> None:
        """Raises ConfigError for a codec of less than 4 bits, or without a model."""
        if not self._residuals.parameter_ids:
            raise ConfigError(
                "pace='stale1' keeps gradients in flight by the names of the model's "
                "parameters; give HookState(..., model=model)"
            )
        for codec in codecs:
            if codec.bits < _LEAST_BITS:
                raise ConfigError(
                    f"pace='stale1' with compression={codec.name!r}: what a codec of less than "
                    f"{_LEAST_BITS} bits leaves for later would come later still, and training "
                    "diverges; give int4 or a gentler codec, or pace='every'"
                )

    # ---- a step ----

    def finish_previous_step(self, step: int) -> None:
        """Waits for the works of the step before, and decides whether the coming means are late."""
        super().finish_previous_step(step)
        self._launched = []
        self._is_late = step >= self._setting.dense_steps or bool(self._pending)
        self._account.deferred = self._is_late

    def launch(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Sends a bucket. Raises ConfigError if DDP looks for unused parameters."""
        if not self._suits_ddp:
            self._require_all_used()
        if self._is_late:
            future = self._defer(bucket, codec)
        else:
            future = super().launch(bucket, codec)
        if bucket.last:
            self._end_step()
        return future

    def _require_all_used(self) -> None:
        wrappers = wrappers_of(self._residuals.parameter_ids)
        if any(wrapper.find_unused_parameters for wrapper in wrappers):
            raise ConfigError(
                "pace='stale1' under DistributedDataParallel(find_unused_parameters=True): DDP "
                "drops the mean that comes for a parameter which no rank has used in this step, "
                "and a step late that is of another one; leave find_unused_parameters out (the "
                "Trainer of transformers: ddp_find_unused_parameters=False), or give pace='every'"
            )
        self._suits_ddp = True

    def _end_step(self) -> None:
        self._stores = {key: self._stores[key] for key in self._launched}
        self._launched = []
        if self._correction is not None and not after_backward(self._correction.end_backward):
            self._correction.end_backward()

    def _defer(self, bucket: GradientBucket, codec: Codec) -> GradientFuture:
        """Sends a copy of the bucket, and writes the mean of the step before to the bucket."""
        store = self._swap_with_late(bucket)
        scale = self._residuals.loss_scale
        if self._correction is not None:
            self._correction.note(bucket.slices, store, bucket.buffer, scale)
        try:
            future = self._transport.launch(
                GradientBucket(store, bucket.slices, bucket.last), codec
            )
        except BaseException:
            self._stores = {}  # this one's gradients were not sent, and are no means
            raise
        self._in_flight.append(future)
        for one in bucket.slices:
            self._pending[id(one.tensor)] = _PendingMean(one.elements(store), future, scale)
        over = future_on([bucket.buffer.device])
        over.set_result(bucket.buffer)
        return over  # type: ignore[no-any-return]

    def _swap_with_late(self, bucket: GradientBucket) -> torch.Tensor:
        """Moves the bucket's gradients to memory of this module, and returns that. The bucket gets
        the late means, scaled to the present loss scale, and zeros where there is none."""
        buffer = bucket.buffer
        key = tuple((id(one.tensor), one.start) for one in bucket.slices)
        self._launched.append(key)
        pending = [self._pending.pop(id(one.tensor), None) for one in bucket.slices]
        for future in {id(late.future): late.future for late in pending if late}.values():
            if future is not None:  # it is over: this makes the thread's stream follow it
                future.wait()
        store = self._stores.get(key)
        if store is not None:
            _swap(buffer, store)
        else:
            store = self._stores[key] = buffer.clone()
            buffer.zero_()
            for one, late in zip(bucket.slices, pending, strict=True):
                if late is not None:
                    one.elements(buffer).copy_(late.mean)
        scale = self._residuals.loss_scale
        for one, late in zip(bucket.slices, pending, strict=True):
            if late is not None and late.scale != scale:
                one.elements(buffer).mul_(scale / late.scale)
        return store

    # ---- between steps ----

    def flush(self) -> bool:
        """Waits for the gradients in flight, and writes their means over ``parameter.grad``; but
        zeros only where there is one."""
        pending = self._pending_means()
        for parameter, mean in pending.values():
            gradient = in_shape_of(parameter, mean)
            if parameter.grad is not None:
                parameter.grad.copy_(gradient)
            elif gradient.any():  # else no rank has used it, and DDP has left it without one
                parameter.grad = gradient.clone()
        self._pending, self._stores = {}, {}
        if self._correction is not None:
            self._correction.end_backward()
            self._correction.clear()
        return bool(pending)

    def _pending_means(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Returns by name the parameter and its mean that is not applied yet, at the present loss
        scale. Raises the transport's error."""
        if self._transport.error is not None:
            raise self._transport.error
        pending, scale = {}, self._residuals.loss_scale
        for name, parameter in self._residuals.named().items():
            late = self._pending.get(id(parameter))
            if late is None:
                continue
            if late.future is not None:
                late.future.wait()
            mean = late.mean if late.scale == scale else late.mean * (scale / late.scale)
            pending[name] = (parameter, mean)
        return pending

    def saved(self, own: bool) -> dict[str, Any]:
        """Returns the state for a checkpoint. The means are the same on all ranks, and fit a world
        of any size; the correction's state, added if ``own``, is each rank's own."""
        means = {
            name: in_shape_of(parameter, mean).clone()
            for name, (parameter, mean) in self._pending_means().items()
        }
        ahead = self._correction.saved() if own and self._correction is not None else {}
        is_ahead = any(ahead.values())
        if not means and not is_ahead:
            return {}
        state: dict[str, Any] = {"means": means, "loss_scale": self._residuals.loss_scale}
        if is_ahead:
            state["correction"] = {"exact": dict(self._transport.place), **ahead}
        return state

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state of another model, or a correction of a world of another
        size."""
        named, means = self._residuals.named(), state.get("means", {})
        if means and "loss_scale" not in state:
            raise ConfigError("the state has gradients in flight without their 'loss_scale'")
        for name, mean in means.items():
            if name not in named or named[name].numel() != mean.numel():
                raise ConfigError(
                    f"the state is of another model: it has a gradient of {name!r} "
                    f"with {mean.numel()} elements"
                )
        correction = state.get("correction", {})
        if is_exact(correction):
            require_world(correction, self._transport.place, "the correction")
        if self._correction is not None:
            self._correction.require(correction)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores means and correction, but no correction of another rank."""
        correction, named = state.get("correction", {}), self._residuals.named()
        if is_exact(correction) and not is_own(correction, self._transport.place, "the correction"):
            correction = {}
        self._pending = {}
        for name, mean in state.get("means", {}).items():
            parameter = named[name]
            flat = torch.empty(mean.numel(), dtype=mean.dtype, device=parameter.device)
            in_shape_of(parameter, flat).copy_(mean.view(parameter.shape))
            if flat.is_complex():  # as in a bucket
                flat = torch.view_as_real(flat).view(-1)
            self._pending[id(parameter)] = _PendingMean(flat, None, state["loss_scale"])
        self._stores = {}
        if self._correction is not None:
            self._correction.restore(correction)


# ---- from the setting ----


def pace_of(
    setting: object, transport: Transport, account: Account, residuals: NamedFeedback
) -> Pace:
    """Returns the pace of a setting, "every" or a Stale1. Raises ConfigError for anything else."""
    if setting == "every":
        return Pace(transport)
    if isinstance(setting, Stale1):
        return OneStepStale(setting, transport, account, residuals)
    near = did_you_mean(str(setting), ["every", "stale1"])
    raise ConfigError(f"pace={setting!r}: give 'every', 'stale1' or ringcomm.torch.Stale1(){near}")


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    for start in range(0, one.numel(), _TILE):
        a, b = one[start : start + _TILE], other[start : start + _TILE]
        tile = a.clone()
        a.copy_(b)
        b.copy_(tile)
