"""Guard: skips a step with gradients that are not finite, on the rank that has them.

One NaN would spoil the weights in this step, and the moments of an optimizer such as Adam for ever:
that rank's deltas would not count in any later round. So gradients are checked before each step, as
a GradScaler does, in one pass that writes nothing. If one is not finite, or so large that its
square is not, the gradients are set to None, and the optimizer changes nothing.

Weights that a step itself spoils are found when the rank's delta is taken (round.py). They are
then replaced by the anchor, and the optimizer's state of these parameters is reset. A copy of that
state as of the last round would lose less, but cost AdamW the memory of two more models for a rare
case.

Invariants: a step that a GradScaler checks is not checked here. ``stop`` removes all hooks from the
optimizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...errors import warn_caller
from ..guards import tensors_in
from ..tensors import all_finite
from .rounds import Rounds


class Guard:
    """Checks the steps of the optimizers of one rank.

    Args:
        optimizers: the optimizers that OuterStep was given.
        names: names of the model's trained parameters, by id().
        core: the rounds, which count iterations.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], names: Mapping[int, str], core: Rounds
    ) -> None:
        self._optimizers, self._names, self._core = list(optimizers), names, core
        self._handles: list[Any] = []
        self._dropped_at = -1  # round in which the weights were last not finite

    def start(self) -> None:
        """Checks the gradients before each step from now on."""
        self._handles = [one.register_step_pre_hook(self._look) for one in self._optimizers]

    def stop(self) -> None:
        """Ends the checks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Checks the gradients before a step; of a step with a closure, after the closure. Returns
        the step's arguments with such a closure, or None."""
        if getattr(optimizer, "found_inf", None) is not None:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._drop_unless_finite(optimizer)
            return None

        def looked_at() -> Any:
            loss = closure()
            self._drop_unless_finite(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looked_at}
        return (args[0], looked_at, *args[2:]), kwargs

    def _drop_unless_finite(self, optimizer: torch.optim.Optimizer) -> None:
        held = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        bad = _first_not_finite([parameter.grad for parameter in held])
        if bad is None:
            return
        for parameter in held:
            parameter.grad = None
        self._core.report.skipped += 1
        count = self._core.report.skipped
        if count == 10 ** (len(str(count)) - 1):
            name = self._names.get(id(held[bad]), "a parameter")
            warn_caller(
                f"OuterStep: the gradient of {name!r} is not finite on rank {self._rank} in "
                f"iteration {self._core.iteration + 1}: the step is left out there, {count} so far "
                "(outer.report().skipped)"
            )

    @property
    def _rank(self) -> int:
        return self._core.rank

    def resume_from_anchor(self) -> None:
        """Resets the optimizers and warns, after the weights were not finite and were replaced by
        the anchor."""
        before, self._dropped_at = self._dropped_at, self._core.number
        also, mended = "", self._mend()
        if mended:
            also = (
                f". Its optimizer's state of {mended} parameters was not finite either, and "
                "begins anew"
            )
        elif not self._optimizers and before == self._core.number - 1:
            also = (
                ". This is the second time in a row: the optimizer's state, such as Adam's "
                "means, may not be finite either. Clear it (optimizer.state.clear()), or give "
                "OuterStep the optimizer"
            )
        warn_caller(
            f"OuterStep: the weights of rank {self._rank} were not finite after iteration "
            f"{self._core.iteration}: they did not count in round {self._core.number}, and it went "
            f"on from the anchor{also}"
        )

    def _mend(self) -> int:
        """Resets the optimizers' state of each parameter of which it is not finite. Returns the
        number of these parameters."""
        mended = 0
        for optimizer in self._optimizers:
            for parameter in [p for p in optimizer.state if id(p) in self._names]:
                kept = [
                    one for one in tensors_in(optimizer.state[parameter]) if one.is_floating_point()
                ]
                if all(map(all_finite, kept)):
                    continue
                mended += 1
                if isinstance(optimizer, torch.optim.Adagrad):  # its state is made in __init__ only
                    for tensor in kept:
                        tensor.nan_to_num_(0.0, 0.0, 0.0)
                else:
                    del optimizer.state[parameter]
        return mended


def _first_not_finite(gradients: Sequence[torch.Tensor]) -> int | None:
    """Returns the index of the first gradient that is not finite, or whose square is not; None if
    there is none. Waits for one result on each device."""
    dense = [one.coalesce().values() if one.is_sparse else one for one in gradients]
    for device in {one.device for one in dense}:
        at = [index for index, one in enumerate(dense) if one.device == device and one.numel()]
        wide = torch.float32
        for index in at:
            wide = torch.promote_types(wide, dense[index].dtype)
        if at:
            norms = torch.stack(torch._foreach_norm([dense[index] for index in at], 2, dtype=wide))
            finite = norms.isfinite()
            if not bool(finite.all()):
                return at[int(finite.logical_not().nonzero()[0])]
    return None
