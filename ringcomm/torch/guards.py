"""Guards against mistakes that training makes without any error: a warning, or a refusal.

    Silence     optimizers step, and nothing is exchanged              SilenceWarning
    Unsuited    few-bit or late gradients under such as Adam           ConfigError, or a warning
    Others      another exchange of the same; a model in shards        ConfigError
    Same data   two ranks train on the same first batch                IdenticalDataWarning

**Silence.** A hook that was never registered, or a framework that leaves DistributedDataParallel
out, trains as many models as there are ranks. So each object that is meant to carry gradients is
watched from its construction on. If it has carried nothing when optimizers have made SILENT_STEPS
steps, there is one warning:

    HookState with a model     steps of optimizers that have one of its parameters; its buckets
    HookState without one      steps of any; buckets of any hook of the process
    OuterStep                  steps of optimizers that have one of its parameters; its iterations
    default process group      steps of any; works of any communicator of the process, but for those
                               before the first step, which set training up. No warning if there is
                               a DDP or FSDP module, which may use another group; nor if one of the
                               above counts steps, and so warns by itself

Optimizer steps are counted as each follows communication, even where gradients are accumulated, and
a process that only infers steps no optimizer.

**Unsuited.** Adam divides each gradient by the root of its own mean square. From signs times a
scale it learns that all gradients of a block are equally large: it loses its advantage, and runs
diverge where the same bits under SGD with momentum do well. RMSprop, Adagrad and others divide
alike. 1-bit Adam avoids this by freezing the mean squares after a dense start; its classes are
recognised by their names and pass. The hook sees gradients, never the optimizer; so a watch
examines each optimizer with a parameter whose gradient the hook has seen, when it steps.

**Others.** A DDP over the ranks that an OuterStep or an optimizer of ours exchanges with would send
everything once more. A DDP over the ranks of a host, with OuterStep across hosts, is the intended
combination.

**Same data.** Local steps on the same data make the same weights: the exchange then averages equal
weights, and more ranks are of no use. Loaders without a sampler for each rank cause this. So each
rank's first header carries a digest of its first batch; nothing else of the batch leaves the rank.

Invariants: a watch keeps no object alive, and without a watch, steps are not followed. A refusal
comes before anything has been stepped or sent, on all ranks alike, as all see the same.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..communicator import Communicator, works_of_process
from ..errors import ConfigError, NotInitializedError
from .group import RingcommGroup
from .steps import after_steps, before_steps, has_any
from .sync.account import Account
from .wrapped import is_exchanged, is_sharded, wrappers_of

# ---- silence ----

SILENT_STEPS = 3


class SilenceWarning(UserWarning):
    """Warns that optimizers step while nothing has been exchanged between the ranks."""


class _Watch:
    """Counts optimizer steps for one owner, and warns if the owner carries nothing in the meantime.

    Args:
        owner: the object that ought to carry gradients.
        carried: returns how much it has carried so far.
        text: returns the warning; None: no warning after all.
        before: how much it had carried when training began; None: found out at the first step.
        ids: returns id() of the parameters whose optimizers count; None: all optimizers count.

    Attributes:
        owner: returns the owner, or None where it is gone.
        steps: how many it has counted.
        is_over: whether it has warned, or need not.
    """

    def __init__(
        self,
        owner: Any,
        carried: Callable[[Any], int],
        text: Callable[[Any], str | None],
        before: int | None,
        ids: Callable[[Any], Container[int]] | None = None,
    ) -> None:
        self.owner = weakref.ref(owner)
        self._carried, self._text = carried, text
        self._before, self._ids = before, ids
        self.steps = 0
        self.is_over = False

    def look(self, optimizer: Any) -> str | None:
        """Counts a step. Returns the warning, if it is due, and sets ``is_over``."""
        owner = self.owner()
        if owner is None:
            self.is_over = True
            return None
        if self._ids is not None and not has_any(optimizer, self._ids(owner)):
            return None
        carried = self._carried(owner)
        if self._before is None:
            self._before = carried
        self.steps += 1
        is_silent = carried == self._before
        self.is_over = not is_silent or self.steps == SILENT_STEPS
        return self._text(owner) if is_silent and self.is_over else None


class GradientHook(Protocol):
    """State of a gradient hook, so far as it is watched.

    Attributes:
        account: counts its buckets.
    """

    account: Account

    @property
    def comm(self) -> Communicator:
        """Communicator in use. Raises NotInitializedError where there is none."""

    @property
    def parameter_ids(self) -> Collection[int]:
        """id() of each parameter of its model; empty without a model."""


class _Watches:
    """All watches of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[_Watch] = []

    def add(self, watch: _Watch) -> None:
        with self._lock:
            if not self._all:
                after_steps.add(self._look)
            self._all.append(watch)

    def unwatch(self, owner: object) -> None:
        """Ends the watch of an owner."""
        self._end(lambda watch: watch.owner() is owner)

    def any_but(self, owner: object) -> bool:
        """Returns whether the watch of another owner, which lives, has counted steps."""
        return any(watch.steps and watch.owner() not in (None, owner) for watch in self._all)

    def _end(self, is_over: Callable[[_Watch], bool]) -> None:
        with self._lock:
            self._all = [watch for watch in self._all if not is_over(watch)]
            if not self._all:
                after_steps.remove(self._look)

    def _look(self, optimizer: Any) -> None:
        for watch in list(self._all):
            text = watch.look(optimizer)
            if text is not None:  # reported at the caller's line, above torch's and steps.py's
                warnings.warn(text, SilenceWarning, stacklevel=4)
        if any(watch.is_over for watch in self._all):
            self._end(lambda watch: watch.is_over)


