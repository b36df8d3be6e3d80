"""The README's Python, block by block, as it is printed."""

from __future__ import annotations

from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"

#: Of every block a name, and what no other block has in it.
BLOCKS = {
    "numpy": "import numpy as np, ringcomm",
    "backend": '# in place of "gloo", under torchrun',
    "hook": "# DDP asks for one; gradients do not pass it",
    "hierarchical": "import HierarchicalState",
    "lightning": "strategy = DDPStrategy(",
    "on_fit_start": "self.trainer.model",
    "accelerate": "accelerator = Accelerator(",
    "transformers": "TrainingArguments(",
    "feedback": "for gradient in gradients():",
    "methods": "OuterStep(large",
    "gpu": "with ringcomm.cuda.stream(side):",
}


def blocks() -> list[str]:
    """All of them, in order."""
    parts = README.read_text(encoding="utf-8").split("```python\n")[1:]
    return [part.split("```")[0] for part in parts]


def code(name: str) -> str:
    """The block of a name."""
    (found,) = [block for block in blocks() if BLOCKS[name] in block]
    return found
