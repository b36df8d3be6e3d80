"""Trains under DDP with fewer and fewer bits for each gradient, for links that are the bottleneck.

int4 keeps what it rounds away, and adds it to the gradient of the next step.

Command:

    torchrun --standalone --nproc-per-node 2 examples/04_slow_link.py

Expected output:

    none: 32.0 bits a gradient, the loss fell below a half
    bf16: 16.0 bits a gradient, the loss fell below a half
    int8: 8.1 bits a gradient, the loss fell below a half
    int4: 4.2 bits a gradient, the loss fell below a half

If it fails:

- ConfigError that int4 needs the model: give HookState(..., model=model), by whose parameters'
  names it keeps what is rounded away.
- The bits of your model are more: tensors of one dimension or under 32 KiB travel at bf16.
- Which codec your link needs: HookState("auto", model=model) measures it; docs/METHODS.md.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, Options, allreduce_hook

# Over ports, as between hosts: ranks of one host would share memory.
dist.init_process_group("ringcomm", pg_options=Options(shared_memory=False))
torch.manual_seed(dist.get_rank())
target = torch.ones(256, 256) / 16

for codec in ("none", "bf16", "int8", "int4"):
    model = torch.nn.Linear(256, 256, bias=False)
    ddp = DistributedDataParallel(model)
    state = HookState(codec, model=model)
    ddp.register_comm_hook(state, allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(40):
        x = torch.randn(64, 256)
        optimizer.zero_grad()
        loss = mse_loss(ddp(x), x @ target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report = state.report()
    bits = 32 * report.wire_bytes / report.payload_bytes
    fell = "fell below a half" if losses[-1] < losses[0] / 2 else "did not fall"
    if dist.get_rank() == 0:
        print(f"{codec}: {bits:.1f} bits a gradient, the loss {fell}")
dist.destroy_process_group()
