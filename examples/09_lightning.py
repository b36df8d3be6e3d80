"""Trains by Lightning's Trainer on the backend ringcomm, with the gradient hook in bf16.

Command:

    torchrun --standalone --nproc-per-node 2 examples/09_lightning.py

Expected output:

    backend ringcomm
    100 steps by the hook, gradients in bf16
    learned [1.0, -2.0, 3.0]

If it fails:

- "No module named pytorch_lightning": `pip install -e ".[frameworks]"` in this folder.
- 0 steps by the hook: on a CPU DDPStrategy(ddp_comm_hook=...) does nothing; use on_fit_start.
- ValueError about devices=: it has to be the number that torchrun has as --nproc-per-node.
"""

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from ringcomm.torch import HookState, allreduce_hook

state = HookState("bf16")


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 1, bias=False)

    def on_fit_start(self) -> None:
        self.trainer.model.register_comm_hook(state, allreduce_hook)  # the model is in DDP here

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return mse_loss(self.inner(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)  # the same data on all ranks, of which Lightning gives each its share
x = torch.randn(640, 3)
loader = DataLoader(TensorDataset(x, x @ torch.tensor([[1.0], [-2.0], [3.0]])), batch_size=16)
parts = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
quiet = dict.fromkeys(parts, False)
strategy = DDPStrategy(process_group_backend="ringcomm")
trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=5, **quiet)
module = Module()
trainer.fit(module, loader)
if trainer.is_global_zero:
    print("backend", dist.get_backend())
    print(f"{state.steps} steps by the hook, gradients in {state.compression}")
    print("learned", [round(weight, 1) for weight in module.inner.weight[0].tolist()])
dist.destroy_process_group()