_watches = _Watches()
_hooks: weakref.WeakSet[GradientHook] = weakref.WeakSet()
unwatch = _watches.unwatch


def watch_hook(state: GradientHook) -> None:
    """Watches a hook's state."""
    _hooks.add(state)
    if state.parameter_ids:
        carried, ids = (lambda one: one.account.submitted), (lambda one: one.parameter_ids)
        _watches.add(_Watch(state, carried, _of_hook, 0, ids))
    else:
        _watches.add(
            _Watch(state, lambda _: sum(one.account.submitted for one in list(_hooks)), _of_hook, 0)
        )


def watch_group(group: RingcommGroup) -> None:
    """Watches a default process group."""
    if group.comm.world_size > 1:
        _watches.add(_Watch(group, lambda _: works_of_process(), _of_group, None))


def watch_steps(
    owner: Any,
    carried: Callable[[Any], int],
    text: Callable[[Any], str | None],
    ids: Callable[[Any], Container[int]],
) -> None:
    """Watches any other object that ought to follow the steps of optimizers.

    Args:
        owner: the object.
        carried: returns how much it has carried since it was made.
        text: returns the warning if that does not change.
        ids: returns id() of the parameters whose optimizers count.
    """
    _watches.add(_Watch(owner, carried, text, carried(owner), ids))


def _of_hook(state: GradientHook) -> str | None:
    try:
        ranks = state.comm.world_size
    except NotInitializedError:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return None
    return (
        f"{SILENT_STEPS} optimizer steps, and this {type(state).__name__} has seen no gradients: "
        f"it is no hook of a DistributedDataParallel, and the {ranks} ranks may train apart. Call "
        "ddp.register_comm_hook(state, allreduce_hook) on the wrapped model. On hosts without GPUs "
        "Lightning wants that in on_fit_start, and Accelerate wraps the model with "
        "Accelerator(cpu=True) only"
    )


def _of_group(group: RingcommGroup) -> str | None:
    if dist.group.WORLD is not group or _watches.any_but(group) or is_exchanged():
        return None
    return (
        f"{SILENT_STEPS} optimizer steps, and nothing has passed between the "
        f"{group.size()} ranks of process group 'ringcomm': each trains a model of its "
        "own. Wrap the model in "
        "torch.nn.parallel.DistributedDataParallel. On hosts without GPUs Accelerate does that "
        "with Accelerator(cpu=True) only, and transformers with TrainingArguments(use_cpu=True). "
        "If it is meant so: warnings.simplefilter('ignore', ringcomm.torch.SilenceWarning)"
    )


# ---- unsuited ----

_LET_PASS = ("onebit", "1bit", "zeroone")
_ADAM = ("adam",)
_DIVIDING = (*_ADAM, "rmsprop", "adagrad", "adadelta", "adafactor", "lamb")


@dataclasses.dataclass(frozen=True)
class Unsuited:
    """A rule that gradients of some kind do not suit some optimizers.

    Attributes:
        text: the message, with {name} for the name of the optimizer's class.
        kinds: words, in lower case, in the names of those optimizers' classes.
        refused: whether it is an error; else a warning.
    """

    text: str
    kinds: tuple[str, ...]
    refused: bool = False

    def suits(self, kind: type) -> bool:
        """Returns whether the rule has nothing against a class of optimizers, by its or its
        ancestors' names."""
        return is_named(kind, _LET_PASS) or not is_named(kind, self.kinds)


def is_named(kind: type, words: Iterable[str]) -> bool:
    """Returns whether one of the words, in lower case, is in the name of the class or of an
    ancestor."""
    names = [base.__name__.lower() for base in kind.__mro__]
    return any(word in name for name in names for word in words)


ONEBIT = Unsuited(
    "compression='onebit' under {name}: it divides by its own mean square, and of signs it learns "
    "that all gradients of a block are equally large; use SGD with momentum, or int4, or "
    "ringcomm.torch.optim.OneBitAdam without DDP, or HookState(..., force=True) to train all the "
    "same",
    _DIVIDING,
    refused=True,
)
STALE = Unsuited(
    "pace='stale1' under {name}: it loses by gradients that come a step late, and the correction "
    "does not make up for all of it; compare the loss with that of pace='every', try half the "
    "learning rate, or give HookState(..., force=True) to go on without this warning",
    _ADAM,
)


