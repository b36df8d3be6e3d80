"""The Python of README.md and of pages of docs/, block by block, as it is printed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Names of all blocks, by page; of each what no other block of its page has in it.
BLOCKS = {
    "README.md": {
        "numpy": "import numpy as np, ringcomm",
        "backend": '# in place of "gloo", under torchrun',
        "hook": "# DDP asks for one; gradients do not go through it",
        "methods": "OuterStep(large",
    },
    "docs/COMPRESSION.md": {"feedback": "for gradient in gradients():"},
    "docs/FRAMEWORKS.md": {
        "hierarchical": "import HierarchicalState",
        "lightning": "strategy = DDPStrategy(",
        "on_fit_start": "self.trainer.model",
        "accelerate": "accelerator = Accelerator(",
        "transformers": "TrainingArguments(",
        "jax": "import jax, ringcomm.jax",
    },
    "docs/GPU.md": {"gpu": "with ringcomm.cuda.stream(side):"},
    "docs/CHECKPOINTS.md": {
        "save gathered": '"hook": hook.gather_state_dict(),',
        "load gathered": 'hook.load_state_dict(state["hook"])                 #',
        "save own": "torch.save(own",
        "load own": "own = torch.load(",
        "scaler": "GradScaler(device)",
        "to OneBitAdam": "# AdamW's",
        "to AdamW": "adamw.load_state_dict(state)",
        "trained later": "model.head.requires_grad_(True)",
        "save outer": "with outer.anchor():",
        "load outer": 'outer.load_state_dict(state["outer"])',
    },
    "docs/LOSING_A_RANK.md": {"program": "rejoin=again,"},
}


def blocks(page: str, language: str = "python") -> list[str]:
    """All of a page, in order."""
    parts = (ROOT / page).read_text(encoding="utf-8").split(f"```{language}\n")[1:]
    return [part.split("```")[0] for part in parts]


def code(name: str) -> str:
    """The block of a name."""
    (page,) = [page for page in BLOCKS if name in BLOCKS[page]]
    (found,) = [block for block in blocks(page) if BLOCKS[page][name] in block]
    return found
