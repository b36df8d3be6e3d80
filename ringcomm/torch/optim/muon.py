"""Muon by owner-compute: one rank for each matrix keeps its momentum and orthogonalizes it.

    gradients | a .......|b ..|   |  c .........|d ..|  | e ......|f ...|  |   a row for each rank
    |         reduce-scatter of the mean, at int8, or at int4 with feedback
    owner     m = momentum m + (1 - momentum) g
    |         u = NS(m), or with nesterov NS(momentum m + (1 - momentum) g)
    |         all-gather of u, at int4
    all       p = (1 - lr weight_decay) p - lr' u

NS is Newton-Schulz's iteration in bfloat16, lr' = lr sqrt(max(1, rows / columns)), both as in
torch.optim.Muon (Jordan et al., 2024); or lr' = .2 lr sqrt(max(rows, columns)), which
adjust_lr_fn="match_rms_adamw" takes (Liu et al., 2025). Rows are as long as the longest. A step
sends a byte of each gradient, and half a byte of each update, whose rounding error is not kept.

Invariants: all ranks apply the same decoded update by operations that round once: equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from ...codecs import Compression, parse
from ...communicator import Communicator
from ...core.work import Work
from ...exact import place_of
from ...feedback import FeedbackStore
from ..argument_checks import require, takes
from ..sync.bucket import all_finite
from . import saved
from .arithmetic import orthogonalized
from .checks import require_max_norm, require_muon
from .exchanging import ExchangingOptimizer
from .owned import Owned
from .span import IndexedParameter, filled


class Muon(ExchangingOptimizer[Owned, Any]):
    """torch.optim.Muon, of which each rank computes the updates of its own matrices.

    Args:
        params: matrices, 16-bit ones without a master copy; all else is for another optimizer.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            torch.optim.Muon.
        gradients: codec of the gradients, with error feedback if it needs that.
        updates: codec of the updates; bf16 rounds nothing.
        max_norm, comm: as in WireOptimizer.

    In a state of another rank this rank's momentum is lacking.

    Raises ConfigError for a parameter that is no matrix, and what ExchangingOptimizer raises.
    """

    @takes()
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        gradients: Compression | None = "int8",
        updates: Compression | None = "int4",
        max_norm: float | None = None,
        comm: Communicator | None = None,
    ) -> None:
        require_max_norm(max_norm)
        self._max_norm, self.feedback = max_norm, FeedbackStore()
        self._codec = parse(gradients, "gradients=")
        self._updates: Any = parse(updates, "updates=").name
        fixed = {"gradients": self._codec.name, "updates": self._updates, "max_norm": max_norm}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "eps": eps,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "nesterov": nesterov,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults, comm, None, fixed, "Muon")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        require_muon({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _refuse(self, parameter: torch.Tensor) -> None:
        super()._refuse(parameter)
        require("shape, Muon takes matrices", list(parameter.shape), parameter.dim() == 2)

    # ---- a step ----

    def _step(self) -> None:
        places = [place for owned in self._spans for place in owned.slices]
        for place in places:
            place.mark()  # which refuses a parameter that has changed its dtype or device
        verdict = self._agree(self._max_norm)
        if not verdict.finite:
            return
        self.steps += 1
        present = {place.index for place, here in zip(places, verdict.present, strict=True) if here}
        for owned in self._spans:
            if present.isdisjoint(owned.indices):
                continue
            updates, codec = self._updates_of(owned, verdict.factor, present), self._updates
            work = self._comm.allgather(updates, compression=codec, feedback=False, async_op=True)
            flat = self._wait(work, updates.nbytes).view(-1)
            group = self.param_groups[owned.group_index]
            for place in owned.slices:
                if place.index in present:
                    _move(place.tensor.detach(), place.of(flat), group)
        self._require_active(verdict.has_any)

    def _updates_of(self, owned: Owned, factor: float, present: Collection[int]) -> torch.Tensor:
        """Returns this rank's row of the updates, after advancing its momentum."""
        flat, group = owned.zeros(), self.param_groups[owned.group_index]
        owned.gather_gradients(flat)
        owned.fill_padding(flat.mul_(factor))
        settings: Any = {"compression": self._codec.name, "feedback": owned.feedback or False}
        work = self._comm.reduce_scatter(flat, "avg", async_op=True, **settings)
        mean = self._wait(work, flat.nbytes)
        updates = owned.own.zeros()
        if not all_finite(mean):  # a 16-bit sum has overflowed
            self._skip("the update of this rank's matrices is zero")
            return updates
        for place in owned.own.slices:
            gradient, moment = place.of(mean), place.of(owned.momentum)
            if place.index not in present:  # what residuals bring, and nothing else
                moment.add_(gradient, alpha=1 - group["momentum"])
            else:
                moment.lerp_(gradient, 1 - group["momentum"])
                step = gradient.lerp(moment, group["momentum"]) if group["nesterov"] else moment
                place.of(updates).copy_(
                    orthogonalized(step, group["ns_coefficients"], group["ns_steps"], group["eps"])
                )
        owned.own.fill_padding(updates)
        return updates

    def _wait(self, work: Work, size: int) -> torch.Tensor:
        with self.account.stall():
            result: torch.Tensor = work.wait()
        self.account.note(size, [work.stats()])
        return result

    # ---- states ----

    def _add(self, new: Sequence[IndexedParameter]) -> None:
        made = [Owned(one, self._comm, self._codec, self.feedback) for one in filled(new, math.inf)]
        self._use([*self._spans, *made])

    def _use(self, every: list[Owned]) -> None:
        self._spans = every
        for owned in every:
            for place in owned.own.slices:
                self.state[place.tensor] = {"momentum_buffer": place.of(owned.momentum)}

    def saved(self, *, own: bool) -> dict[str, Any]:
        """Returns this rank's residuals, and momentum of its matrices; or those of all, which
        torch.optim.Muon can load, too."""
        residuals = self.feedback.saved(self._comm, own=own)
        kept = {"feedback": residuals} if own else {}
        state = self._state_with(layout=[owned.indices for owned in self._spans], **kept)
        for owned in self._spans if not own else ():
            state["state"].update(owned.gathered(residuals["tensors"]))
        return state

    def _read(self, tensors: Mapping[int, Any], own: Mapping[str, Any]) -> Callable[[], None]:
        residuals = own.get("feedback")  # None in a gathered state, which has them by matrix
        feedback = (
            FeedbackStore() if residuals is None else saved.read_feedback(residuals, self._comm)
        )
        found = [
            Owned(saved.held_by(one, self._indexed()), self._comm, self._codec, feedback)
            for one in own["layout"]
        ]
        if residuals is None or dict(residuals["exact"]) == dict(place_of(self._comm)):
            for owned in found:
                owned.load(tensors)

        def take() -> None:
            self.feedback = feedback
            self._use(found)

        return take


def _move(parameter: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
    lr, (rows, columns) = float(group["lr"]), parameter.shape
    factor = (
        0.2 * math.sqrt(max(rows, columns))
        if group["adjust_lr_fn"] == "match_rms_adamw"
        else math.sqrt(max(1, rows / columns))
    )
    parameter.mul_(1 - lr * group["weight_decay"]).sub_(update.mul_(lr * factor))
