"""WireOptimizer: an optimizer whose step averages its own state over all ranks.

In a step the ranks first agree, by a message of a few bytes, on whether to make it, on the factor
that clips the gradients, and on which parameters have a gradient on any rank. Then the spans travel
one after the other, and each is updated when its means have come:

    agree | encode 1 | encode 2 | ...                                     this rank
                     | 1 travels ------- | 2 travels ------- | ...
                                         | update 1          | update 2

With overlap the spans begin in backward, and the ranks agree when all have begun.

Invariants: a parameter's update is the same on all ranks, to the bit, by operations that round
alike on all CPUs. A step that one rank cannot make, as its gradients are not finite, is skipped on
all, and changes nothing. Exchanges are submitted in one order on all ranks. Ranks compare
hyperparameters by a digest, and none takes another rank's.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch

from ...codecs import CODECS
from ...communicator import Communicator
from ...errors import ConfigError, RingcommError, warn_caller
from ...feedback import FeedbackStore
from ..argument_checks import require_whole
from ..sync.account import Account
from ..sync.pending import Pending, Wire
from . import saved
from .checks import require_max_norm
from .exchanging import ExchangingOptimizer
from .rule import Rule
from .span import SPAN_BYTES, IndexedParameter, Span, lay_out

_IN_FLIGHT = 4  # most spans in flight


class WireSettings(TypedDict, total=False):
    """Arguments of WireOptimizer that its subclasses pass on unchanged."""

    max_norm: float | None
    threshold: int
    span_bytes: int
    overlap: bool


class SpanExchanges:
    """Exchanges of a span in one step, from the rule's contribution to the rule's update.

    If they are dropped, or their means are not finite, residuals, states and parameters stay as
    they were; on all ranks alike, as they have the same bits.

    Attributes:
        span: the span.
    """

    def __init__(self, comm: Communicator, rule: Rule, span: Span, store: FeedbackStore) -> None:
        self.span, self._rule, self._store = span, rule, store
        self._pending: dict[str, Pending] = {}
        for exchange in rule.exchanges(span.step):
            out = torch.empty_like(span.gradient)
            rule.outgoing(exchange.what, span, out)
            span.fill_padding(out)
            codec = exchange.codec
            if span.is_small and codec.quantises:
                codec = CODECS["bf16"]
            name = self._residuals_name(exchange.what)
            keeps = name in store or codec.needs_feedback  # gentle codecs deliver what is there
            wire = Wire(codec, store[name] if keeps else None)
            self._pending[exchange.what] = wire.submit(comm, out)

    def wait(self, account: Account) -> None:
        """Waits for the means, which the account then counts."""
        pending = self._pending.values()
        with account.stall():
            for one in pending:
                one.wait()
            if pending:
                size = sum(one.tensor.nbytes for one in pending)
                account.note(size, [one.work.stats() for one in pending])

    def apply(self) -> bool:
        """Runs the rule's update with the means, which must have come. Returns False, and changes
        nothing, if they are not finite."""
        if not all(one.is_finite for one in self._pending.values()):
            self.drop()
            return False
        means = {what: one.tensor for what, one in self._pending.items()}
        factors = self._rule.update(self.span, means)
        for what, factor in (factors or {}).items():
            self._rescale(self._residuals_name(what), factor)
        self.span.write_parameters()
        self._end()
        return True

    def drop(self) -> None:
        """Restores the residuals of before; the means must have come."""
        for one in self._pending.values():
            one.undo()
        self._end()

    def cancel(self) -> None:
        """Waits for the means, and drops them. Raises the first error, after that."""
        failed: RingcommError | None = None
        for one in self._pending.values():
            try:
                one.wait()
                one.undo()
            except RingcommError as error:  # its residuals have not changed
                failed = failed or error
        self._end()
        if failed is not None:
            raise failed

    def _end(self) -> None:
        self._pending.clear()
        self.span.release_gradient()

    def _residuals_name(self, what: str) -> str:
        """Returns the name of an exchange's residuals in the store."""
        return f"{what}/{self.span.name}"

    def _rescale(self, name: str, factor: torch.Tensor) -> None:
        """Multiplies residuals, if there are any, element by element."""
        if name not in self._store or self._store[name].count is None:
            return
        kept, factors = self._store[name], factor.to("cpu", torch.float32).numpy()
        start, owner = kept.owner_part()
        kept.load(kept.worker * factors, owner * factors[start : start + len(owner)], start)


