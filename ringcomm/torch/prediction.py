"""What makes up for gradients that come a step late: they are taken where the weights will be.

A mean that is handed out one step late is applied to weights that have made one more step since.
Weights move on much as they did in the step before, the more so the more momentum the optimizer
has. So backward takes place at the weights that are expected when its gradient is applied:

    at = w + (w - w of the step before)                    XPipe's and SpecTrain's prediction

which needs nothing of the optimizer, and is the same on all ranks, as the weights are.

Invariants: the model holds the predicted weights from a forward that trains to the end of the
backward that is exchanged, and at no other time: an evaluation, a ``state_dict`` of the model and
the optimizer see its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..errors import ConfigError


class Correction(Protocol):
    """What makes up for staleness."""

    def attach(self, model: torch.nn.Module) -> None:
        """The model that is trained, not in DDP."""

    def arm(self, on: bool) -> None:
        """Whether what the coming backward makes is going to be handed out late."""

    def end_backward(self) -> None:
        """Backward is over."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What a checkpoint must keep of it, by parameter."""

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from what ``state_dict`` returned; before, the model has got its weights."""


class WeightPrediction:
    """See Correction. Takes the memory of the weights once more."""

    def __init__(self) -> None:
        self._armed = False
        self._ahead = False
        self._weights: dict[str, torch.nn.Parameter] = {}
        # Of the step before; while the model is ahead, what it holds again afterwards.
        self._kept: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def attach(self, model: torch.nn.Module) -> None:
        """See Correction."""
        for handle in self._handles:
            handle.remove()
        self._weights = {
            name: weight for name, weight in model.named_parameters() if weight.is_floating_point()
        }
        self._kept = {}
        hooks: Any = model  # two of these are without types in torch
        self._handles = [
            hooks.register_forward_pre_hook(_Call(self, "before_forward"), prepend=True),
            hooks.register_state_dict_pre_hook(_Call(self, "end_backward")),
            hooks.register_load_state_dict_post_hook(_Call(self, "forget")),
        ]

    def arm(self, on: bool) -> None:
        """See Correction."""
        self._armed = on

    def before_forward(self, model: torch.nn.Module, *_: Any) -> None:
        """The model is about to be used, for training or not."""
        if not (model.training and torch.is_grad_enabled()):
            self.end_backward()
        elif self._armed and not self._ahead:
            self._go_ahead()

    @torch.no_grad()
    def _go_ahead(self) -> None:
        """The model's weights become those predicted; the first time those of now are kept."""
        if not self._kept:
            self._kept = {name: weight.clone() for name, weight in self._weights.items()}
            return
        for name, weight in self._weights.items():
            if weight.requires_grad:
                kept = self._kept[name]
                ahead = torch.lerp(kept, weight, 2.0)
                kept.copy_(weight)
                weight.copy_(ahead)
        self._ahead = True

    @torch.no_grad()
    def end_backward(self, *_: Any) -> None:
        """See Correction."""
        if self._ahead:
            for name, weight in self._weights.items():
                if weight.requires_grad:
                    weight.copy_(self._kept[name])
        self._ahead = False

    def forget(self, *_: Any) -> None:
        """The model has been given other weights: how far they moved says nothing."""
        self._kept, self._ahead = {}, False

    def state_dict(self) -> dict[str, torch.Tensor]:
        """See Correction."""
        self.end_backward()
        return {name: kept.clone() for name, kept in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """See Correction. Raises ConfigError for those of another model."""
        if state and set(state) != set(self._weights):
            raise ConfigError("the state's weights are of another model than this hook's")
        self._kept = {name: kept.to(self._weights[name]).clone() for name, kept in state.items()}
        self._ahead = False


class _Call:
    """A hook of a module that calls a method, as long as there is its owner. A copy of the module,
    as in a checkpoint, gets one that does nothing."""

    def __init__(self, owner: WeightPrediction | None = None, method: str = "") -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return (_Call, ())
