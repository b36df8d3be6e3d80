"""What makes up for gradients that come a step late: they are taken where the weights will be.

A mean that is handed out one step late is applied to weights that have made one more step since.
Of that step a rank lacks nothing but the mean that is in flight, and of this it knows its own part.
So after each step the optimizer makes one more on trial, with this rank's gradient g in its place:

    own      w           all steps whose means have come; the same on all ranks
    ahead    w + u(g)    where this rank does its next backward

u is the optimizer's own step from its own state, so a gradient answers to the step before it, as in
synchronous training. Only the noise of one rank's gradient is added, in one step's weight.

Invariants: the model holds the weights ahead from a forward that trains to the end of the backward
that is exchanged, and at no other time: an evaluation, a ``state_dict`` of the model and the
optimizer see its own. A trial leaves no trace in the optimizer or the model. A gradient that is not
finite is tried as zeros: its step is going to be dropped.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError
from .steps import after_steps

_DECAY = 0.99  # per step, of lengths of late
_CHUNK = 1 << 24  # elements that are tried at once: as many of the optimizer's state are copied


class TrialStep:
    """The correction of one step of staleness: see above.

    It takes the memory of the weights and of the gradients once more, and the time of one more
    step of the optimizer. One whose ``step`` needs a closure cannot be tried and is let be.
    """

    def __init__(self) -> None:
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        # By id() of the parameter:
        self._others: dict[int, torch.Tensor] = {}  # the weights ahead; own while the model is
        self._ready: set[int] = set()  # whose weights ahead are those of the coming backward
        self._sent: dict[int, torch.Tensor] = {}  # this rank's gradients in flight
        self._handed: dict[int, torch.Tensor] = {}  # norms of the means that were handed out
        # Of an optimizer, by its first parameter: how long its means were of late when they were
        # applied, beside when they were handed out, and in all.
        self._lately: dict[int, torch.Tensor] = {}
        self._is_ahead = False
        self._handles: list[Any] = []
        after_steps.add(self.after_step)

    def attach(self, model: torch.nn.Module) -> None:
        """The model that is trained, not in DDP."""
        for handle in self._handles:
            handle.remove()
        self._weights = {
            name: weight for name, weight in model.named_parameters() if weight.is_floating_point()
        }
        self._names = {id(weight): name for name, weight in self._weights.items()}
        self._others, self._sent, self._handed, self._lately = {}, {}, {}, {}
        self._ready, self._is_ahead = set(), False
        hooks: Any = model  # two of these are without types in torch
        self._handles = [
            hooks.register_forward_pre_hook(_Call(self, "before_forward"), prepend=True),
            hooks.register_state_dict_pre_hook(_Call(self, "end_backward")),
            hooks.register_load_state_dict_post_hook(_Call(self, "forget")),
        ]

    # ---- a step ----

    def note(
        self, spans: Sequence[tuple[torch.Tensor, int, int]], sent: torch.Tensor,
        handed: torch.Tensor,
    ) -> None:  # fmt: skip
        """A bucket in backward: what this rank sends of it, before it travels, and the mean of the
        step before that is handed out. The spans are of both."""
        mine = [span for span in spans if id(span[0]) in self._names]
        norms = _norms([handed[start:stop] for _, start, stop in mine])
        for (parameter, start, stop), norm in zip(mine, norms, strict=True):
            self._handed[id(parameter)] = norm
            self._sent[id(parameter)] = sent[start:stop].clone().view_as(parameter)

    def end_backward(self, *_: Any) -> None:
        """Backward is over: the model gets its own weights back."""
        if self._is_ahead:
            self._swap()
            self._is_ahead = False
            self._ready.clear()

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, of this model or another, has made its step."""
        mine = self._sent.keys()
        stepped = [
            weight for group in optimizer.param_groups for weight in group["params"]
            if id(weight) in mine and weight.grad is not None
        ]  # fmt: skip
        if not stepped or not _can_be_tried(optimizer):
            return
        for weight in stepped:
            if id(weight) not in self._others:
                self._others[id(weight)] = torch.empty_like(weight)
        twins = {weight: self._others[id(weight)] for weight in stepped}
        torch._foreach_copy_(list(twins.values()), stepped)
        for twin, gradient in zip(twins.values(), self._as_applied(stepped), strict=True):
            twin.grad = gradient.to(twin.dtype)
        try:
            _try_step(optimizer, twins)
        except Exception as error:
            name = type(optimizer).__name__
            raise ConfigError(
                f"pace='stale1': {name} has made its step, but could not make one on trial, for "
                f"the correction ({type(error).__name__}: {error}); give HookState(..., "
                "pace=Stale1(correction=False))"
            ) from error
        for twin in twins.values():
            twin.grad = None
        self._ready.update(map(id, stepped))

    def _as_applied(self, weights: Sequence[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
        """This rank's gradients in flight as they would be applied: in the unit in which means are,
        behind a GradScaler, and together no longer than any mean of late, as clipping has it."""
        device = weights[0].device
        applied = _length([weight.grad for weight in weights], device)
        handed = _length([self._handed[id(weight)] for weight in weights], device)
        tells = applied.isfinite() & handed.isfinite() & (handed > 0)
        now = torch.where(tells, torch.stack([applied / handed, applied]), 0.0)
        lately = self._lately.get(id(weights[0]), torch.zeros_like(now))
        lately = self._lately[id(weights[0])] = torch.maximum(now, _DECAY * lately)
        sent = [self._sent.pop(id(weight)) for weight in weights]
        factor = torch.minimum(lately[0], lately[1] / _length(sent, device))
        for gradient in sent:
            yield gradient.mul_(factor.to(gradient.device)).nan_to_num_(0.0, 0.0, 0.0)

    def before_forward(self, model: torch.nn.Module, *_: Any) -> None:
        """The model is about to be used, for training or not."""
        if not (model.training and torch.is_grad_enabled()):
            self.end_backward()
        elif self._ready and not self._is_ahead:
            self._swap()
            self._is_ahead = True

    @torch.no_grad()
    def _swap(self) -> None:
        for weight in self._weights.values():
            if id(weight) in self._ready:
                other = self._others[id(weight)]
                mine = weight.clone()
                weight.copy_(other)
                other.copy_(mine)

    # ---- between steps ----

    def forget(self, *_: Any) -> None:
        """The model has been given other weights, or nothing is in flight any more: there is
        nowhere to go ahead to. What it holds is its own."""
        self._sent, self._is_ahead = {}, False
        self._ready.clear()

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's weights ahead and what is known of lengths, by parameter."""
        self.end_backward()
        return {
            "ahead": {self._names[key]: self._others[key].clone() for key in self._ready},
            "lately": {self._names[key]: of for key, of in self._lately.items()},
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Goes on from what ``state_dict`` returned, or from nothing where that is empty; before,
        the model has got its weights. Raises ConfigError for those of another model."""
        ahead, lately = state.get("ahead", {}), state.get("lately", {})
        if not self._weights.keys() >= ahead.keys() | lately.keys():
            raise ConfigError("the state's weights are of another model than this hook's")
        self.end_backward()
        self.forget()
        weights = {name: self._weights[name] for name in ahead}
        self._others = {id(each): ahead[name].to(each).clone() for name, each in weights.items()}
        self._ready = set(self._others)
        self._lately = {
            id(self._weights[name]): of.to(self._weights[name].device)
            for name, of in lately.items()
        }  # fmt: skip


def _norms(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    there = [tensor for tensor in tensors if tensor is not None]
    dtypes = (tensor.dtype for tensor in there)
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return list(torch._foreach_norm(there, 2, dtype=widest)) if there else []


def _length(tensors: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor:
    """Of all of them together."""
    length: torch.Tensor = torch.stack([norm.to(device) for norm in _norms(tensors)]).norm()
    return length


# ---- an optimizer's step on trial ----


def _can_be_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step needs nothing, such as a closure."""
    needed = [
        parameter for parameter in inspect.signature(type(optimizer).step).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    return len(needed) == 1


def _try_step(
    optimizer: torch.optim.Optimizer, twins: Mapping[torch.Tensor, torch.Tensor]
) -> None:
    """Steps twins of some parameters by their gradients, as the optimizer would step these; it is
    left as it was. No hooks run."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", None) else step
    groups, state = optimizer.param_groups, optimizer.state
    # A fused optimizer finds a GradScaler's here: its scale is out of the gradients already.
    scaling: dict[str, Any] = {
        name: vars(optimizer).pop(name)
        for name in ("grad_scale", "found_inf") if name in vars(optimizer)
    }  # fmt: skip
    try:
        for group in groups:
            for chunk in _chunks([weight for weight in group["params"] if weight in twins]):
                optimizer.param_groups = [{**group, "params": [twins[each] for each in chunk]}]
                optimizer.state = defaultdict(dict, {
                    twins[each]: {key: _copy(value) for key, value in state[each].items()}
                    for each in chunk if each in state
                })  # fmt: skip
                step(optimizer)
    finally:
        optimizer.param_groups, optimizer.state = groups, state
        vars(optimizer).update(scaling)


def _copy(value: Any) -> Any:
    return value.clone() if torch.is_tensor(value) else copy.deepcopy(value)


def _chunks(weights: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    chunk: list[torch.Tensor] = []
    elements = 0
    for weight in weights:
        chunk.append(weight)
        elements += weight.numel()
        if elements >= _CHUNK:
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk


class _Call:
    """A hook of a module that calls a method, as long as there is its owner. A copy of the module,
    as in a checkpoint, gets one that does nothing."""

    def __init__(self, owner: TrialStep | None = None, method: str = "") -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self._method = method

    def __call__(self, *args: Any) -> None:
        owner = None if self._owner is None else self._owner()
        if owner is not None:
            getattr(owner, self._method)(*args)

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return (_Call, ())