class WireOptimizer(ExchangingOptimizer[Span, SpanExchanges]):
    """Base of the optimizers of this package.

    Args:
        params, defaults, comm, fixed: as in ExchangingOptimizer.
        rule: defines the exchanges and the update.
        max_norm: clips the gradients, before anything is sent, by one factor on all ranks: max_norm
            over the root of the mean over the ranks of the squared norms of their gradients. That
            is never less than the norm of the mean gradient, not known by then. (The norm of noise
            falls by the root of the number of ranks in the mean: where noise prevails, a max_norm
            larger by that factor clips as seldom as after DDP.) ``clip_grad_norm_`` between
            backward and step works as well; it clips each rank's gradient by its own norm.
        threshold: bytes of a parameter below which it is small. Small ones, and those of one
            dimension, travel together, at bf16 where others do at int8 or less.
        span_bytes: large parameters are joined until they have so many bytes, and travel together;
            with ``overlap`` they begin when backward has computed their last gradient.
        overlap: begin in backward. Gradients must not change between backward and step then.

    16-bit parameters have a float32 master copy, which the update changes. Change their weights by
    ``copy_`` and other operations under ``torch.no_grad()``, which the master copy follows, as it
    follows an assignment to ``parameter.data``. The next step undoes ``parameter.data.clamp_()``
    and other writes into ``.data``, which cannot be detected.

    Parameters stay the same on all ranks to the bit, even if the CPUs have different instructions.

    A parameter that has a gradient on some ranks has a zero one on the others. One that has none
    on any rank does not change; its momentum decays as with a gradient of zero.

    A step for which a rank's gradient is not finite is skipped on all ranks. A GradScaler's scale
    may differ between ranks, as gradients are unscaled before they are sent.

    Attributes:
        steps: number of steps made; one in which no rank has a gradient is not.
        skipped: number of steps, and of spans of a step, that were left out, as a gradient or a
            mean was not finite.
        feedback: the residuals, by exchange and span.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        comm: Communicator | None = None,
        *,
        max_norm: float | None = None,
        threshold: int = 32 << 10,
        span_bytes: int = SPAN_BYTES,
        overlap: bool = False,
        fixed: Mapping[str, object] | None = None,
    ) -> None:
        require_max_norm(max_norm)
        rule.exchanges(1)  # raises for an unknown codec
        if overlap and max_norm is not None:
            raise ConfigError(
                "max_norm= needs all gradients before the first of them is sent, and overlap=True "
                "does not wait for them; give one of the two"
            )
        self._rule = rule
        self._max_norm = max_norm
        self._threshold = require_whole("threshold", threshold, 0)
        self._span_bytes = require_whole("span_bytes", span_bytes, 1)
        self.feedback = FeedbackStore()
        common = {"max_norm": max_norm, "threshold": threshold, "span_bytes": span_bytes}
        launch = self._launch_in_backward if overlap else None
        super().__init__(params, defaults, comm, launch, {**common, **(fixed or {})}, rule.method)
        if overlap:
            self._extend()

    @property
    def spans(self) -> Sequence[Span]:
        """Spans in the order of their exchange; none before the first step without ``overlap``."""
        return tuple(self._spans)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients as torch.optim does. With ``overlap`` it drops exchanges that a
        backward has begun, and must then be called on all ranks."""
        if self._overlap is not None:
            self._overlap.cancel()
        super().zero_grad(set_to_none)

    # ---- a step ----

    def _step(self) -> None:
        if getattr(self, "found_inf", None) is not None and self._overlap is not None:
            self._overlap.cancel()
            raise ConfigError(
                "overlap=True begins to send gradients before a GradScaler unscales them; make the "
                "optimizer with overlap=False"
            )
        begun = None
        if self._overlap is not None:
            self._overlap.require_unchanged()
            begun = self._overlap.take()
        try:
            for span in self._spans:
                self._follow(span)
            verdict = self._agree(self._max_norm)
            present = iter(verdict.present)
            for span in self._spans:
                span.present = [next(present) for _ in span.slices]
            changing = [one for one in self._spans if self._takes_part(one, self.steps + 1)]
            self._rule.check(changing)
        except RingcommError:  # the step is made on no rank
            for exchanges in begun or ():
                with contextlib.suppress(RingcommError):
                    exchanges.cancel()
            raise
        if verdict.finite and changing:
            self.steps += 1
            self._finish(self._launched(verdict.factor) if begun is None else begun)
            ended = self._rule.finish(self._spans)
            for name in self.feedback:
                if name.partition("/")[0] in ended:
                    self.feedback[name].rescale(0.0)
        else:
            for exchanges in begun or ():
                exchanges.wait(self.account)
                exchanges.drop()
        if verdict.finite:
            self._require_active(verdict.has_any)

    def _launched(self, factor: float) -> Iterator[SpanExchanges]:
        """Launches the exchanges of all spans, and yields them in order; a few are in flight."""
        in_flight: collections.deque[SpanExchanges] = collections.deque()
        for span in self._spans:
            if self._takes_part(span, self.steps):
                if len(in_flight) == _IN_FLIGHT:
                    yield in_flight.popleft()
                in_flight.append(self._launch(span, factor, self.steps))
        yield from in_flight

    def _takes_part(self, span: Span, step: int) -> bool:
        """Returns whether a span is exchanged and updated in a step."""
        return any(span.present) or self._rule.is_apart(span, step)

    def _launch_in_backward(self, span: Span) -> SpanExchanges:
        self._follow(span)
        return self._launch(span, 1.0, self.steps + 1)

    def _launch(self, span: Span, factor: float, step: int) -> SpanExchanges:
        span.group, span.step = self.param_groups[span.group_index], step
        span.take_gradient(factor)
        return SpanExchanges(self._comm, self._rule, span, self.feedback)

    def _follow(self, span: Span) -> None:
        written = span.follow()
        if written:
            self._rule.follow(span, written)

    def _alike(self) -> dict[str, object]:
        return {**super()._alike(), **self._rule.alike()}

    def _finish(self, begun: Iterable[SpanExchanges]) -> None:
        for exchanges in begun:
            exchanges.wait(self.account)
            if not self._takes_part(exchanges.span, exchanges.span.step):  # begun before agreeing
                exchanges.drop()
            elif not exchanges.apply():
                self._skip("its span is left out of the step")

    # ---- layout and checks ----

    def _add(self, new: Sequence[IndexedParameter]) -> None:
        states = self._rule.states
        self._use([*self._spans, *lay_out(new, self._threshold, states, self._span_bytes)])
        quantises = any(one.codec.quantises for one in self._rule.usual(self.steps + 1))
        if quantises and all(one.is_small for one in self._spans):
            warn_caller(
                f"all parameters of this {type(self).__name__} are vectors, or below threshold="
                f"{self._threshold} bytes: they travel at bf16. Give a lower threshold=, or "
                "compression='bf16'"
            )

    def _use(self, spans: list[Span]) -> None:
        self._spans = spans
        for span in spans:
            span.world_size = self._comm.world_size
            span.group = self.param_groups[span.group_index]
            for place in span.slices:
                self.state[place.tensor] = {
                    name: place.of(flat) for name, flat in span.kept().items()
                }
        if self._overlap is not None:
            self._overlap.watch(spans)

    # ---- states ----

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns a state in torch.optim's form, with the residuals of this rank or of all."""
        state = self._state_with(
            spans=saved.saved_layout(self._spans),
            rule=self._rule.saved(),
            feedback=self.feedback.saved(self._comm, own=own),
        )
        for span in self._spans if not own else ():
            for name in sorted(self._rule.local):
                mean = self._comm.allreduce(span.state[name].clone(), "avg")
                for place in span.slices:
                    state["state"][place.index][name] = place.of(mean)
        return state

    def _read(self, tensors: Mapping[int, Any], own: Mapping[str, Any]) -> Callable[[], None]:
        self._rule.check_state(own["rule"])
        feedback = saved.read_feedback(own["feedback"], self._comm)
        spans = saved.read_spans(own["spans"], self._indexed(), self._rule.states, tensors)
        if self._overlap is not None:
            self._overlap.cancel()

        def take() -> None:
            self._use(spans)
            self._rule.restore(own["rule"])
            self.feedback = feedback

        return take
