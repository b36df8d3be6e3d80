"""Rule: the interface between one optimizer and the mechanism that sends its state.

    class Plain(Rule):                                       # gradient descent, as an example
        method = "Plain"
        def exchanges(self, step):          return (Exchange("gradient", "int4"),)
        def outgoing(self, what, span, out): out.copy_(span.gradient)
        def update(self, span, means):
            steps = span.views(means["gradient"].mul_(span.group["lr"]))
            torch._foreach_sub_(span.parameters, steps)

Invariants that a rule keeps: ``exchanges`` and ``finish`` depend only on values that are alike on
all ranks. ``outgoing`` writes only to ``out``, and is linear in the gradient if there is feedback;
so a step can be dropped until ``update`` is called. ``update`` computes the parameters, and all
states but those in ``local``, only from the means, the hyperparameters and values that are alike on
all ranks; that keeps the ranks' parameters equal to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...codecs import Codec, parse
from ..sync.kept import Kept
from .span import Place, Span


@dataclasses.dataclass(frozen=True)
class Exchange:
    """One average over all ranks in a step, made for each span.

    Attributes:
        what: name of the averaged tensor: "gradient", "momentum". Residuals are kept by this name,
            as they are in its units.
        compression: name of the codec of large parameters, which have error feedback if it needs
            that. From int8 on, small ones travel at bf16.
        codec: the codec of that name.

    Raises ConfigError for an unknown codec.
    """

    what: str
    compression: str = "none"
    codec: Codec = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", parse(self.compression))


class Rule(Kept):
    """Defines what an optimizer sends, and its update by the means.

    Attributes:
        method: its name in saved states.
        states: names of the flat tensors that it keeps for each span (``span.state``), zero at
            first.
        local: names of the states that differ from rank to rank.
        kept: what a checkpoint keeps besides ``states``, alike on all ranks (Kept).
    """

    method: ClassVar[str]
    states: ClassVar[tuple[str, ...]] = ()
    local: ClassVar[frozenset[str]] = frozenset()

    def exchanges(self, step: int) -> Sequence[Exchange]:
        """Returns the exchanges of this step, counted from 1; empty: none. May be called several
        times for a step."""
        raise NotImplementedError

    def usual(self, step: int) -> Sequence[Exchange]:
        """Returns the exchanges of most steps from this one on, if the first steps have others."""
        return self.exchanges(step)

    def check(self, spans: Sequence[Span]) -> None:
        """Raises ConfigError, on all ranks alike, if it cannot update spans that a step is going to
        change."""

    def outgoing(self, what: str, span: Span, out: torch.Tensor) -> None:
        """Writes this rank's contribution to the exchange of that name into ``out``, flat."""
        raise NotImplementedError

    def update(
        self, span: Span, means: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | None:
        """Updates ``span.parameters``, given the means by the exchanges' names. The rule may keep
        or overwrite the means.

        Returns, by the name of an exchange whose units change from now on, the factor for each
        element of its residuals."""
        raise NotImplementedError

    def is_apart(self, span: Span, step: int) -> bool:
        """Returns whether ranks have moved the span's parameters apart, and bring them together in
        this step: it is exchanged then, though no rank has a gradient. Alike on all ranks."""
        return False

    def follow(self, span: Span, written: Sequence[Place]) -> None:
        """Called when other code has written to parameters of the span since the last update; with
        ``overlap`` perhaps after their gradient was taken."""

    def alike(self) -> Mapping[str, object]:
        """Returns values, by name, that must be the same on all ranks in this step; the ranks
        compare them before they update anything."""
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for a state that ``restore`` cannot take, as its settings differ."""

    def finish(self, spans: Sequence[Span]) -> Collection[str]:
        """Called once after all updates of a step that was not dropped. Returns names of exchanges
        whose residuals are no longer needed."""
        return ()
