"""Trains a model in shards, by FSDP2 over the backend ringcomm.

Command:

    torchrun --standalone --nproc-per-node 2 examples/08_fsdp.py

Expected output:

    rank 0 holds (2, 3) of (4, 3)
    learned [[1.0, -2.0, 3.0], [2.0, 1.0, -1.0], [-3.0, 2.0, 1.0], [1.0, 1.0, -2.0]]

If it fails:

- "cannot import name 'fully_shard'": it needs PyTorch 2.6 or newer.
- full_tensor() waits or raises MismatchError: all ranks have to call it, not rank 0 alone.
- ConfigError or TensorError that something is sharded: OuterStep and ringcomm's optimizers need
  the whole model on each rank. Give FSDP an optimizer of torch; to compress what it exchanges,
  call ringcomm.torch.fsdp.compress(model).
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

import ringcomm.torch  # noqa: F401 (registers the backend)

dist.init_process_group("ringcomm")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)  # the same weights on all ranks at first
model = torch.nn.Linear(3, 4, bias=False)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.4)  # made of the shards

torch.manual_seed(dist.get_rank())  # each rank has data of its own
target = torch.tensor([[1.0, -2, 3], [2, 1, -1], [-3, 2, 1], [1, 1, -2]])
for _ in range(100):
    x = torch.randn(16, 3)
    optimizer.zero_grad()
    mse_loss(model(x), x @ target.T).backward()
    optimizer.step()

whole = model.weight.full_tensor()  # a collective
if dist.get_rank() == 0:
    print(f"rank 0 holds {tuple(model.weight.to_local().shape)} of {tuple(whole.shape)}")
    print("learned", [[round(weight, 1) for weight in row] for row in whole.tolist()])
dist.destroy_process_group()
