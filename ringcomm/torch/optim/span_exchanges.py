"""Exchanges of a span in one step, from the rule's contribution to the rule's update.

Invariants: all ranks submit the same exchanges in the same order, which follows from the layout,
the rule and the number of the step. Exchanges that are cancelled, or whose means are not finite,
leave residuals, states and parameters as they were; on all ranks alike, as they have the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ... import codecs
from ...communicator import Communicator
from ...feedback import FeedbackStore
from ..sync.pending import Pending, carried_by
from .rule import Exchange, Rule
from .span import Span


class SpanExchanges:
    """Submits a span's exchanges.

    Attributes:
        span: the span.
        carried: bytes that this rank has sent for it, over links or through shared memory; set by
            ``finish`` and ``cancel``.
        waited_s: seconds that these have waited.
    """

    def __init__(
        self,
        comm: Communicator,
        rule: Rule,
        span: Span,
        exchanges: Sequence[Exchange],
        store: FeedbackStore,
    ) -> None:
        self.span = span
        self.carried = 0
        self.waited_s = 0.0
        self._rule = rule
        self._store = store
        self._pending: dict[str, Pending] = {}
        for exchange in exchanges:
            out = torch.empty_like(span.gradient)
            rule.outgoing(exchange.what, span, out)
            span.fill_padding(out)
            codec = codec_of(exchange, span)
            name = residuals_of(exchange.what, span)
            keeps = name in store or codec.needs_feedback  # other codecs deliver what is there
            self._pending[exchange.what] = Pending(comm, out, codec, store[name] if keeps else None)

    def finish(self) -> bool:
        """Waits for the means, and runs the rule's update. Returns False, and changes nothing, if
        they are not finite."""
        self._wait()
        finite = all(one.is_finite for one in self._pending.values())
        if finite:
            means = {what: one.tensor for what, one in self._pending.items()}
            factors = self._rule.update(self.span, means)
            for what, factor in (factors or {}).items():
                _rescale(self._store, residuals_of(what, self.span), factor)
            self.span.write_parameters()
        else:
            self._undo()
        self._end()
        return finite

    def cancel(self) -> None:
        """Waits for the means, and restores the residuals of before."""
        self._wait()
        self._undo()
        self._end()

    def _wait(self) -> None:
        began = time.perf_counter()
        for one in self._pending.values():
            one.wait()
        self.waited_s = time.perf_counter() - began
        for one in self._pending.values():
            self.carried += carried_by(one.work)

    def _undo(self) -> None:
        for one in self._pending.values():
            one.undo()

    def _end(self) -> None:
        self._pending = {}
        self.span.release_gradient()


def codec_of(exchange: Exchange, span: Span) -> codecs.Codec:
    """Returns the codec of a span's exchange: bf16 for small parameters instead of a quantising
    one."""
    codec = codecs.parse(exchange.compression)
    return codecs.CODECS["bf16"] if span.is_small and codec.quantises else codec


def residuals_of(what: str, span: Span) -> str:
    """Returns the name of an exchange's residuals in the store."""
    return f"{what}/{span.name}"


def _rescale(store: FeedbackStore, name: str, factor: torch.Tensor) -> None:
    """Multiplies residuals, if there are any, element by element."""
    if name not in store or store[name].count is None:
        return
    kept, factors = store[name], factor.to("cpu", torch.float32).numpy()
    start, owner = kept.owner_start, kept.owner
    kept.load(kept.worker * factors, owner * factors[start : start + len(owner)], start)
