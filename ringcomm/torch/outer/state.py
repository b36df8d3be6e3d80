"""The state of an OuterStep in a checkpoint.

    both kinds      anchor and the rules' memory by tensors' names, iteration, number of the round,
                    residuals of wires
    gathered        a round on its way counts as applied; ranks continue from the anchor
    a rank's own    a round on its way unapplied, and the iterations since this rank's rounds

Invariants: a state holds tensors, strings, numbers and containers of these only, so torch.load
reads it with weights_only=True. It shares no memory with the OuterStep. A load that raises changes
nothing, except if a wire's own state is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ...communicator import Communicator
from ...errors import ConfigError
from ...exact import is_own, place_of
from ..exchange import CommExchange
from .round import Outcome, Round, Unit
from .rounds import Rounds
from .wires import Wires

_FORMAT = 1
_METHOD = "OuterStep"
_KEYS = {"outer", "fragments", "anchor", "memory", "wires", "iteration", "number", "pace"}


def saved(core: Rounds, wires: Wires, comm: Communicator, *, own: bool) -> dict[str, Any]:
    """Returns this rank's own state, or the gathered one, which is a collective. The result of a
    round on its way must have come."""
    anchor: dict[str, torch.Tensor] = {}
    memory: dict[str, dict[str, torch.Tensor]] = {}
    number = core.number
    for unit, at, kept in _anchors(core, is_applied=not own):
        anchor.update((name, part.clone()) for name, part in unit.block.named(at))
        for slot, tensor in kept.items():
            parts = unit.block.named(tensor)
            memory.setdefault(slot, {}).update((name, part.clone()) for name, part in parts)
    if core.current is not None and not own:
        number += 1
    counted = {"iteration": core.iteration, "pace": core.pace.saved()}
    if not own:  # ranks may count differently
        counted = CommExchange(comm).shared(counted)
    state = {
        "format": _FORMAT,
        "method": _METHOD,
        "outer": _rule_of(core),
        **counted,
        "number": number,
        "fragments": len(core.fragments),
        "anchor": anchor,
        "memory": memory,
        "wires": wires.saved(comm, own=own),
    }
    if own:
        state["exact"] = {
            **place_of(comm),
            "iterations": [one.iterations for one in core.fragments],
            "flight": _round_state(core.current),
        }
    return state


def _anchors(
    core: Rounds, *, is_applied: bool
) -> Iterator[tuple[Unit, torch.Tensor, dict[str, torch.Tensor]]]:
    """Yields each unit with its anchor and memory: the present ones, or those after the round on
    its way."""
    current = core.current if is_applied else None
    for fragment in core.fragments:
        for at, unit in enumerate(fragment.units):
            if current is None or current.fragment is not fragment:
                yield unit, unit.block.anchor, unit.memory
                continue
            anchor = unit.block.anchor.clone()
            memory = {slot: tensor.clone() for slot, tensor in unit.memory.items()}
            outcome = current.outcome
            if outcome.is_moving:
                unit.rule.step(anchor, outcome.means[at].clone(), memory)
            yield unit, anchor, memory


def _round_state(current: Round | None) -> dict[str, Any] | None:
    if current is None:
        return None
    outcome = current.outcome
    return {
        "due": current.due,
        "is_moving": outcome.is_moving,
        "is_dropped": current.is_dropped,
        "means": [mean.clone() for mean in outcome.means],
        "at_send": None if current.at_send is None else [one.clone() for one in current.at_send],
    }


def restore(core: Rounds, wires: Wires, comm: Communicator, state: Mapping[str, Any]) -> None:
    """Restores a state. Raises ConfigError for one that does not fit."""
    _require_fit(core, state)
    exact = state.get("exact")
    place = place_of(comm)
    own = exact is not None and is_own(
        {"exact": {name: exact[name] for name in place if name in exact}}, place, "OuterStep"
    )
    core.drop_round()
    if own or exact is None:
        wires.restore(state["wires"], comm)
    else:
        wires.reset_residuals()
    for fragment in core.fragments:
        fragment.iterations = 0
        for unit in fragment.units:
            _fill(unit, unit.block.anchor, state["anchor"])
            for slot, tensor in unit.memory.items():
                _fill(unit, tensor, state["memory"][slot])
            if not own:
                unit.set_weights(None)
    core.iteration, core.number = int(state["iteration"]), int(state["number"])
    core.has_state = True
    core.pace.restore(state["pace"])
    if exact is not None:
        _load_exact(core, exact, own=own)


def _load_exact(core: Rounds, exact: Mapping[str, Any], *, own: bool) -> None:
    """Restores a rank's own part, and the round on its way. From another rank's state it takes only
    that round's result, which is the same on all."""
    if own:
        before = [since[0] for since in exact.get("since", ())]  # form of earlier versions
        counts = exact.get("iterations", before)
        for fragment, iterations in zip(core.fragments, counts, strict=True):
            fragment.iterations = int(iterations)
    saved = exact["flight"]  # as it was called when the format was made
    if saved is not None:
        fragment = core.fragments[core.number % len(core.fragments)]
        outcome = Outcome([mean.clone() for mean in saved["means"]], saved["is_moving"], None)
        at_send = saved["at_send"] if own else None
        core.current = Round.restored(
            fragment,
            saved["due"],
            None if at_send is None else [one.clone() for one in at_send],
            outcome,
            saved["is_dropped"] and own,
        )


def _fill(unit: Unit, flat: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> None:
    for name, part in unit.block.named(flat):
        part.copy_(parts[name])


def _rule_of(core: Rounds) -> str:
    """Returns the rule's name in a state: Nesterov without momentum is the mean."""
    unit = core.fragments[0].units[0]
    name = type(unit.rule).__name__
    return "Mean" if name == "Nesterov" and not unit.memory else name


def _require_fit(core: Rounds, state: object) -> None:
    if not isinstance(state, Mapping) or state.get("method") != _METHOD:
        what = state.get("method", "something else") if isinstance(state, Mapping) else state
        raise ConfigError(f"this is no state of an OuterStep, but of {what}")
    if state.get("format") != _FORMAT:
        raise ConfigError(
            f"the state has format {state.get('format')!r}; this version reads {_FORMAT}"
        )
    lacking = _KEYS - state.keys()
    if lacking:
        raise ConfigError(f"this is no whole state of an OuterStep: it lacks {sorted(lacking)}")
    if state["pace"].keys() != core.pace.saved().keys():
        raise ConfigError(f"the state is of another kind of every= than every={core.pace.every}")
    for what, there, here in (
        ("outer", "Mean" if state["outer"] == "Sgd" else state["outer"], _rule_of(core)),
        ("fragments", state["fragments"], len(core.fragments)),
    ):
        if there != here:
            raise ConfigError(
                f"the state is of {what}={there}, and this OuterStep has {what}={here}"
            )
    shapes = {
        name: tuple(one.tensor.shape)
        for fragment in core.fragments
        for unit in fragment.units
        for name, one in zip(unit.block.names, unit.block.slices, strict=True)
    }
    saved = {name: tuple(tensor.shape) for name, tensor in state["anchor"].items()}
    since = sorted(shapes.keys() - saved.keys())
    if since and saved.items() <= shapes.items():
        raise ConfigError(
            f"the state lacks {since[0]!r}, which is trained here: load it where the same "
            "parameters are trained as when it was saved, then flush(), detach(), train more, and "
            "make a new OuterStep; or begin without it, with no outer momentum"
        )
    if shapes != saved:
        wrong = sorted(set(shapes.items()) ^ set(saved.items()))[0][0]
        raise ConfigError(f"the state is of another model: they differ in {wrong!r}")
