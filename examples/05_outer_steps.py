"""Trains two ranks apart, and averages their weights every 10 steps, in 4 bits a weight.

Command:

    torchrun --standalone --nproc-per-node 2 examples/05_outer_steps.py

Expected output:

    100 iterations, 10 rounds
    learned [1.0, -2.0, 3.0], the same on all ranks: True

If it fails:

- ConfigError that the model is wrapped in DistributedDataParallel: leave that out. It would
  exchange the gradients of every step, and OuterStep does without them.
- IdenticalDataWarning: all ranks train on the same batches. Give each its own share.
- The loss ends higher than under DDP: hundreds of rounds are needed; docs/METHODS.md.
"""

import torch
from torch.nn.functional import mse_loss

import ringcomm
from ringcomm.torch import OuterStep

comm = ringcomm.init()
torch.manual_seed(comm.rank)  # each rank has data of its own
model = torch.nn.Linear(3, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # any optimizer

with OuterStep(model, optimizer, every=10, compression="int4") as outer:
    for _ in range(100):
        x = torch.randn(16, 3)
        y = x @ torch.tensor([[1.0], [-2.0], [3.0]])  # the weights to learn
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()  # the tenth of these begins a round
    with outer.anchor():  # evaluate and save here: the weights are the same on all ranks
        every = comm.allgather(model.weight.detach())

if comm.rank == 0:
    learned = [round(weight, 1) for weight in every[0].flatten().tolist()]
    print(f"{outer.iteration} iterations, {outer.rounds} rounds")
    print(f"learned {learned}, the same on all ranks: {torch.equal(every[0], every[1])}")
ringcomm.shutdown()
