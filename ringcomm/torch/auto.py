"""compression="auto": the codec policy that decides by the measured times of steps.

Each rank measures; rank 0 decides for all, three steps ahead (ringcomm.adaptive). The inputs of the
decision, and where they come from:

    buckets' sizes, and when each was ready    look(), before each is sent
    exposed and in-flight times                note(), from the hook's account
    the optimizer                              torch's hook of all optimizers' steps

Invariants: the codec of a step is the same on all ranks, whatever they measure. Only the rank that
decides logs, one line for a change. A copy, as torch.save makes it, has the original's state and no
connections.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ..adaptive.codec_agreement import Agreement
from ..adaptive.law import FIRST_STEPS, BucketSize, Law, Rung, StepTimes, ladder
from ..codecs import Codec, parse
from ..errors import ConfigError
from .argument_checks import require_able, require_truth, require_whole
from .buckets import GradientBucket
from .exchange import CommExchange
from .named_feedback import COMPRESSIBLE
from .steps import before_steps, has_any
from .sync.exchange_report import StepReport

_log = logging.getLogger("ringcomm")

_ADAPTERS = 0.05  # a smaller trained share of the parameters counts as adapters
_ReadyBuckets = list[tuple[float, BucketSize]]
"""When each bucket of a step was ready, a time of time.perf_counter(), and its size."""


class Auto:
    """A CodecPolicy that takes the gentlest codec whose transfer hides behind backward, else the
    codec with the shortest steps.

        HookState("auto", model=model)                                    none, bf16 or int8
        HookState(Auto(model, allow=["int4"]), model=model)               int4, too

    Args:
        model: the model that is trained. If less than 5 % of its parameters train (adapters), no
            codec of few bits is chosen; without ``model`` this is not checked.
        allow: codecs beyond int8, which change training: "int4", and "onebit", which is taken only
            where the optimizer is linear.
        linear: whether the optimizer's update is linear in the gradients; None: it is torch's SGD.
        max_accumulate: most micro-batches to accumulate gradients over. The training loop has to
            follow ``accumulate``, the number found best.
        warmup_steps: number of first steps without int8 and harsher codecs.

    Attributes:
        accumulate: number of micro-batches to accumulate, 1 without max_accumulate. It changes
            with the codec, on all ranks before the same step.

    Raises ConfigError for a codec or value that cannot be allowed.
    """

    name = "auto"

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        allow: Collection[str] = (),
        linear: bool | None = None,
        max_accumulate: int = 1,
        warmup_steps: int = 0,
    ) -> None:
        if isinstance(allow, str):
            raise ConfigError(f"allow={allow!r}: give a list of codecs, as [{allow!r}]")
        require_able("model", model)
        self._settings: dict[str, Any] = {
            "allow": tuple(allow),
            "linear": linear if linear is None else require_truth("linear", linear),
            "max_accumulate": require_whole("max_accumulate", max_accumulate, 1),
            "warmup_steps": require_whole("warmup_steps", warmup_steps, 0),
        }
        self._set_up(1.0 if model is None else _trained_share(model))

    def _set_up(self, share: float) -> None:
        linear, warmup_steps = self._settings["linear"], self._settings["warmup_steps"]
        self._share = share
        self.codecs = tuple(dict.fromkeys(rung.codec for rung in self._rungs(True)))
        self._law = Law(self._rungs(bool(linear)), first_steps=max(warmup_steps, FIRST_STEPS))
        self._agreement: Agreement | None = None
        self._latency_s = self._cpu_s = 0.0
        self._ids: set[int] = set()  # id() of each parameter that has been seen
        self._optimizer: weakref.ref[Any] | None = None  # which has stepped last
        self._steps: deque[_ReadyBuckets] = deque()  # sent, not noted yet
        self._current: _ReadyBuckets = []
        self._load: tuple[BucketSize, ...] = ()

    def _rungs(self, linear: bool) -> tuple[Rung, ...]:
        return ladder(
            self._settings["allow"],
            linear=linear,
            adapters=self._share < _ADAPTERS,
            max_accumulate=self._settings["max_accumulate"],
        )

    @property
    def _rung(self) -> Rung:
        return self._law.rung if self._agreement is None else self._agreement.rung

    @property
    def accumulate(self) -> int:
        """Number of micro-batches to accumulate gradients over."""
        return self._rung.accumulate

    def codec(self, step: int) -> Codec:
        return self._rung.codec

    # ---- a step ----

    def begin(self, step: int, exchange: CommExchange) -> None:
        """Sends this rank's measurements, and takes the decision that is due in this step."""
        self._current = []
        if exchange.is_alone:
            return
        if self._agreement is None:
            self._connect(exchange)
        assert self._agreement is not None
        window = self._agreement.window
        cpu_s, self._cpu_s = self._cpu_s, exchange.cpu_s()
        window.cpu_s += self._cpu_s - cpu_s
        change = self._agreement.begin(
            step, exchange, self._load, window.ready_s(), self._latency_s
        )
        if change is not None and exchange.decides:
            _log.info("auto: %s from step %d: %s", change.rung, step, change.reason)

    def _connect(self, exchange: CommExchange) -> None:
        self._agreement = Agreement(self._law, exchange.decides)
        self._latency_s, self._cpu_s = exchange.latency_s(), exchange.cpu_s()
        if self._share < _ADAPTERS and exchange.decides:
            _log.info(
                "auto: %.2g %% of the parameters are trained, so bf16 is the harshest codec; give "
                "DistributedDataParallel a bucket_cap_mb that holds all their gradients, to have "
                "them in one bucket",
                100 * self._share,
            )

    def look(self, bucket: GradientBucket, loss_scale: float) -> None:
        """Notes the bucket's size and the time when it was ready."""
        if self._agreement is None:
            return
        if bucket.slices and not self._ids:
            before_steps.add(self._see)
        self._ids.update(id(one.tensor) for one in bucket.slices)
        self._current.append((time.perf_counter(), _bucket_size(bucket)))
        if bucket.last:
            self._steps.append(self._current)
            self._current = []

    def note(self, report: StepReport, finite: bool) -> None:
        """Adds the finished step to the window of measurements."""
        if self._agreement is None or not self._steps:
            return
        buckets, window = self._steps.popleft(), self._agreement.window
        self._load = tuple(size for _, size in buckets)
        window.steps.append(
            StepTimes(
                report["compute_s"],
                report["backward_s"],
                report["deferred"],
                report["in_flight_s"],
                report["wire_bytes"],
                tuple(at - buckets[0][0] for at, _ in buckets),
            )
        )

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        """Meets an optimizer of the parameters that steps, unless it was the last one to."""
        is_known = self._optimizer is not None and self._optimizer() is optimizer
        if has_any(optimizer, self._ids) and not is_known:
            self._optimizer = weakref.ref(optimizer)
            self.meet(optimizer)

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets the codecs to choose from, now that the optimizer is known."""
        linear = self._settings["linear"]
        known = isinstance(optimizer, torch.optim.SGD) if linear is None else linear
        rungs = self._rungs(known)
        left_out = {rung.codec.name for rung in self._rungs(True)} - {r.codec.name for r in rungs}
        if left_out and self._agreement is not None and self._agreement.decides:
            _log.warning(
                "auto: %s is left out, as %s is not known to be linear in the gradients; "
                "Auto(linear=True) declares that it is",
                " and ".join(sorted(left_out)),
                type(optimizer).__name__,
            )
        self._law.rungs = rungs

    # ---- copies and checkpoints ----

    def state_dict(self) -> dict[str, Any]:
        """Returns the codec in force, and the measurements. Only those of the deciding rank matter:
        a state of another rank can be loaded, too, and then measuring begins anew."""
        rung = self._rung
        return {
            "codec": rung.codec.name,
            "accumulate": rung.accumulate,
            "law": self._law.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"codec", "accumulate", "law"}:
            raise ConfigError(
                "this is no state of compression='auto': it has other keys than "
                "'codec', 'accumulate' and 'law'"
            )
        rung = Rung(parse(state["codec"]), int(state["accumulate"]))
        self._law.load_state_dict(state["law"], rung)
        self._agreement, self._current = None, []
        self._steps.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {"settings": self._settings, "share": self._share, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._settings = state["settings"]
        self._set_up(state["share"])
        self.load_state_dict(state["state"])


def _bucket_size(bucket: GradientBucket) -> BucketSize:
    buffer = bucket.buffer
    if buffer.dtype not in COMPRESSIBLE:
        return BucketSize(0, plain=buffer.nbytes)
    large = sum(one.end - one.start for one in bucket.slices if one.tensor.dim() > 1)
    return BucketSize(large, buffer.numel() - large, width=buffer.element_size())


def _trained_share(model: nn.Module) -> float:
    counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
    total = sum(count for count, _ in counts)
    return sum(count for count, trained in counts if trained) / total if total else 1.0
