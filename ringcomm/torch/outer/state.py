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

from collections.abc import Mapping
from typing import Any

import torch

from ...communicator import Communicator
from ...errors import ConfigError
from ...exact import is_own, place_of, require_format
from ..exchange import CommExchange
from .round import Round
from .rounds import Rounds
from .wires import Wires

_FORMAT = 1
_METHOD = "OuterStep"
_KEYS = {"outer", "fragments", "anchor", "memory", "wires", "iteration", "number", "pace"}


def saved(rounds: Rounds, wires: Wires, comm: Communicator, *, own: bool) -> dict[str, Any]:
    """Returns this rank's own state, or the gathered one, which is a collective. The result of a
    round on its way must have come."""
    kept: dict[str, dict[str, torch.Tensor]] = {}
    applied = None if own else rounds.current
    for fragment in rounds.fragments:
        states = [block.state for block in fragment.blocks]
        if applied is not None and applied.fragment is fragment and applied.is_moving:
            states = applied.next_states
        for block, here in zip(fragment.blocks, states, strict=True):
            for slot, tensor in here.items():
                kept.setdefault(slot, {}).update(
                    (name, part.clone()) for name, part in block.named(tensor)
                )
    counted = {"iteration": rounds.iteration, "pace": rounds.pace.saved()}
    if not own:  # ranks may count differently
        counted = CommExchange(comm).shared(counted)
    state = {
        "format": _FORMAT,
        "method": _METHOD,
        "outer": _rule_of(rounds),
        **counted,
        "number": rounds.number + (applied is not None),
        "fragments": len(rounds.fragments),
        "anchor": kept.pop(""),
        "memory": kept,
        "wires": wires.saved(comm, own=own),
    }
    if own:
        current = rounds.current
        state["exact"] = {
            **place_of(comm),
            "iterations": [one.iterations for one in rounds.fragments],
            "flight": None
            if current is None
            else {
                "due": current.due,
                "is_moving": current.is_moving,
                "is_dropped": current.is_dropped,
                "means": [mean.clone() for mean in current.means],
                "at_send": [one.clone() for one in current.local] or None,
            },
        }
    return state


def restore(rounds: Rounds, wires: Wires, comm: Communicator, state: Mapping[str, Any]) -> None:
    """Restores a state. Raises ConfigError for one that does not fit."""
    _require_fit(rounds, state)
    exact = state.get("exact")
    place = place_of(comm)
    own = exact is not None and is_own(
        {"exact": {name: exact[name] for name in place if name in exact}}, place, "OuterStep"
    )
    rounds.wait_for_round()
    if own or exact is None:
        wires.restore(state["wires"], comm)
    else:
        wires.reset_residuals()
    rounds.current = None
    for fragment in rounds.fragments:
        fragment.iterations = 0
        for block in fragment.blocks:
            for slot, tensor in block.state.items():
                parts = state["memory"][slot] if slot else state["anchor"]
                for name, part in block.named(tensor):
                    part.copy_(parts[name])
            if not own:
                block.scatter(block.anchor)
    rounds.iteration, rounds.number = int(state["iteration"]), int(state["number"])
    rounds.has_state = True
    rounds.pace.restore(state["pace"])
    if exact is not None:
        _load_exact(rounds, exact, own=own)


def _load_exact(rounds: Rounds, exact: Mapping[str, Any], *, own: bool) -> None:
    """Restores a rank's own part, and the round on its way. From another rank's state it takes only
    that round's result, which is the same on all."""
    if own:
        before = [since[0] for since in exact.get("since", ())]  # of earlier versions
        counts = exact.get("iterations", before)
        for fragment, iterations in zip(rounds.fragments, counts, strict=True):
            fragment.iterations = int(iterations)
    saved = exact["flight"]  # the round on its way
    if saved is not None:
        anchors = [block.anchor for block in rounds.fragment.blocks]
        means, local = (
            [flat.to(anchor, copy=True) for flat, anchor in zip(flats, anchors, strict=False)]
            for flats in (saved["means"], (saved["at_send"] or ()) if own else ())
        )
        current = Round(
            rounds.fragment,
            saved["due"],
            rounds.header(is_ending=False),  # which is not sent any more
            local,
            rounds.scratch,
            is_delayed=True,
            keeps=False,
        )
        current.means = means
        current.is_moving, current.is_dropped = saved["is_moving"], saved["is_dropped"] and own
        current.close()
        rounds.current = current


