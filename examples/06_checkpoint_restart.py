"""Starts a job again from its checkpoint after rank 1 has died, as torchrun does by itself.

Command:

    torchrun --standalone --nproc-per-node 2 --max-restarts 1 examples/06_checkpoint_restart.py

Expected output:

    starts at step 0
    starts at step 10
    ends at step 20, which is AdamW's 20

If it fails:

- "starts at step 0" twice: the restart does not find the file. Write it where all hosts see it.
- gather_state_dict() waits or raises MismatchError: all ranks have to call it, not rank 0 alone.
- A warning that residuals start from zero: state_dict() has those of one rank alone.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringcomm.torch import HookState, allreduce_hook

dist.init_process_group("ringcomm")
rank, start = dist.get_rank(), 0
torch.manual_seed(rank)  # each rank has data of its own
file = Path(f"/tmp/ringcomm-{os.environ['TORCHELASTIC_RUN_ID']}.pt")
model = torch.nn.Linear(256, 64, bias=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
hook = HookState("int4", model=model)
if file.exists():
    saved = torch.load(file, weights_only=True)
    start = saved["step"]
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    hook.load_state_dict(saved["hook"])  # the model has its weights by now
ddp = DistributedDataParallel(model)
ddp.register_comm_hook(hook, allreduce_hook)
if rank == 0:
    print(f"starts at step {start}", flush=True)
for step in range(start + 1, 21):
    optimizer.zero_grad()
    ddp(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    if step % 10 == 0:
        saved = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        saved["hook"] = hook.gather_state_dict()  # on all ranks, as each has residuals
        if rank == 0:
            torch.save(saved, file)
    if step == 15 and start == 0 and rank == 1:
        os._exit(1)  # as if its host had failed
if rank == 0:
    print(f"ends at step {step}, which is AdamW's {optimizer.state[model.weight]['step']:.0f}")
    file.unlink()
dist.destroy_process_group()
