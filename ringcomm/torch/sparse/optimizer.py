"""SparseOptimizer: gradients that travel by their largest blocks, and are applied on the CPU.

A bucket begins in backward as soon as all its gradients are there (optim/overlap.py), and another
thread does the rest (pipeline.py) but for the last act: ``step`` lets the model see new weights.

    staleness 0   step waits until all sums of this backward are applied
    staleness 1   step shows what the backward before this one has brought; the sums of this one
                  have until the next step: a whole forward and backward

Invariants: what is applied is the same on all ranks, to the bit. The master copy is ahead of the
model by what has arrived and is not shown yet; ``flush`` shows it.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from ...chunks import take
from ...communicator import Communicator
from ...errors import ConfigError, RingcommError
from ...exact import is_exact
from ...sparse import SparseExchange
from ..optim.checks import refuse_others, require_dense
from ..optim.overlap import Overlap
from ..optim.span import Numbered
from ..settings import require
from ..transport import default_of
from .bucket import BLOCK, Bucket, lay_out
from .pipeline import Pipeline, Round

States = dict[str, np.ndarray[Any, Any]]

_PATIENCE = 3  # steps in which nothing happens
_FORMAT = 1
_KEY = "ringcomm"


class SparseOptimizer(torch.optim.Optimizer):
    """What SGD and Adam of this package have in common.

    Making one is a collective: all ranks start from rank 0's parameters, and join by connections of
    their own for what travels in backward. So are ``step`` and ``close``. Buffers, as those of
    BatchNorm, are left alone.

    Args:
        params, defaults: as of torch.optim.Optimizer.
        comm: the communicator; None: that of the default process group if its backend is
            "ringcomm", else ringcomm's default one.
        density: the share of the blocks of 16 elements that each rank sends.
        staleness: 0, or 1: the next forward goes on with the weights of the step before.
        decay: what remains in each step of what was not sent.
        values, aggregate, exchange, chunk: as of ``ringcomm.sparse.SparseExchange``.
        overlap: begin in backward; gradients must not change between backward and step then.

    A gradient that is not finite leaves out its bucket, on all ranks.

    Memory, beside parameter and gradient: 20 bytes for each element (gradient and weights, float32;
    the weights that the model sees; the residual, twice), and the optimizer's 4.25 or 8.

    Attributes:
        steps: steps that were made.
        skipped: buckets that were left out.
        sent_bytes: payload that this rank has sent.
        waited_s: seconds that steps have waited for exchanges and for the kernels behind them.
    """

    method: ClassVar[str] = ""
    _step_supports_amp_scaling = True  # a GradScaler must not decide on one rank alone

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        comm: Communicator | None = None,
        density: float = 1 / 64,
        staleness: int = 0,
        decay: float = 1.0,
        values: str = "bf16",
        aggregate: str = "mean",
        exchange: str = "auto",
        chunk: int = 4096,
        overlap: bool = True,
    ) -> None:
        require("staleness", staleness, staleness in (0, 1))
        self._settings = {"density": density, "decay": decay, "values": values, "chunk": chunk,
                          "aggregate": aggregate, "exchange": exchange}  # fmt: skip
        self._outer = default_of(dist.group.WORLD) if comm is None else comm
        SparseExchange(self._outer, 0, block=BLOCK, **self._settings)  # type: ignore[arg-type]
        self.staleness = staleness
        self.steps = 0
        self.skipped = 0
        self.sent_bytes = 0
        self.waited_s = 0.0
        self._overlap: Overlap[Bucket, Round] | None = Overlap(self._launch) if overlap else None
        self._buckets: list[Bucket] = []
        self._exchanges: list[SparseExchange] = []
        self._states: list[States] = []
        self._latest: dict[str, Round] = {}
        self._unseen: tuple[Sequence[Round], Future[None]] | None = None
        self._had_gradient = False
        self._silent = 0
        self._checked = False
        self._comm: Communicator | None = None
        super().__init__(params, defaults)
        split = self._outer.split(0)
        assert split is not None
        self._comm = split
        self._pipeline = Pipeline(self._apply)
        self._extend()

    @property
    def comm(self) -> Communicator:
        """The connections of its own."""
        assert self._comm is not None
        return self._comm

    def states(self, count: int, blocks: int) -> States:
        """What the optimizer keeps of a bucket."""
        raise NotImplementedError

    def apply(self, one: Round, states: States, kernel_set: str) -> None:
        """Steps the bucket's master copy by the round's entries."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; a collective, as it brings rank 0's parameters."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            require_dense(parameter, "a parameter")
            self._outer.broadcast(parameter.detach())
        self._checked = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch.optim's; not between backward and step."""
        self._require_none_begun()
        super().zero_grad(set_to_none)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """For backwards that only accumulate."""
        return contextlib.nullcontext() if self._overlap is None else self._overlap.paused()

    # ---- a step ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Brings the sums of this backward, or with staleness of the one before, into the model. A
        collective. Returns what the closure did.

        Raises:
            ConfigError: a DistributedDataParallel or a hook sends the same gradients; or they have
                changed since backward; or a GradScaler is in use.
            RingcommError: three steps without a gradient on this rank; or a collective failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self._extend()
        self._refuse_others()
        if getattr(self, "grad_scale", None) is not None:
            raise ConfigError(
                f"{self.method} of ringcomm.torch.sparse sends gradients before a GradScaler has "
                "unscaled them: use autocast to bfloat16, which needs none"
            )
        begun = self._launch_all() if self._overlap is None else self._overlap.take()
        self.steps += 1
        over = self._pipeline.finish()
        if self.staleness == 0:
            self._unseen = (begun, over)
            self.flush()
        else:
            self.flush()
            self._unseen = (begun, over)
        self._require_active()

    def flush(self) -> None:
        """Lets the model see all that is on its way: before an evaluation or a checkpoint, with
        staleness. All ranks do."""
        if self._unseen is None:
            return
        rounds, over = self._unseen
        self._unseen = None
        began = time.perf_counter()
        over.result()
        self.waited_s += time.perf_counter() - began
        for one in rounds:
            self._show(one)

    def _show(self, one: Round) -> None:
        assert one.entries is not None
        self.sent_bytes += one.exchange.sent_bytes
        if not one.entries.poisoned:
            one.bucket.show(one.entries, self.comm.kernel_set)
            return
        self.skipped += 1
        if self.skipped == 1:
            warnings.warn(
                "a gradient is not finite: its bucket is left out of the step on all ranks (the "
                "optimizer's attribute skipped counts them)",
                stacklevel=5,
            )

    def _launch_all(self) -> list[Round]:
        return [self._launch(bucket) for bucket in self._buckets]

    def _launch(self, bucket: Bucket) -> Round:
        before = self._latest.get(bucket.name)
        if before is not None:
            before.taken.wait()
        if not bucket.is_current():
            self._follow(bucket)
        self._had_gradient |= bucket.gather()
        number = self._buckets.index(bucket)
        one = Round(bucket, self._exchanges[number], dict(self.param_groups[bucket.group]),
                    self.steps + 1)  # fmt: skip
        self._latest[bucket.name] = one
        self._pipeline.add(one)
        return one

    def _follow(self, bucket: Bucket) -> None:
        """Goes on from parameters that somebody else has written to."""
        self._pipeline.finish().result()
        bucket.follow()
        for one in self._unseen[0] if self._unseen is not None else ():
            if one.bucket is bucket and one.entries is not None:
                take(one.entries, bucket.master)

    def _apply(self, one: Round) -> None:
        states = self._states[self._buckets.index(one.bucket)]
        self.apply(one, states, self.comm.kernel_set)
        assert one.entries is not None
        take(one.entries, one.bucket.master)

    # ---- layout and checks ----

    def _extend(self) -> None:
        """Lays out parameters that are new, or newly trained."""
        known = {place.index for bucket in self._buckets for place in bucket.places}
        new = [
            one for one in self._numbered()
            if one.index not in known and one.parameter.requires_grad and one.parameter.numel()
        ]  # fmt: skip
        if not new:
            return
        added = lay_out(new)
        for bucket in added:
            self._exchanges.append(
                SparseExchange(self.comm, bucket.count, block=BLOCK, **self._settings)  # type: ignore[arg-type]
            )
            self._states.append(self.states(bucket.count, -(-bucket.count // BLOCK)))
        self._buckets += added
        if self._overlap is not None:
            self._overlap.watch(self._buckets)

    def _numbered(self) -> list[Numbered]:
        every = [(n, p) for n, group in enumerate(self.param_groups) for p in group["params"]]
        return [Numbered(index, group, p) for index, (group, p) in enumerate(every)]

    def _refuse_others(self) -> None:
        if not self._checked and self._outer.world_size > 1:
            refuse_others({id(one.parameter) for one in self._numbered()}, type(self).__name__)
        self._checked = True

    def _require_active(self) -> None:
        self._silent = 0 if self._had_gradient else self._silent + 1
        self._had_gradient = False
        if self._silent >= _PATIENCE:
            raise RingcommError(
                f"in {_PATIENCE} steps this {type(self).__name__} has had no gradient of any of "
                f"its parameters on rank {self._outer.rank}: are they the parameters of the model "
                "that is trained? Make the optimizer when the model has its final parameters, on "
                "its device"
            )

    # ---- the end, and states ----

    def close(self) -> None:
        """Ends its thread and its connections. All ranks do."""
        self._pipeline.close()
        self.comm.close()

    def __enter__(self) -> SparseOptimizer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """param_groups, and under "ringcomm" what this rank has of each bucket. Nothing is sent,
        but with staleness all is shown first, so all ranks save after the same step. Each saves its
        own; in a world of the same size it goes on to the bit."""
        return self._saved(exact=True)

    def gather_state_dict(self) -> dict[str, Any]:
        """The same for a world of any size: what all ranks together have not applied yet. A
        collective; all ranks get the same."""
        return self._saved(exact=False)

    def _saved(self, *, exact: bool) -> dict[str, Any]:
        self._settle()
        told = super().state_dict()
        buckets = []
        for bucket, exchange, states in zip(
            self._buckets, self._exchanges, self._states, strict=True
        ):
            buckets.append({
                "indices": [place.index for place in bucket.places],
                "master": torch.from_numpy(bucket.master.copy()),
                "states": {name: _as_tensor(one) for name, one in states.items()},
                "exchange": exchange.state_dict(exact=exact),
            })  # fmt: skip
        told[_KEY] = {"format": _FORMAT, "method": f"sparse.{self.method}", "steps": self.steps,
                      "skipped": self.skipped, "buckets": buckets}  # fmt: skip
        return told

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` or ``gather_state_dict`` returned; the model gets the
        weights that are in it. Nothing is sent.

        Raises ConfigError for a state of another method, model, rank or world size.
        """
        own = state_dict.get(_KEY)
        method = f"sparse.{self.method}"
        if not isinstance(own, Mapping) or own.get("method") != method:
            there = own.get("method") if isinstance(own, Mapping) else "another optimizer"
            raise ConfigError(f"the state is of {there}, and this optimizer is {method}")
        if own.get("format") != _FORMAT:
            raise ConfigError(f"the state has format {own.get('format')!r}, not {_FORMAT}")
        self._settle()
        known = [[place.index for place in bucket.places] for bucket in self._buckets]
        if [one["indices"] for one in own["buckets"]] != known or any(
            len(one["master"]) != bucket.count
            for one, bucket in zip(own["buckets"], self._buckets, strict=True)
        ):
            raise ConfigError("the state is of another model, or of other parameter groups")
        for one, exchange in zip(own["buckets"], self._exchanges, strict=True):
            if is_exact(one["exchange"]) or one["exchange"]["count"] == exchange.count:
                exchange.load_state_dict(one["exchange"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for one, bucket, states in zip(own["buckets"], self._buckets, self._states, strict=True):
            bucket.load(one["master"])
            for name, array in states.items():
                array[:] = one["states"][name].numpy().view(array.dtype)
        self.steps, self.skipped = int(own["steps"]), int(own["skipped"])

    def _settle(self) -> None:
        """Nothing is on its way any more."""
        self._require_none_begun()
        self.flush()

    def _require_none_begun(self) -> None:
        if self._overlap is not None and self._overlap.has_begun:
            raise ConfigError(
                "gradients are on their way since backward, and are applied as they arrive: call "
                "step() first; backwards that only accumulate are made under optimizer.no_sync()"
            )


def _as_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A copy; of unsigned integers as signed ones, which every torch can save."""
    signed = array.view(np.int32) if array.dtype == np.uint32 else array
    return torch.from_numpy(signed.copy())
