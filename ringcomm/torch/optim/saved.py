"""The states of a WireOptimizer: torch.optim's form, with an entry for the exchange.

    state, param_groups    as in any torch.optim.Optimizer; OneBitAdam's as in torch's AdamW
    ringcomm               method, steps, skipped; spans: which parameters travel together; rule;
                           feedback: the residuals, of this rank (exact) or of all

Invariants: a state holds tensors, strings and numbers only, so torch.load reads it with
weights_only=True. Checks come before any change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...communicator import Communicator
from ...errors import ConfigError
from ...exact import require_format
from ...feedback import FeedbackStore
from ..sync.bucket import master_dtype
from .span import IndexedParameter, Place, Span

FORMAT = 1
KEY = "ringcomm"
_ADAMS_OWN = {
    "amsgrad",
    "foreach",
    "maximize",
    "capturable",
    "differentiable",
    "fused",
    "decoupled_weight_decay",
}
#: Methods of earlier versions, and their names in messages.
_REMOVED = {
    "Lion": "Lion by the ranks' signs",
    **{
        f"{name}(deepspeed_compat)": f"{name} as published"
        for name in ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
    },
}


def saved_layout(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Returns the layout for a state: which parameters travel together."""
    return [{"small": span.is_small, "indices": list(span.indices)} for span in spans]


def require_method(state: Mapping[str, Any], method: str) -> Mapping[str, Any]:
    """Returns the entry of the exchange. Raises ConfigError for a state of another optimizer."""
    own = state.get(KEY)
    if not isinstance(own, Mapping):
        kept = sorted({name for one in state.get("state", {}).values() for name in one})
        held = f" (with {', '.join(kept)})" if kept else ""
        raise ConfigError(
            f"this is a state of another optimizer{held}, and none of ringcomm's {method}"
        )
    if own.get("method") != method:
        there = str(own.get("method"))
        if there in _REMOVED:
            there = (
                f"{_REMOVED[there]}, which has been removed (make a new optimizer, with the "
                "weights that were saved)"
            )
        raise ConfigError(f"the state is of {there}, and this optimizer is {method}")
    require_format(own, FORMAT, method)
    return own


def held_by(
    indices: Sequence[int],
    parameters: Sequence[IndexedParameter],
    kind_of: Callable[[torch.dtype], object] = master_dtype,
) -> list[IndexedParameter]:
    """Returns the parameters of these numbers, which travelled together. Raises ConfigError if they
    do not exist, or cannot travel together, as their groups, devices or kinds of dtypes differ."""
    _require_known(indices, parameters)
    held = [parameters[index] for index in indices]
    alike = {(each.group, kind_of(each.parameter.dtype), each.parameter.device) for each in held}
    if len(alike) != 1:
        raise ConfigError(
            "the state is of another model: its parameters "
            f"{', '.join(map(str, indices[:3]))} have other groups or dtypes there"
        )
    return held


def _require_known(indices: Iterable[int], parameters: Sequence[IndexedParameter]) -> None:
    wrong = next((index for index in indices if not 0 <= index < len(parameters)), None)
    if wrong is not None:
        raise ConfigError(f"the state is of another model: it has a parameter {wrong}")


def read_feedback(state: Mapping[str, Any], comm: Communicator) -> FeedbackStore:
    """Returns the residuals of a state. Raises ConfigError for those of a world of another size."""
    feedback = FeedbackStore()
    feedback.load_state_dict(state, comm, strict=False)
    return feedback


def read_spans(
    layout: Sequence[Mapping[str, Any]],
    parameters: Sequence[IndexedParameter],
    states: Sequence[str],
    saved: Mapping[int, Mapping[str, Any]],
) -> list[Span]:
    """Returns the spans of a saved layout, with their saved tensors.

    Args:
        parameters: all of the optimizer's.
        saved: the "state" of torch.optim's form.

    Raises ConfigError where it does not fit the parameters.
    """
    spans = [
        Span(held_by(one["indices"], parameters), bool(one["small"]), states) for one in layout
    ]
    for span in spans:
        for name, flat in span.kept().items():
            is_master = flat is span.master
            if is_master and any(name not in saved.get(index, {}) for index in span.indices):
                continue  # saved from float32 parameters, which have no master copy
            for place in span.slices:
                place.of(flat).copy_(value_of(saved, place, name))
            span.fill_padding(flat)
            if is_master:
                span.note()
    return spans


def read_adam(
    state: Mapping[str, Any], parameters: Sequence[IndexedParameter], method: str
) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Reads a state of torch.optim.AdamW or Adam.

    Returns:
        By the number of the parameter exp_avg, exp_avg_sq and step; and the groups with the
        hyperparameters that AdamW and OneBitAdam share.

    Raises ConfigError for a state of another optimizer, which ``method`` cannot load, for one
    of another model, and for settings of Adam that change its update.
    """
    kept = state.get("state", {})
    if not kept or any(not {"step", "exp_avg", "exp_avg_sq"} <= set(one) for one in kept.values()):
        require_method(state, method)
    groups = state["param_groups"]
    for group in groups:
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise ConfigError(
                    f"the state is of an Adam with {name}=True, which {method} does not have"
                )
        decay = group.get("weight_decay", 0)
        if decay and group.get("decoupled_weight_decay") is False:
            raise ConfigError(
                f"the state is of an Adam with weight_decay={decay} in the gradient, and {method} "
                "decays weights as AdamW does: set it to 0 in the state's param_groups, or to what "
                "AdamW would have, with decoupled_weight_decay=True beside it"
            )
    _require_known(kept, parameters)
    own = ("step", "exp_avg", "exp_avg_sq")
    return {index: {name: one[name] for name in own} for index, one in kept.items()}, [
        {name: value for name, value in group.items() if name not in _ADAMS_OWN} for group in groups
    ]


def value_of(saved: Mapping[int, Mapping[str, Any]], place: Place, name: str) -> torch.Tensor:
    """Returns the tensor of a name that a state has for a parameter. Raises ConfigError unless it
    has the parameter's shape."""
    value = saved.get(place.index, {}).get(name)
    if isinstance(value, torch.Tensor) and value.shape == place.tensor.shape:
        return value
    there = list(value.shape) if isinstance(value, torch.Tensor) else "nothing"
    raise ConfigError(
        f"the state is of another model: {name} of parameter {place.index} is {there} there, "
        f"and the parameter {list(place.tensor.shape)} here"
    )