class AdamWatch:
    """Refuses unsuited optimizers in each of their steps, or warns once.

    Args:
        unsuited: the rule.
    """

    def __init__(self, unsuited: Unsuited) -> None:
        self.unsuited = unsuited
        self._ids: set[int] = set()
        self._is_over = False
        before_steps.add(self._look)

    def see(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watches the optimizers of these parameters as well, unless it has warned."""
        if not self._is_over:
            self._ids.update(map(id, parameters))

    def _look(self, optimizer: Any) -> None:
        """Checks an optimizer that is about to step. Raises ConfigError, through
        ``optimizer.step()``, if the rule refuses it."""
        if self.unsuited.suits(type(optimizer)) or not has_any(optimizer, self._ids):
            return
        text = self.unsuited.text.format(name=type(optimizer).__name__)
        if self.unsuited.refused:
            raise ConfigError(text)
        self._is_over = True
        before_steps.remove(self._look)
        warnings.warn(text, stacklevel=4)  # reported at the caller's line, above torch's


# ---- others ----


def require_whole_model(model: nn.Module) -> None:
    """Raises ConfigError for a model that is sharded."""
    if any(is_sharded(type(module)) for module in model.modules()):
        raise ConfigError(
            "OuterStep: the model is sharded by FSDP, and no rank has all of it; "
            "OuterStep takes a model that each rank has whole"
        )


def require_apart(ids: Container[int], default_ranks: Sequence[int]) -> None:
    """Raises ConfigError if a DDP with one of the parameters spans ranks of OuterStep's
    communicator, and exchanges.

    Args:
        ids: id() of each parameter.
        default_ranks: the ranks that the communicator connects, by their numbers in
            torch.distributed's default group.
    """
    for wrapper in _exchanging(ids):
        shared = sorted(
            set(dist.get_process_group_ranks(wrapper.process_group)) & set(default_ranks)
        )
        if len(shared) > 1:
            raise ConfigError(
                f"OuterStep: the model is wrapped in DistributedDataParallel over ranks {shared}, "
                "which OuterStep connects as well: each gradient would be averaged over them, and "
                "then the weights once more, so everything is sent twice. Train the model without "
                "DDP; or stop DDP's exchange before attach() by ddp.require_backward_grad_sync = "
                "False; or wrap the model over the ranks of one host, and give OuterStep comm= a "
                "communicator that connects one rank of each host"
            )


def refuse_others(ids: Collection[int], name: str) -> None:
    """Raises ConfigError where a hook or a DDP exchanges the gradients of these parameters.

    Args:
        ids: id() of each parameter.
        name: the optimizer's class.
    """
    if _hooks_of(ids):
        gc.collect()  # they may only wait for it
    for state in _hooks_of(ids):
        raise ConfigError(
            f"a {type(state).__name__} was made for parameters of this {name}: the hook would send "
            f"the gradients and {name} its state. Use one of the two"
        )
    if _exchanging(ids):
        raise ConfigError(
            f"parameters of this {name} are in a DistributedDataParallel, which sends the "
            f"gradients that {name} sends again in another form. Train the model without DDP, "
            "or call ringcomm.torch.attach(model, optimizer), which stops DDP's exchange for "
            "good, as ddp.require_backward_grad_sync = False does"
        )


def _hooks_of(ids: Collection[int]) -> list[GradientHook]:
    """Returns the hooks' states that were made for one of these parameters."""
    return [state for state in list(_hooks) if not set(state.parameter_ids).isdisjoint(ids)]


def _exchanging(ids: Container[int]) -> list[DistributedDataParallel]:
    """Returns the DDP modules that have one of these parameters, and exchange its gradient."""
    return [one for one in wrappers_of(ids) if one.require_backward_grad_sync]


# ---- same data ----

_MOST_ELEMENTS = 1 << 16  # of each tensor that a digest covers
NOTHING = bytes(16)


class IdenticalDataWarning(UserWarning):
    """Warns that two ranks have trained on the same first batch."""


class FirstBatch:
    """Takes the digest of the batch that a model is called with in training mode.

    Attributes:
        digest: 16 bytes, of the latest call before ``stop``; zeros if there was none, or none with
            a tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self.digest = NOTHING
        self._handle: Any = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model.training:
            self.digest = digest_of((args, kwargs))

    def stop(self) -> None:
        """Stops watching the model. Must not be called within a forward."""
        self._handle.remove()


def digest_of(batch: Any) -> bytes:
    """Returns the digest of the tensors in nested lists, tuples and dictionaries; zeros if there
    are none."""
    digest, tensors = hashlib.blake2b(digest_size=16), list(tensors_in(batch))
    for tensor in tensors:
        some = tensor.detach().flatten()[:_MOST_ELEMENTS].cpu().contiguous()
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(some.view(torch.uint8).numpy().tobytes() if some.numel() else b"")
    return digest.digest() if tensors else NOTHING


def tensors_in(batch: Any) -> Iterator[torch.Tensor]:
    """Yields the dense tensors in nested lists, tuples and dictionaries."""
    if isinstance(batch, torch.Tensor):
        if batch.layout == torch.strided:
            yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors_in(value)
