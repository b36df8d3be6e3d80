"""WireOptimizer: an optimizer whose step averages its own state over all ranks.

A step agrees first, by a message of a few bytes, on whether it is made, on the factor that clips
the gradients, and on which parameters have a gradient anywhere. Then the spans travel one behind
the other, and each is updated when its means are there:

    agree | encode 1 | encode 2 | ...                                     this rank
                     | 1 travels ------- | 2 travels ------- | ...
                                         | update 1          | update 2

Invariants: what is applied to a parameter is the same on all ranks, to the bit. A step that one
rank cannot make, as its gradients are not finite, is made by none: nothing is sent, and nothing is
changed. Exchanges are submitted in one order on all ranks. Hyperparameters never travel.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...codecs import parse, refuse_composed
from ...communicator import Communicator
from ...errors import RingcommError, TensorError
from ...feedback import FeedbackStore
from ..hooks import default_of
from .checks import require
from .flight import Flight
from .rule import Rule
from .span import Span, lay_out

_IN_FLIGHT = 4  # spans
_PATIENCE = 3  # steps without a gradient


class WireOptimizer(torch.optim.Optimizer):
    """What the optimizers of this package have in common.

    Making one is a collective: all ranks start from rank 0's parameters. So is ``step``.

    Args:
        params, defaults: as of torch.optim.Optimizer.
        rule: what travels, and what is done with it.
        comm: the communicator; None: that of the default process group if its backend is
            "ringcomm", else ringcomm's default one.
        max_norm: clips the gradients, before anything travels, by one factor on all ranks: max_norm
            over the root of the mean over the ranks of the squared norms of their gradients. That
            is never less than the norm of the mean gradient, which nobody knows by then.
        threshold: bytes of a parameter below which it is small, and travels at bf16 where others
            do at int8 or less.

    Attributes:
        steps: steps that were made.
        skipped: steps that were not, as a gradient was not finite.
        feedback: the residuals, by exchange and span.
    """

    _step_supports_amp_scaling = True  # a GradScaler must not decide on one rank alone

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        rule: Rule,
        comm: Communicator | None = None,
        *,
        max_norm: float | None = None,
        threshold: int = 32 << 10,
    ) -> None:
        require("max_norm", max_norm, max_norm is None or max_norm > 0)
        require("threshold", threshold, threshold >= 0)
        for exchange in rule.exchanges(1):
            refuse_composed(parse(exchange.compression), "an optimizer")
        self._comm = default_of(dist.group.WORLD) if comm is None else comm
        self._rule = rule
        self._max_norm = max_norm
        self._threshold = threshold
        self._spans: list[Span] = []
        self._laid_out: set[int] = set()
        self._without = 0
        self.steps = 0
        self.skipped = 0
        self.feedback = FeedbackStore()
        super().__init__(params, defaults)

    @property
    def comm(self) -> Communicator:
        """The communicator in use."""
        return self._comm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's; a collective, as it brings rank 0's parameters."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            _require_dense(parameter)
            self._comm.broadcast(parameter.detach())

    # ---- a step ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Averages over all ranks and steps. A collective.

        Returns what the closure did. Raises RingcommError where the parameters of this rank had no
        gradient in three steps.
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
        verdict = self._agree()
        if not verdict.finite:
            self._skip()
            return
        self.steps += 1
        exchanges = self._rule.exchanges(self.steps)
        flying: collections.deque[Flight] = collections.deque()
        finite = True
        for span in self._spans:
            if not any(span.used):
                continue
            if len(flying) == _IN_FLIGHT:
                finite &= flying.popleft().land()
            span.group, span.step = self.param_groups[span.group_index], self.steps
            span.gather(verdict.factor)
            flying.append(Flight(self._comm, self._rule, span, exchanges, self.feedback))
        while flying:
            finite &= flying.popleft().land()
        self._rule.finish(self._spans)

    def _extend(self) -> None:
        """Lays out parameters that are new, or newly trained."""
        new, index = [], 0
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in self._laid_out:
                    new.append((index, number, parameter))
                index += 1
        if not new:
            return
        taken = [span.name for span in self._spans]
        spans = lay_out(new, self._threshold, self._rule.states, taken, self._rule.layout)
        for span in spans:
            span.rank, span.world_size = self._comm.rank, self._comm.world_size
            for place in span.places:
                self._laid_out.add(id(place.parameter))
                state = self.state[place.parameter]
                for name, flat in span.state.items():
                    state[name] = span.view(flat, place)
        self._spans += spans

    def _agree(self) -> _Verdict:
        scale = getattr(self, "grad_scale", None)
        factor = 1.0 if scale is None else 1.0 / float(scale)
        squares, has_any = 0.0, False
        for span in self._spans:
            for place in span.places:
                gradient = place.parameter.grad
                if gradient is not None:
                    _require_dense(gradient)
                    norm = torch.linalg.vector_norm(gradient.detach(), dtype=span.dtype)
                    squares += (float(norm) * factor) ** 2
                    has_any = True
        bad = not math.isfinite(squares) or float(getattr(self, "found_inf", 0.0) or 0.0) > 0
        self._require_gradients(has_any)
        unused = [
            (span, number) for span in self._spans for number, used in enumerate(span.used)
            if not used
        ]  # fmt: skip
        here = [span.places[number].parameter.grad is not None for span, number in unused]
        told = np.array([bad, 0.0 if bad else squares, *here], np.float64)
        self._comm.allreduce(told, "sum")
        for (span, number), count in zip(unused, told[2:], strict=True):
            span.used[number] = bool(count)
        norm = math.sqrt(told[1] / self._comm.world_size)
        if self._max_norm is not None and norm > self._max_norm:
            factor *= self._max_norm / (norm + 1e-6)
        return _Verdict(finite=not told[0], factor=factor)

    def _require_gradients(self, has_any: bool) -> None:
        self._without = 0 if has_any else self._without + 1
        if self._without == _PATIENCE:
            raise RingcommError(
                f"{_PATIENCE} steps, and no parameter of this {type(self).__name__} has had a "
                f"gradient on rank {self._comm.rank}: are they those of the model that is trained? "
                "Make the optimizer when the model is on its device and has its final parameters"
            )

    def _skip(self) -> None:
        self.skipped += 1
        if self.skipped == 1 and not hasattr(self, "found_inf"):
            warnings.warn(
                "a gradient is not finite: the step is left out on all ranks (optimizer.skipped "
                "counts such steps)",
                stacklevel=4,
            )


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What all ranks have agreed on for a step."""

    finite: bool
    factor: float


def _require_dense(tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided:
        raise TensorError(
            f"gradients and parameters must be dense, and this is {tensor.layout}: make the layer "
            "with sparse=False"
        )
    if not tensor.is_floating_point():
        raise TensorError(f"a parameter of dtype {tensor.dtype} is not supported; train real ones")
