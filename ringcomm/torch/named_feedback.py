"""Residuals of a hook's codec, kept by the names of the model's parameters.

Invariants: a parameter's residual is kept under its name, never by bucket: DDP lays the buckets
out anew after the first step. A step in which a result is not finite leaves all residuals as they
were (``commit_or_undo``), on all ranks alike, as all see the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from ..communicator import Communicator
from ..errors import ConfigError
from ..feedback import ErrorFeedback, FeedbackStore
from .streams import NonFiniteFlag
from .sync.pending import Pending
from .wrapped import inner_of, plain_name

COMPRESSIBLE = (torch.float32, torch.float64)


def is_by_rows(parameter: torch.Tensor) -> bool:
    """Returns whether a parameter's gradient lies row by row in its bucket: unless the parameter
    lies otherwise in memory, without gaps."""
    strides = parameter.stride()
    return (
        parameter.is_contiguous() or torch.empty_like(parameter, device="meta").stride() != strides
    )


class NamedFeedback:
    """The residuals of one hook.

    Args:
        feedback: as HookState's.
        threshold: bytes of a gradient below which it is small, and has no residual.
        kept_of: returns how many residual elements of a parameter this rank keeps.

    Attributes:
        store: the FeedbackStore in use.
        wanted: whether residuals are kept; None: if the codec needs them, or a state has any.
        loss_scale: factor that is in the gradients; the store has that of its residuals, which may
            come from a checkpoint.
        compression: name of the codec, for messages.
        needed: whether the codec needs them.
    """

    def __init__(
        self,
        feedback: FeedbackStore | bool | None,
        threshold: int,
        kept_of: Callable[[torch.Tensor], int],
    ) -> None:
        self.store = feedback if isinstance(feedback, FeedbackStore) else FeedbackStore()
        self.wanted = None if feedback is None else feedback is not False
        self.loss_scale = self.store.loss_scale
        self.compression, self.needed = "none", False
        self._is_loaded = False  # a state has brought residuals
        self._threshold = threshold
        self._kept_of = kept_of
        self._names: dict[int, tuple[torch.Tensor, str]] = {}
        self._nonfinite_flags: list[NonFiniteFlag] = []
        self._was_finite = True  # what was checked since the last take_verdict
        self._changed: list[ErrorFeedback] = []

    # ---- names ----

    @property
    def parameter_ids(self) -> Collection[int]:
        """id() of each parameter of the model; empty without a model."""
        return self._names.keys()

    def name_parameters(self, model: torch.nn.Module) -> None:
        """Takes the parameters' names from the model, in DDP or not."""
        self._names = {
            id(parameter): (parameter, plain_name(name))
            for name, parameter in inner_of(model).named_parameters()
        }
        if self.keeps:
            self.reserve()

    def named(self) -> dict[str, torch.Tensor]:
        """Returns the model's parameters by name; empty without a model."""
        return {name: parameter for parameter, name in self._names.values()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """Returns a parameter's name. Raises ConfigError for one that is not the model's."""
        if id(parameter) not in self._names:
            raise ConfigError("DDP brings a parameter that is not among those of HookState's model")
        return self._names[id(parameter)][1]

    def count_of(self, name: str) -> int | None:
        """Returns the number of elements of the parameter of that name; None for an unknown
        name."""
        return next((p.numel() for p, known in self._names.values() if known == name), None)

    def set_codec(self, compression: str, needed: bool) -> None:
        """Sets the codec. Raises ConfigError if residuals are to be kept and parameters have no
        names."""
        self.compression, self.needed = compression, needed
        self._require_names()
        if self.keeps:
            self.reserve()

    def _require_names(self) -> None:
        if self.keeps and not self._names:
            raise ConfigError(
                f"compression={self.compression!r} keeps error feedback by the names of the "
                "model's parameters; give HookState(..., model=model), or feedback=False to go "
                "without"
            )

    # ---- residuals ----

    @property
    def keeps(self) -> bool:
        """Whether residuals are kept."""
        if self.wanted is None:
            return self.needed or self._is_loaded
        return self.wanted

    @property
    def can_keep(self) -> bool:
        """Whether residuals of a state can be loaded."""
        return self.wanted is not False and bool(self._names)

    def scale_to(self, loss_scale: float) -> None:
        """Sets the factor that is in the gradients, and scales the residuals to it."""
        self.store.loss_scale = loss_scale
        self.loss_scale = loss_scale

    def load(self, state: Mapping[str, Any], comm: Communicator, strict: bool) -> None:
        """Restores a store's state, in its units. Parameters that it lacks, trained only since,
        start from zero. Raises ConfigError as the store does, and if strict for names that are
        unknown here: their residuals would be lost."""
        before = set(self.store)
        self.reserve()
        try:
            if strict:
                self._require_known(state.get("tensors"))
            self._require_strides(state)
            self.store.load_state_dict(state, comm, strict=False)
        except Exception:
            for name in set(self.store) - before:
                self.store.remove(name)
            raise
        self._is_loaded = True

    def saved_strides(self) -> dict[str, list[int]]:
        """Returns the strides of the parameters whose residuals do not lie row by row."""
        return {
            name: list(parameter.stride())
            for parameter, name in self._names.values()
            if name in self.store and not is_by_rows(parameter)
        }

    def _require_strides(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError for residuals that lie in another order, of which older states do not
        tell."""
        tensors, here = state.get("tensors"), self.saved_strides()
        there = state.get("strides", here)
        names = set(tensors) & set(self.store) if isinstance(tensors, Mapping) else ()
        for name in sorted(names):
            if there.get(name) != here.get(name):
                raise ConfigError(
                    f"the state is of another memory format: residuals of {name!r} lie there in "
                    "the order of another model.to(memory_format=); convert the model back, or "
                    "leave out the state's 'feedback', to start residuals from zero"
                )

    def _require_known(self, tensors: object) -> None:
        unknown = sorted(set(tensors) - set(self.store)) if isinstance(tensors, Mapping) else []
        if unknown:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ConfigError(
                "the state is of another model, or of one of which more is trained: it has "
                f"{', '.join(map(repr, unknown[:3]))}{more}, unknown here; "
                "load_state_dict(..., strict=False) leaves out what that has"
            )

    def reserve(self) -> None:
        """Makes an ErrorFeedback for each large parameter."""
        for parameter, name in self._names.values():
            if self.is_large(parameter):
                self.store[name].require_size(self._kept_of(parameter))

    def is_large(self, parameter: torch.Tensor) -> bool:
        """Returns whether the parameter travels by itself; others are packed and sent at bf16."""
        big = parameter.numel() * parameter.element_size() >= self._threshold
        trained = parameter.requires_grad and parameter.dtype in COMPRESSIBLE
        return trained and parameter.dim() > 1 and parameter.numel() > 0 and big

    def feedback_of(self, parameter: torch.Tensor) -> ErrorFeedback | None:
        """Returns the parameter's ErrorFeedback; None if none is kept. Raises ConfigError for a
        parameter that is not the model's."""
        if not self.keeps:
            return None
        self._require_names()
        return self.store[self.name_of(parameter)]

    # ---- steps that are dropped ----

    def add(self, pending: Pending) -> None:
        """Notes the residuals that a mean of this step changes; ``commit_or_undo`` may restore
        them. From any thread."""
        if pending.changed is not None:
            self._changed.append(pending.changed)

    def add_nonfinite_flag(self, flag: NonFiniteFlag) -> None:
        """Adds a bucket's flag of results that are not finite. From any thread."""
        self._nonfinite_flags.append(flag)

    def commit_or_undo(self) -> None:
        """Ends a step whose works are all over: restores the residuals of before the step unless
        all checked results were finite. A second call does nothing."""
        if any(flag.wait() for flag in self._nonfinite_flags):
            self._was_finite = False
            for feedback in self._changed:
                feedback.undo()
        self._nonfinite_flags, self._changed = [], []

    def take_verdict(self) -> bool:
        """Returns whether all results were finite that were checked since the last call."""
        verdict, self._was_finite = self._was_finite, True
        return verdict
