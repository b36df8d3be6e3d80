"""StellaTrain's path for convergence.py: ringcomm.torch.sparse, whose Adam sends what is largest.

Gradients are clipped on each rank for itself, before the choice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _conv_methods import Place, Recipe


def stellatrain(place: Place, *, density: float = 1 / 64) -> Recipe:
    """The largest blocks of each gradient, and an Adam on the CPU that touches these alone."""
    from _conv_methods import BETAS, DECAY, Recipe

    import ringcomm.torch.sparse

    optimizer = ringcomm.torch.sparse.Adam(
        place.model.parameters(), lr=place.lr, betas=BETAS, weight_decay=DECAY, comm=place.comm,
        density=density, overlap=False,
    )  # fmt: skip
    return Recipe([optimizer], around=optimizer)
