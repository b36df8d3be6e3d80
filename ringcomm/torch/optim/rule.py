"""Rule: the seam between one optimizer and the mechanism that carries its state over the wire.

    class Plain(Rule):                                       # gradient descent, as an example
        method = "Plain"
        def exchanges(self, step):          return (Exchange("gradient", "int4"),)
        def outgoing(self, what, span, out): out.copy_(span.gradient)
        def update(self, span, means):
            steps = span.views(means["gradient"].mul_(span.group["lr"]))
            torch._foreach_sub_(span.parameters, steps)

Invariants that a rule keeps: ``exchanges`` and ``finish`` depend only on what is alike on all
ranks. ``outgoing`` writes nothing but ``out``, and is linear in the gradient where there is
feedback; so a step can be dropped until ``update`` is called. ``update`` changes the parameters and
all states but those in ``local`` by nothing but the means, the hyperparameters and what is alike on
all ranks already; that keeps the ranks' parameters equal to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from .span import Place, Span


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One average over all ranks that a step makes, of each span.

    Attributes:
        what: what is averaged: "gradient", "momentum". Residuals are kept by this name, as they
            are in its units.
        compression: the codec of large parameters, with error feedback where it needs that. From
            int8 on, small ones travel at bf16.
    """

    what: str
    compression: str = "none"


class Rule:
    """What one optimizer sends, and what it does with the means.

    Attributes:
        method: its name, which is in saved states.
        states: names of the flat tensors that it keeps for each span (``span.state``), zero at
            first.
        local: those of them that differ from rank to rank.
    """

    method: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()
    local: ClassVar[frozenset[str]] = frozenset()

    def exchanges(self, step: int) -> Sequence[Exchange]:
        """What travels in this step, counted from 1; empty: nothing does. Asked any number of times
        for a step."""
        raise NotImplementedError

    def usual(self, step: int) -> Sequence[Exchange]:
        """What travels in most steps from that one on, where a beginning is different."""
        return self.exchanges(step)

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        """Writes this rank's contribution to the exchange of that name into ``out``, flat."""
        raise NotImplementedError

    def update(
        self, span: Span, means: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | None:
        """Steps ``span.parameters``, given the means by the exchanges' names. The means are the
        rule's to keep or to overwrite.

        Returns, for an exchange that is going to have other units from now on, by its name the
        factor of each element, by which its residuals are multiplied."""
        raise NotImplementedError

    def follow(self, span: Span, written: Sequence[Place]) -> None:
        """Where somebody else has written to parameters of the span behind an update, before their
        gradient is taken."""

    def alike(self) -> Mapping[str, object]:
        """What must be the same on all ranks in this step, by name; the ranks compare it before
        they update anything."""
        return {}

    def finish(self, spans: Sequence[Span]) -> Collection[str]:
        """Once behind all updates of a step, which was not dropped. Returns names of exchanges
        whose residuals are of no use any more."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What the rule keeps besides ``states``: numbers and strings, alike on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what ``state_dict`` returned."""
