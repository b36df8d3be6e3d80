"""SparseOptimizer: sends the largest blocks of gradients, and applies their sums on the CPU.

A bucket's exchange begins in backward as soon as all its gradients are computed (optim's Overlap),
and another thread does the rest (pipeline.py), except that ``step`` copies new weights to the
model.

    staleness 0   step waits until all sums of this backward are applied
    staleness 1   step shows the weights that result from the backward before this one; the sums of
                  this one have until the next step: a whole forward and backward

Invariants: updates are the same on all ranks, to the bit. The master copy is ahead of the model by
the updates that are not shown yet; ``flush`` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import torch

from ...communicator import Communicator
from ...core.chunks import take
from ...errors import ConfigError
from ...exact import is_exact, is_own, place_of
from ...sparse import SparseExchange
from ..argument_checks import require
from ..optim import saved
from ..optim.exchanging import ExchangingOptimizer
from ..optim.span import IndexedParameter, Place, filled, places_of
from .host_bucket import BLOCK, BUCKET_BYTES, HostBucket, States
from .pipeline import BucketRound, Pipeline


class SparseOptimizer(ExchangingOptimizer[HostBucket, BucketRound]):
    """Base of SGD and Adam of this package.

    Making one opens connections of its own between the ranks, for the exchanges in backward.
    ``close`` is a collective, too.

    Args:
        params, defaults, comm: as in ExchangingOptimizer.
        density: the share of the blocks of 16 elements that each rank sends. At 1/20 a ResNet
            ends with 13 % of its images wrong, under DDP with 9; a GPT ends far above at any
            (docs/decisions/75-outer-steps.md).
        staleness: 0, or 1: the next forward uses the weights of the step before.
        decay: factor for the residual of unsent blocks in each step.
        values, aggregate, exchange, chunk: as in ``ringcomm.sparse.SparseExchange``.
        overlap: begin in backward. Gradients must not change between backward and step then: the
            step applies those that were sent, and raises ConfigError.

    A bucket with a gradient that is not finite is skipped, on all ranks. A parameter without a
    gradient counts as having a zero one: momentum, weight decay and its residual still move it. One
    that was trained and is frozen makes the next step raise ConfigError.

    Change weights by ``copy_`` and other operations under ``torch.no_grad()``, which the next step
    follows, as it follows an assignment to ``parameter.data``; memory formats such as channels_last
    are not kept. It undoes ``parameter.data.clamp_()`` and other writes into ``.data``, which
    cannot be detected.

    Memory, beside parameter and gradient: 20 bytes for each element (gradient and weights, float32;
    the weights that the model sees; the residual, twice), and the optimizer's 4.25 or 8.

    A load gives the model the weights in the state; parameters that are not in it keep theirs.

    Attributes:
        skipped: number of skipped buckets.
    """

    method: ClassVar[str] = ""

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        comm: Communicator | None = None,
        density: float = 1 / 20,
        staleness: int = 0,
        decay: float = 1.0,
        values: str = "bf16",
        aggregate: str = "mean",
        exchange: str = "auto",
        chunk: int = 4096,
        overlap: bool = True,
    ) -> None:
        require("staleness", staleness, staleness in (0, 1))
        self._settings = {
            "density": density,
            "decay": decay,
            "values": values,
            "chunk": chunk,
            "aggregate": aggregate,
            "exchange": exchange,
        }
        self.staleness = staleness
        self._unseen: tuple[Sequence[BucketRound], Future[None]] | None = None
        self._had_gradient = False
        fixed = {"staleness": staleness, **self._settings}
        launch = self._launch if overlap else None
        super().__init__(params, defaults, comm, launch, fixed, f"sparse.{self.method}")
        self._exchange(self._comm, 0)  # settings that cannot work raise before ranks connect
        own = self._comm.split(0)
        assert own is not None
        self._own_comm = own
        self._pipeline = Pipeline(self._apply)
        self._extend()

    @property
    def comm(self) -> Communicator:
        """Communicator of its own connections."""
        return self._own_comm

    def states(self, count: int, blocks: int) -> States:
        """Makes the optimizer's states of a bucket, by name."""
        raise NotImplementedError

    def apply(self, one: BucketRound, kernel_set: str) -> None:
        """Updates the bucket's master copy by the round's entries."""
        raise NotImplementedError

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients as torch.optim does; not allowed between backward and step."""
        self._require_none_begun()
        super().zero_grad(set_to_none)

    # ---- a step ----

    def _step(self) -> None:
        if getattr(self, "grad_scale", None) is not None:
            raise ConfigError(
                f"{self.method} of ringcomm.torch.sparse sends gradients before a GradScaler has "
                "unscaled them: use autocast to bfloat16, which needs none"
            )
        try:
            if self._overlap is not None:
                self._overlap.require_unchanged()
        finally:  # what was sent is applied on all ranks, also if it has changed since
            self._update()

    def _update(self) -> None:
        if self._overlap is None:
            begun = [self._launch(bucket) for bucket in self._spans]
        else:
            begun = self._overlap.take()
        self.steps += 1
        over = self._pipeline.finish()
        if self.staleness == 0:
            self._unseen = (begun, over)
            self.flush()
        else:
            try:
                self.flush()
            finally:  # also after an error of the step before
                self._unseen = (begun, over)
        had_gradient, self._had_gradient = self._had_gradient, False
        self._require_active(had_gradient)

    def flush(self) -> None:
        """Waits for updates in flight, and shows their weights to the model: with staleness, call
        it on all ranks before an evaluation or a checkpoint."""
        if self._unseen is None:
            return
        rounds, over = self._unseen
        self._unseen = None
        with self.account.stall():
            over.result()
        for one in rounds:
            self.account.note(one.bucket.gradient.nbytes, one.sent.stats)
            if one.entries.poisoned:
                self._skip("its bucket is left out of the step")
            else:
                one.bucket.show(one.entries, self.comm.kernel_set)
        self.account.end_step()

    def _launch(self, bucket: HostBucket) -> BucketRound:
        if bucket.taken is not None:
            bucket.taken.result()
        if bucket is self._spans[0]:  # no round is in flight now: none is waited for out of turn
            places = (place for each in self._spans for place in each.slices)
            frozen = next((one.index for one in places if not one.tensor.requires_grad), None)
            if frozen is not None:
                if self._overlap is not None:
                    self._overlap.reset()  # nothing was sent, on any rank
                raise ConfigError(
                    f"parameter {frozen} is frozen, and would still be moved by its momentum and "
                    "residual: close this optimizer, and make a new one of what is trained"
                )
            for each in self._spans:
                if written := each.written():
                    self._follow(each, written)
        self._had_gradient |= bucket.gather_gradients(bucket.gradient)
        alike = self._alike() if bucket is self._spans[0] else None
        group = dict(self.param_groups[bucket.group_index])
        one = BucketRound(bucket, group, self.steps + 1, alike)
        bucket.taken = self._pipeline.add(one)
        return one

    def _follow(self, bucket: HostBucket, written: Sequence[Place]) -> None:
        """Takes parameters that other code has written to."""
        self._pipeline.finish().result()
        bucket.follow(written)
        for one in self._unseen[0] if self._unseen is not None else ():
            if one.bucket is bucket:
                take(one.entries, bucket.master)

    def _apply(self, one: BucketRound) -> None:
        self.apply(one, self.comm.kernel_set)
        take(one.entries, one.bucket.master)

    # ---- layout ----

    def _add(self, new: Sequence[IndexedParameter]) -> None:
        added = [HostBucket(held, self.states) for held in filled(new, BUCKET_BYTES, 4)]
        for bucket in added:
            bucket.exchange = self._exchange(self.comm, bucket.count)
        self._spans += added
        if self._overlap is not None:
            self._overlap.extend(added)  # rounds that have begun cannot be dropped

    def _exchange(self, comm: Communicator, count: int) -> SparseExchange:
        return SparseExchange(comm, count, block=BLOCK, **self._settings)  # type: ignore[arg-type]

    # ---- the end, and states ----

    def close(self) -> None:
        """Ends its thread and closes its connections; backwards send nothing any more. A
        collective."""
        if self._overlap is not None:
            self._overlap.stop()
        self._pipeline.close()
        self.comm.close()

    def __enter__(self) -> SparseOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns a state with param_groups, and under "ringcomm" the buckets: their weights and
        the optimizer's states, the same on all ranks, and residuals of this rank or of all. (With
        staleness it first shows updates in flight, as ``flush`` does.)"""
        self._finish_updates()
        return self._state_with(
            buckets=[
                {
                    "indices": list(bucket.indices),
                    "master": torch.from_numpy(bucket.master.copy()),
                    "states": {  # unsigned integers as signed ones, which every torch can save
                        name: torch.from_numpy(
                            one.view("i4" if one.dtype == "u4" else one.dtype).copy()
                        )
                        for name, one in bucket.states.items()
                    },
                    "exchange": bucket.exchange.saved(own=own),
                }
                for bucket in self._spans
            ]
        )

    def _read(self, tensors: Mapping[int, Any], own: Mapping[str, Any]) -> Callable[[], None]:
        self._finish_updates()
        layout = own["buckets"]
        exact = next((one["exchange"] for one in layout if is_exact(one["exchange"])), None)
        is_others = exact is not None and not is_own(exact, place_of(self._comm), self._method)
        held = self._held_as(layout)
        exchanges = [self._exchange(self.comm, len(one["master"])) for one in layout]
        for one, exchange in zip(layout, exchanges, strict=True):
            is_whole = is_exact(one["exchange"]) or one["exchange"]["count"] == exchange.count
            if is_whole and not is_others:
                exchange.load_state_dict(one["exchange"])

        def take() -> None:
            buckets = self._spans
            if [one["indices"] for one in layout] != [bucket.indices for bucket in buckets]:
                buckets = [HostBucket(parameters, self.states) for parameters in held]
            for bucket, exchange in zip(buckets, exchanges, strict=True):
                bucket.exchange = exchange
            if buckets is not self._spans:
                self._spans = buckets
                if self._overlap is not None:
                    self._overlap.watch(buckets)
            for one, bucket in zip(layout, buckets, strict=True):
                bucket.load(one["master"])
                for name, array in bucket.states.items():
                    array[:] = one["states"][name].numpy().view(array.dtype)

        return take

    def _held_as(self, layout: Sequence[Mapping[str, Any]]) -> list[list[IndexedParameter]]:
        """Returns the parameters of each bucket of a saved state. Raises ConfigError if it does not
        fit them."""
        every = self._indexed()
        held = [saved.held_by(one["indices"], every, lambda dtype: dtype) for one in layout]
        for one, parameters in zip(layout, held, strict=True):
            if len(one["master"]) != places_of(parameters, BLOCK)[-1].stop:
                raise ConfigError("the state is of another model, or of other parameter groups")
        return held

    def _finish_updates(self) -> None:
        """Waits for updates in flight, and shows them. Raises ConfigError between backward and
        step."""
        self._require_none_begun()
        self.flush()

    def _require_none_begun(self) -> None:
        if self._overlap is not None and self._overlap.is_in_step:
            raise ConfigError(
                "gradients are on their way since backward, and are applied as they arrive: call "
                "step() first; backwards that only accumulate are made under optimizer.no_sync()"
            )