def _rule_of(rounds: Rounds) -> str:
    """Returns the rule's name in a state: Nesterov without momentum is the mean."""
    block = rounds.fragments[0].blocks[0]
    name = type(block.rule).__name__
    return "Mean" if name == "Nesterov" and not block.memory else name


def _require_fit(rounds: Rounds, state: object) -> None:
    if not isinstance(state, Mapping) or state.get("method") != _METHOD:
        what = state.get("method", "something else") if isinstance(state, Mapping) else state
        raise ConfigError(f"this is no state of an OuterStep, but of {what}")
    require_format(state, _FORMAT, _METHOD)
    lacking = _KEYS - state.keys()
    if lacking:
        raise ConfigError(f"this is no whole state of an OuterStep: it lacks {sorted(lacking)}")
    if state["pace"].keys() != rounds.pace.saved().keys():
        raise ConfigError(f"the state is of another kind of every= than every={rounds.pace.every}")
    for what, there, here in (  # "Sgd": as earlier versions called Nesterov without momentum
        ("outer", "Mean" if state["outer"] == "Sgd" else state["outer"], _rule_of(rounds)),
        ("fragments", state["fragments"], len(rounds.fragments)),
    ):
        if there != here:
            raise ConfigError(
                f"the state is of {what}={there}, and this OuterStep has {what}={here}"
            )
    shapes = {
        name: tuple(one.tensor.shape)
        for block in rounds.blocks
        for name, one in zip(block.names, block.slices, strict=True)
    }
    saved = {name: tuple(tensor.shape) for name, tensor in state["anchor"].items()}
    newer = sorted(shapes.keys() - saved.keys())
    if newer and saved.items() <= shapes.items():
        raise ConfigError(
            f"the state lacks {newer[0]!r}, which is trained here: load it where the same "
            "parameters are trained as when it was saved, then flush(), detach(), train more, and "
            "make a new OuterStep; or begin without it, with no outer momentum"
        )
    if shapes != saved:
        wrong = sorted(set(shapes.items()) ^ set(saved.items()))[0][0]
        raise ConfigError(f"the state is of another model: they differ in {wrong!r}")
    _require_complete(rounds, state)


def _require_complete(rounds: Rounds, state: Mapping[str, Any]) -> None:
    """Raises ConfigError if the rules' memory or a round on its way does not fit the blocks."""
    for block in rounds.blocks:
        for slot, tensor in block.memory.items():
            there = state["memory"].get(slot, {})
            for name, part in block.named(tensor):
                if name not in there or there[name].shape != part.shape:
                    raise ConfigError(f"the state lacks the {slot} of {name!r}")
    exact = state.get("exact")
    if not exact:
        return
    counts = exact.get("iterations", exact.get("since", ()))
    if "flight" not in exact or len(counts) != len(rounds.fragments):
        raise ConfigError("this is no whole state of an OuterStep: its own part lacks something")
    flight = exact["flight"]
    if flight is not None:
        lacking = {"due", "is_moving", "is_dropped", "means", "at_send"} - flight.keys()
        if lacking:
            raise ConfigError(f"the state's round on its way lacks {sorted(lacking)}")
        blocks = rounds.fragments[int(state["number"]) % len(rounds.fragments)].blocks
        sizes = [(block.count,) for block in blocks]
        means, at_send = (
            [tuple(flat.shape) for flat in flight[key] or ()] for key in ("means", "at_send")
        )
        if ((means or flight["is_moving"]) and means != sizes) or at_send not in ([], sizes):
            raise ConfigError("the state's round on its way is of another model")
