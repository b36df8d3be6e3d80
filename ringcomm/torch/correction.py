"""The correction of gradients that come a step late: they are taken where the weights will be.

A mean that comes one step late is applied to weights that have made one more step since. Of that
step a rank lacks nothing but the mean that is in flight, and of this it knows its own part. So
after each step the optimizer makes one more on trial, with this rank's gradient g in its place:

    own      w           all steps whose means have come; the same on all ranks
    ahead    w + u(g)    where this rank does its next backward

u is the optimizer's own step from its own state, so a gradient answers to the step before it, as in
synchronous training at a constant rate. Only the noise of one rank's gradient is added, in one
step's weight. What the mean before it went through between backward and step, as a scale or a
clipping, g goes through too: by the same factor. Losses were measured under AdamW and SGD. Under an
optimizer that goes by signs, as Lion, the noise makes the correction weaker: it turns more of them.

Invariants: the model holds the weights ahead from a forward that trains to the end of the backward
that is exchanged, and at no other time: an evaluation, a ``state_dict`` of the model and the
optimizer see its own. A trial leaves no trace in the optimizer, its hooks or the model. A gradient
that is not finite is tried as zeros: its step is going to be dropped.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import ConfigError, RingcommError
from .buckets import GradientSlice
from .steps import after_steps, before_steps, has_any, remove_all

# Elements that are tried at once, as so many of the optimizer's state are copied: for a cache.
_CHUNK = {"cpu": 1 << 19, "cuda": 1 << 26}

StandIns = Mapping[torch.nn.Parameter, torch.Tensor]
"""By parameter, a copy with a gradient to try."""


class Correction:
    """Makes backwards run at the weights ahead.

    It takes the memory of the weights and of the gradients once more, and the time of another step
    of the optimizer and of copies of its state: `pytest bench/ -k trial`. An optimizer whose
    ``step`` needs a closure is skipped. Of one that leads another, as ZeroRedundancyOptimizer does,
    the inner one is tried, with the parameters that it has.
    """

    def __init__(self) -> None:
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._names: dict[int, str] = {}
        # By id() of the parameter:
        self._elsewhere: dict[int, torch.Tensor] = {}  # weights ahead; own while the model is ahead
        self._ready: set[int] = set()  # whose weights ahead are those of the coming backward
        self._sent: dict[int, torch.Tensor] = {}  # this rank's gradients
        self._in_flight: set[int] = set()  # whose gradient is, and has not been tried
        # Lengths of this rank's gradient, of the late mean, and of what was applied.
        self._norms: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._applied: dict[int, torch.Tensor] = {}
        self._is_ahead = self._is_aside = False
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        before_steps.add(self.before_step)
        after_steps.add(self.after_step)

    def attach(self, model: torch.nn.Module) -> None:
        """Takes the model that is trained, not in DDP."""
        remove_all(self._handles)
        self._weights = {
            name: weight for name, weight in model.named_parameters() if weight.is_floating_point()
        }
        self._names = {id(weight): name for name, weight in self._weights.items()}
        self._elsewhere, self._sent, self._norms, self._applied = {}, {}, {}, {}
        self._in_flight, self._ready = set(), set()
        self._is_ahead = self._is_aside = False
        hooks: Any = model  # some of these are without types in torch, or of its later releases
        end = _Call(self.end_backward)
        self._handles += [
            hooks.register_forward_pre_hook(_Call(self.before_forward), prepend=True),
            hooks.register_forward_hook(_Call(self.after_forward), always_call=True),
            hooks.register_state_dict_pre_hook(end),
            hooks._register_load_state_dict_pre_hook(end),
            hooks.register_load_state_dict_post_hook(_Call(self.clear)),
        ]

    # ---- a step ----

    def note(
        self,
        slices: Sequence[GradientSlice],
        sent: torch.Tensor,
        late: torch.Tensor,
        scale: float = 1.0,
    ) -> None:
        """Takes a bucket's gradients, in backward.

        Args:
            slices: where each parameter's gradient is in both tensors.
            sent: this rank's gradients, before they travel.
            late: the means of the step before, which this step applies.
            scale: the loss scale that is in both.
        """
        mine = [one for one in slices if id(one.tensor) in self._names]
        own, means = (_norms([one.elements(flat) for one in mine], scale) for flat in (sent, late))
        for one, norm, mean in zip(mine, own, means, strict=True):
            key = id(one.tensor)
            if key not in self._sent:
                self._sent[key] = torch.empty_like(one.tensor, dtype=sent.dtype)
            torch.mul(one.of(sent), 1 / scale, out=self._sent[key])
            self._norms[key] = norm, mean
            self._in_flight.add(key)
            self._applied.pop(key, None)

    @torch.no_grad()
    def end_backward(self, *_: Any) -> None:
        """Gives the model its own weights back, at the end of a backward."""
        if self._is_ahead:
            for weight in self._weights.values():
                if id(weight) in self._ready:
                    weight.copy_(self._elsewhere[id(weight)])
            self._is_ahead = False
            self._ready.clear()

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Measures the gradients that an optimizer, of this model or another, is about to apply:
        some change them in their step. After a backward that the hook did not see, the model is
        still ahead, and gets its own weights back."""
        if self._is_ahead and has_any(optimizer, self._ready):
            self.end_backward()
        weights = [weight for _, weights in self._tried(optimizer) for weight in weights]
        self._measure(weights, getattr(optimizer, "grad_scale", None))

    def _measure(self, weights: Sequence[torch.nn.Parameter], scale: torch.Tensor | None) -> None:
        """Takes the lengths of gradients to be applied; scale: GradScaler's, where the step divides
        by it."""
        for weight, norm in zip(weights, _norms([each.grad for each in weights]), strict=True):
            self._applied[id(weight)] = norm if scale is None else norm / scale.to(norm.device)

    def _tried(
        self, optimizer: torch.optim.Optimizer
    ) -> list[tuple[dict[str, Any], list[torch.nn.Parameter]]]:
        """Returns the optimizer's groups, each with its parameters whose gradients are to be
        tried."""
        return [
            (
                group,
                [
                    each
                    for each in group["params"]
                    if id(each) in self._in_flight and each.grad is not None
                ],
            )
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes a step on trial, after an optimizer, of this model or another, has made its own.
        Raises ConfigError if that fails."""
        groups = self._tried(optimizer)
        stepped = [weight for _, weights in groups for weight in weights]
        if not stepped or not _can_be_tried(optimizer):
            return
        factor = self._factor(stepped)
        with _on_trial(optimizer) as step:
            for group, weights in groups:
                for chunk in _chunks(weights):
                    stand_ins = {weight: self._stand_in(weight, factor) for weight in chunk}
                    step(group, stand_ins)
                    for stand_in in stand_ins.values():
                        stand_in.grad = None
        keys = set(map(id, stepped))
        self._in_flight -= keys
        self._ready |= keys

    def _factor(self, weights: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        """Returns the factor of this rank's gradients in flight on trial: that of the mean between
        hook and step, and 0 where no mean tells."""
        device = weights[0].device
        norms = [self._norms[id(weight)] for weight in weights]
        sent, late = (_length([pair[which] for pair in norms], device) for which in (0, 1))
        # Gradients that a closure has made within the step:
        self._measure([weight for weight in weights if id(weight) not in self._applied], None)
        applied = _length([self._applied.pop(id(weight)) for weight in weights], device)
        factor = applied / late
        return torch.where(sent.isfinite() & factor.isfinite(), factor, 0.0)

    def _stand_in(self, weight: torch.nn.Parameter, factor: torch.Tensor) -> torch.Tensor:
        """Makes a copy of the weight with the gradient to try."""
        if id(weight) not in self._elsewhere:
            self._elsewhere[id(weight)] = torch.empty_like(weight)
        stand_in = self._elsewhere[id(weight)].copy_(weight)
        gradient = self._sent[id(weight)].mul_(factor.to(weight.device)).nan_to_num_(0.0, 0.0, 0.0)
        stand_in.grad = gradient.to(weight.dtype)
        return stand_in

    def before_forward(self, model: torch.nn.Module, *_: Any) -> None:
        """Puts the weights ahead into the model if a forward trains, and its own if it does not."""
        if not (model.training and torch.is_grad_enabled()):
            if self._is_ahead:  # a backward may be to come
                self._exchange()
                self._is_ahead, self._is_aside = False, True
        elif self._ready and not self._is_ahead:
            self._exchange()
            self._is_ahead = True

    def after_forward(self, *_: Any) -> None:
        """Puts the weights ahead back, after a forward that does not train."""
        if self._is_aside:
            self._exchange()
            self._is_ahead, self._is_aside = True, False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Swaps the model's weights and those kept elsewhere: as data, since autograd would take a
        forward between another one and its backward for a change of what that needs."""
        for weight in self._weights.values():
            if id(weight) in self._ready:
                here, other = weight.data, self._elsewhere[id(weight)]
                kept = here.clone()
                here.copy_(other)
                other.copy_(kept)

    # ---- between steps ----

    def clear(self, *_: Any) -> None:
        """Discards the weights ahead, as the model has been given other weights, or nothing is in
        flight any more: what it holds is its own."""
        self._is_ahead = False
        self._in_flight.clear()
        self._ready.clear()

    def saved(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns this rank's weights ahead, by parameter."""
        self.end_backward()
        return {"ahead": {self._names[key]: self._elsewhere[key].clone() for key in self._ready}}

    def require(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raises ConfigError for a state of another model."""
        ahead = state.get("ahead", {})
        known = self._weights.keys() >= ahead.keys()
        if not known or any(ahead[name].shape != self._weights[name].shape for name in ahead):
            raise ConfigError("the state's weights are of another model than this hook's")

    def restore(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Takes what ``saved`` returned, which must fit; an empty state clears. Load the model's
        weights first: loading them discards what is restored here."""
        ahead = state.get("ahead", {})
        self.end_backward()
        self.clear()
        weights = {name: self._weights[name] for name in ahead}
        self._elsewhere = {id(each): ahead[name].to(each).clone() for name, each in weights.items()}
        self._ready = set(self._elsewhere)


def _norms(tensors: Sequence[torch.Tensor | None], scale: float = 1.0) -> list[torch.Tensor]:
    """Returns the norms of the tensors, but for None, divided by the scale that is in them."""
    there = [tensor for tensor in tensors if tensor is not None]
    dtypes = (tensor.dtype for tensor in there)
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
    norms = list(torch._foreach_norm(there, 2, dtype=widest)) if there else []
    return list(torch._foreach_div(norms, scale)) if norms and scale != 1 else norms


def _length(norms: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Returns the norm of vectors together, from the norm of each."""
    length: torch.Tensor = torch.stack([norm.to(device) for norm in norms]).norm()
    return length


# ---- an optimizer's step on trial ----


def _can_be_tried(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether the optimizer's step needs no argument, such as a closure, and is its own:
    one that leads another, as ZeroRedundancyOptimizer does, would have that make a true step."""
    needed = [
        parameter
        for parameter in inspect.signature(type(optimizer).step).parameters.values()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    leads = any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values())
    return len(needed) == 1 and not leads


@contextlib.contextmanager
def _on_trial(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Any, StandIns], None]]:
    """Returns a function that has a copy of the optimizer step stand-ins of some of a group's
    parameters, by their gradients and without hooks. Raises ConfigError where that fails."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", None) else step
    trial, scratch = object.__new__(type(optimizer)), _Scratch()
    # A fused optimizer finds a GradScaler's in these: gradients on trial are without it.
    without = ("grad_scale", "found_inf")
    vars(trial).update(
        {key: value for key, value in vars(optimizer).items() if key not in without},
        _optimizer_step_pre_hooks={},
        _optimizer_step_post_hooks={},
    )

    def of_stand_ins(group: dict[str, Any], stand_ins: StandIns) -> None:
        settings = {key: scratch.copy(value) for key, value in group.items() if key != "params"}
        trial.param_groups = [{**settings, "params": list(stand_ins.values())}]
        trial.state = defaultdict(
            dict,
            {
                stand_in: {
                    key: scratch.copy(value) for key, value in optimizer.state[weight].items()
                }
                for weight, stand_in in stand_ins.items()
                if weight in optimizer.state
            },
        )
        step(trial)
        scratch.end()

    try:
        yield of_stand_ins
    except (RingcommError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        name = type(optimizer).__name__
        raise ConfigError(
            f"pace='stale1': {name} has made its step, but could not make one on trial, for the "
            f"correction ({type(error).__name__}: {error}); give HookState(..., "
            "pace=Stale1(correction=False))"
        ) from error


class _Scratch:
    """Makes copies of a state that are needed for a moment, in the memory of earlier ones: fresh
    memory has to be mapped by the kernel, page by page."""

    def __init__(self) -> None:
        self._used: list[torch.Tensor] = []
        self._free: defaultdict[Any, list[torch.Tensor]] = defaultdict(list)

    def copy(self, value: Any) -> Any:
        """Returns a copy, valid until ``end``."""
        if not torch.is_tensor(value):
            return copy.deepcopy(value)
        free = self._free[_kind(value)]
        self._used.append(free.pop() if free else torch.empty_like(value))
        return self._used[-1].copy_(value)

    def end(self) -> None:
        """Takes back the memory of the copies made so far."""
        for each in self._used:
            self._free[_kind(each)].append(each)
        self._used = []


def _kind(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _chunks(weights: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    chunk: list[torch.nn.Parameter] = []
    elements = 0
    for weight in weights:
        chunk.append(weight)
        elements += weight.numel()
        if elements >= _CHUNK.get(weight.device.type, 0):
            yield chunk
            chunk, elements = [], 0
    if chunk:
        yield chunk


class _Call:
    """Hook of a module that calls a method, as long as its owner lives. A copy of the module, as in
    a checkpoint, gets one that does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        method = None if self._method is None else self._method()
        if method is not None:
            method(*args)

    def __reduce__(self) -> tuple[type[_Call], tuple[()]]:
        return (_Call, ())
