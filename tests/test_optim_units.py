"""Optimizers whose arithmetic is done in tiles of a span; the units in which momenta travel; and
whether values are finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from optim_cases import gradients, parameters
from ranks import run_ranks

from ringcomm import Communicator
from ringcomm.codecs import BLOCK
from ringcomm.torch.optim import OneBitAdam, OneBitLamb, span
from ringcomm.torch.optim.adam import Units
from ringcomm.torch.optim.span import IndexedParameter, Span, lay_out
from ringcomm.torch.sync.bucket import all_finite, tile_elements

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_left")]
SHAPES = [(50, 43), (40, 33), (77,)]


def span_of(count: int) -> Span:
    """A large one, with a variance."""
    parameter = torch.nn.Parameter(torch.zeros(count, 1))
    (made,) = lay_out([IndexedParameter(0, 0, parameter)], 0, ("exp_avg_sq",))
    made.group = {"eps": 1e-8}
    made.state["exp_avg_sq"].copy_(torch.rand(made.count) ** 4)
    return made


@pytest.mark.parametrize(("kind", "eps"), [(OneBitAdam, 0.0), (OneBitLamb, 1e-8)])
def test_tiles_change_no_bit(
    kind: type[OneBitAdam], eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of dense steps, steps at 1 bit and renewals, also where an element never has a gradient."""

    def body(comm: Communicator) -> bytes:
        params = parameters(SHAPES)
        optimizer = kind(params, 1e-3, eps=eps, freeze=3, comm=comm, threshold=0)
        for step in range(1, 11):
            own = gradients(SHAPES, step, comm.world_size)[comm.rank]
            for parameter, gradient in zip(params, own, strict=True):
                parameter.grad = torch.from_numpy(np.float32(gradient)).view_as(parameter)
                parameter.grad[:3] = 0
            optimizer.step()
        return b"".join(parameter.detach().numpy().tobytes() for parameter in params)

    whole = run_ranks(2, body)
    monkeypatch.setattr(span, "tile_elements", lambda: 2 * BLOCK)
    assert run_ranks(2, body) == whole
    assert np.isfinite(np.frombuffer(whole[0], np.float32)).all()


def test_tiles_cover_a_span_once() -> None:
    """In order, each of whole blocks."""
    made = span_of(3 * tile_elements() + 5)
    tiles = list(made.tiles())
    assert [tile.start for tile in tiles] == [0, *(tile.stop for tile in tiles[:-1])]
    assert tiles[-1].stop == made.count
    assert all(tile.start % BLOCK == 0 and tile.stop % BLOCK == 0 for tile in tiles)


def test_bounded_units_by_their_formula() -> None:
    """min(R, 5 r), in float64."""
    made = span_of(2 * tile_elements())
    units = np.concatenate([Units().of(tile).numpy() for tile in made.tiles()])
    root = np.sqrt(made.state["exp_avg_sq"].numpy().astype(np.float64)) + 1e-8
    typical = np.sqrt((root.reshape(-1, BLOCK) ** 2).mean(1)).repeat(BLOCK)
    np.testing.assert_allclose(units, np.minimum(typical, 5 * root), rtol=1e-5)


def test_units_follow_variance_and_eps() -> None:
    """What is remembered is not used when they have changed."""
    made, units = span_of(BLOCK), Units()
    (tile,) = made.tiles()
    before = units.of(tile)
    made.state["exp_avg_sq"].mul_(4.0)
    torch.testing.assert_close(units.of(tile), 2 * before)
    made.state["exp_avg_sq"] = made.state["exp_avg_sq"] / 4.0
    (tile,) = made.tiles()
    torch.testing.assert_close(units.of(tile), before)
    made.group["eps"] = 1.0
    torch.testing.assert_close(units.of(tile), Units().of(tile))
    assert (units.of(tile) > before).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_all_finite_finds_one_of_many(bad: float, dtype: torch.dtype) -> None:
    """Wherever it is; and no sum of large values is taken for one."""
    values = torch.full((1001,), torch.finfo(dtype).max, dtype=dtype)
    assert all_finite(values)
    assert all_finite(values[:0])
    for place in (0, 500, 1000):
        broken = values.clone()
        broken[place] = bad
        assert not all_finite(broken)
