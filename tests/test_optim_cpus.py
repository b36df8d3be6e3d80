"""Ranks whose CPUs differ: what torch computes with other instructions on one of them leaves the
parameters alike to the bit."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import numpy as np
import torch
from faults.job import Job, Nursery
from faults.rank import Rank
from torch import nn

import ringcomm
from ringcomm.torch import OuterStep, optim
from ringcomm.torch.outer import Nesterov

pytestmark = pytest.mark.torch

ON_RANK_1 = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
SHAPES = ((64, 257), (30, 40), (50,), ())
STEPS = 8
ADAM: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "threshold": 4096, "freeze": 2}
ZERO: dict[str, Any] = {
    "lr": 0.01,
    "weight_decay": 0.1,
    "threshold": 4096,
    "var_freeze_step": 3,
    "local_step_scaler": 1,
    "local_step_clipper": 2,
}
METHODS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda ps: optim.SGD(ps, 0.1, weight_decay=0.1, threshold=4096),
    "SGD, Nesterov": lambda ps: optim.SGD(ps, 0.1, weight_decay=0.1, nesterov=True, threshold=4096),
    "Lion": lambda ps: optim.Lion(ps, 0.01, weight_decay=0.1, threshold=4096),
    "OneBitAdam": lambda ps: optim.OneBitAdam(ps, **ADAM),
    "OneBitLamb": lambda ps: optim.OneBitLamb(ps, **ADAM),
    "ZeroOneAdam": lambda ps: optim.ZeroOneAdam(ps, **ZERO),
    "Muon": lambda ps: optim.Muon([p for p in ps if p.dim() == 2], 0.01),
}


def parameters() -> nn.ParameterList:
    rng = np.random.default_rng(1)
    return nn.ParameterList(
        torch.tensor(rng.standard_normal(shape), dtype=torch.float32) for shape in SHAPES
    )


def step(params: nn.ParameterList, optimizer: Any, rank: int, number: int) -> None:
    rng = np.random.default_rng([number, rank])
    for parameter in params:
        values = 0.1 + rng.standard_normal(parameter.shape)
        parameter.grad = torch.tensor(values, dtype=torch.float32)
    optimizer.step()


def unlike(params: nn.ParameterList) -> int:
    """Elements that differ between the ranks."""
    flat = torch.cat([one.detach().reshape(-1) for one in params])
    every = ringcomm.allgather(flat.view(torch.int32)).view(2, -1)
    return int((every[0] != every[1]).sum())


def trained(forked: Rank) -> None:
    """On each rank. Reports what differs, by method. PyTorch chooses its instructions by the
    environment when it first computes, which importing it does not."""
    if forked.number == 1:
        os.environ.update(ON_RANK_1)
        assert torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX")
    ringcomm.init()
    rank, found = ringcomm.rank(), {}
    for name, make in METHODS.items():
        params = parameters()
        optimizer = make(params)
        for number in range(STEPS):
            step(params, optimizer, rank, number)
        found[name] = unlike(params)
    params = parameters()
    plain = torch.optim.SGD(params, 0.1)
    with OuterStep(params, plain, every=3, outer=Nesterov(0.7, 0.5), delay=1) as outer:
        for number in range(STEPS):
            step(params, plain, rank, number)
        outer.flush()
        found["OuterStep"] = unlike(params)
    forked.emit("unlike", **found)
    ringcomm.shutdown()


def test_parameters_are_alike_to_the_bit_on_unlike_cpus(torch_nursery: Nursery) -> None:
    methods = [*METHODS, "OuterStep"]
    with Job(torch_nursery, 2, {"RINGCOMM_INTERFACES": "lo"}) as job:
        job.start(trained)
        for found in job.expect_all("unlike"):
            assert {name: found[name] for name in methods} == dict.fromkeys(methods, 0)
        job.finish(quietly=False)
