"""Trains under DDP with gradients that ringcomm's hook averages, 16 bits each.

Command:

    torchrun --standalone --nproc-per-node 2 examples/02_ddp_hook.py

Expected output:

    100 steps by the hook, gradients in bf16
    learned [1.0, -2.0, 3.0]

If it fails:

- "No module named torch": `pip install -e ".[torch]"` in this folder.
- SilenceWarning: the loop trains the bare model. Call the DDP, here `ddp(x)`, in forward.
- "call ringcomm.init() first", with the backend "gloo": do that before init_process_group("gloo"),
  and drop `ddp` before destroy_process_group(), which can hang otherwise.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, allreduce_hook

dist.init_process_group("ringcomm")
torch.manual_seed(dist.get_rank())  # each rank has data of its own
model = torch.nn.Linear(3, 1, bias=False)
ddp = DistributedDataParallel(model)  # gives all ranks the weights of rank 0
state = HookState("bf16", model=model)
ddp.register_comm_hook(state, allreduce_hook)

optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for _ in range(100):
    x = torch.randn(16, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [3.0]])  # the weights to learn
    optimizer.zero_grad()
    mse_loss(ddp(x), y).backward()  # the hook sends gradients as backward computes them
    optimizer.step()

if dist.get_rank() == 0:
    print(f"{state.steps} steps by the hook, gradients in {state.compression}")
    print("learned", [round(weight, 1) for weight in model.weight[0].tolist()])
dist.destroy_process_group()
