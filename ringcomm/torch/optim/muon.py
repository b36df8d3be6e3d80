"""Muon by owner-compute: one rank for each matrix keeps its momentum and orthogonalizes it.

    gradients | a .......|b ..|   |  c .........|d ..|  | e ......|f ...|  |   a row for each rank
    |         reduce-scatter of the mean, at int8, or at int4 with feedback
    owner     m = momentum m + (1 - momentum) g
    |         u = NS(m), or with nesterov NS(momentum m + (1 - momentum) g)
    |         all-gather of u, at int4
    all       p = (1 - lr weight_decay) p - lr' u

NS is Newton-Schulz's iteration in bfloat16, lr' = lr sqrt(max(1, rows / columns)) unless
``adjust_lr_fn`` says otherwise; both as in torch.optim.Muon (Jordan et al., 2024). Each rank does
its share of NS. A step sends a byte of each gradient and half a byte of each update. Rounding
errors of updates are not kept: the next update is of another momentum.

Invariants: all ranks apply the same decoded update by operations of one rounding each, so their
parameters are equal to the bit. Who owns a matrix follows from the matrices' sizes alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from ...codecs import Compression, parse
from ...communicator import Communicator
from ...core.work import Work
from ...errors import naming
from ...exact import is_exact, is_own, place_of
from ..argument_checks import require, takes
from . import saved
from .arithmetic import orthogonalized
from .checks import at_least, codec_name
from .exchanging import ExchangingOptimizer
from .owned import Owned
from .span import IndexedParameter, filled


class Muon(ExchangingOptimizer[Owned, Any]):
    """torch.optim.Muon, of which each rank computes the updates of its own matrices.

    Args:
        params: matrices; vectors, embeddings and the last layer are for another optimizer.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in
            torch.optim.Muon.
        gradients: codec of the gradients, with error feedback if it needs that.
        updates: codec of the updates; bf16 rounds nothing.
        max_norm, comm: as in WireOptimizer.

    Attributes:
        carried: as in WireOptimizer.

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
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "eps": eps}
        for name, value in {**defaults, "max_norm": max_norm or 0.0}.items():
            require(f"{name} value", value, at_least(value, 0.0))
        adjusts = adjust_lr_fn in (None, "original", "match_rms_adamw")
        require("adjust_lr_fn", repr(adjust_lr_fn), adjusts)
        settings = {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "nesterov": nesterov}
        self._max_norm, self.carried = max_norm, 0
        self._codec = parse(codec_name(gradients, "gradients="))
        self._updates: Any = codec_name(updates, "updates=")
        fixed = {"gradients": self._codec.name, "updates": self._updates, "max_norm": max_norm}
        super().__init__(
            params, {**defaults, **settings, "adjust_lr_fn": adjust_lr_fn}, comm, False, fixed
        )

    def _refuse(self, parameter: torch.Tensor) -> None:
        super()._refuse(parameter)
        require("shape, Muon takes matrices", list(parameter.shape), parameter.dim() == 2)

    # ---- a step ----

    def _step(self) -> None:
        verdict = self._agree(self._max_norm)
        if not verdict.finite:
            self._skip("the step is left out")
            return
        self.steps += 1
        places = [place for owned in self._spans for place in owned.slices]
        present = {place.index for place, here in zip(places, verdict.present, strict=True) if here}
        for owned in self._spans:
            updates = self._updates_of(owned, self._mean(owned, verdict.factor), present)
            codec = self._updates
            work = self._comm.allgather(updates, compression=codec, feedback=False, async_op=True)
            flat = self._wait(work).view(-1)
            for place in owned.slices:
                if place.index in present:
                    _move(place.tensor.detach(), place.of(flat), self.param_groups[owned.group])
        self._require_active(verdict.has_any)

    def _mean(self, owned: Owned, factor: float) -> torch.Tensor:
        """Returns this rank's row of the mean gradients."""
        flat = owned.zeros()
        owned.gather((place.gradient() for place in owned.slices), flat)
        owned.fill_padding(flat.mul_(factor))
        settings: Any = {"compression": self._codec.name, "feedback": owned.feedback or False}
        return self._wait(self._comm.reduce_scatter(flat, "avg", async_op=True, **settings))

    def _updates_of(
        self, owned: Owned, mean: torch.Tensor, present: Collection[int]
    ) -> torch.Tensor:
        """Returns this rank's row of the updates, after advancing its momentum."""
        updates, group = torch.zeros_like(mean), self.param_groups[owned.group]
        for place in owned.own:
            if place.index in present:
                gradient = place.of(mean)
                moment = place.of(owned.momentum).lerp_(gradient, 1 - group["momentum"])
                step = gradient.lerp(moment, group["momentum"]) if group["nesterov"] else moment
                settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
                place.of(updates).copy_(orthogonalized(step, *settings))
        return updates

    def _wait(self, work: Work) -> torch.Tensor:
        with self._waiting():
            result: torch.Tensor = work.wait()
        self.carried += work.stats().sent_bytes + work.stats().shared_bytes
        return result

    # ---- layout and states ----

    def _method(self) -> str:
        return "Muon"

    def _add(self, new: Sequence[IndexedParameter]) -> None:
        self._lay_out(filled(new, math.inf))

    def _lay_out(self, shares: Sequence[Sequence[IndexedParameter]]) -> None:
        for held in shares:
            owned = Owned(held, self._comm, keeps=self._codec.needs_feedback)
            self._spans.append(owned)
            for place in owned.own:
                self.state[place.tensor] = {"momentum_buffer": place.of(owned.momentum)}

    def _state(self, **own: Any) -> dict[str, Any]:
        return self._saved(layout=[owned.indices for owned in self._spans], **own)

    def state_dict(self) -> dict[str, Any]:
        """State of this rank: its matrices' momentum, and its residuals. Nothing is sent. If each
        rank saves and loads its own, in a world of the same size, training continues to the bit."""
        kept = [owned.feedback for owned in self._spans]
        feedback = [one and one.state_dict(self._comm) for one in kept]
        return self._state(exact=dict(place_of(self._comm)), feedback=feedback)

    @naming("gather_state_dict() of Muon")
    def gather_state_dict(self) -> dict[str, Any]:
        """State for a world of any size, which torch.optim.Muon can load, too. A collective; all
        ranks get the same. Raises what ``allreduce`` raises."""
        state = self._state()
        for owned in self._spans:
            state["state"].update(owned.gathered())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what ``state_dict`` or ``gather_state_dict`` returned. Nothing is sent; each
        rank loads its own, or all load the same.

        Raises ConfigError as WireOptimizer's does. (Of another rank's ``state_dict`` it takes the
        hyperparameters and counts.)
        """
        own, every = saved.require_method(state_dict, "Muon"), self._indexed()
        shares = [saved.held_by(indices, every) for indices in own["layout"]]
        feedback = own.get("feedback", [None] * len(shares))
        is_others = is_exact(own) and not is_own(own, place_of(self._comm), "Muon")
        self._load_common(state_dict, own)
        self._spans = []
        self._lay_out(shares)
        if not is_others:
            for owned, residuals in zip(self._spans, feedback, strict=True):
                owned.load(state_dict["state"], residuals)


def _move(parameter: torch.Tensor, update: torch.Tensor, group: Mapping[str, Any]) -> None:
    lr, (rows, columns) = float(group["lr"]), parameter.shape
    factor = math.sqrt(max(1, rows / columns))
    if group["adjust_lr_fn"] == "match_rms_adamw":
        factor = 0.2 * math.sqrt(max(rows, columns))
    parameter.mul_(1 - lr * group["weight_decay"]).sub_(update.mul_(lr * factor))
