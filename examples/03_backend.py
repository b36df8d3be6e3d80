"""Uses ringcomm as the backend of torch.distributed: collectives, objects, and DDP without a hook.

Command:

    torchrun --standalone --nproc-per-node 2 examples/03_backend.py

Expected output:

    backend ringcomm
    sum [3.0, 3.0]
    objects ['of rank 0', 'of rank 1']
    mean of the gradients 1.5

If it fails:

- "Unknown c10d backend type RINGCOMM": import ringcomm.torch first, which registers it.
- "RANK expected, but not set" under mpirun or srun: add init_method="ringcomm://".
- MismatchError: the ranks called different collectives, which its text names. Every rank has to
  call all of them in the same order, not rank 0 alone.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcomm.torch

options = ringcomm.torch.Options(compression="bf16")  # of sums and averages of float32
dist.init_process_group("ringcomm", pg_options=options)
rank = dist.get_rank()

x = torch.full((2,), rank + 1.0)
dist.all_reduce(x)

objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, f"of rank {rank}")

ddp = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
ddp(torch.tensor([[rank + 1.0]])).sum().backward()  # the gradient is the input: 1 and 2

if rank == 0:
    print("backend", dist.get_backend())
    print("sum", x.tolist())
    print("objects", objects)
    print("mean of the gradients", ddp.module.weight.grad.item())
dist.destroy_process_group()
