"""The command line: one frozen dataclass of settings and the parser that fills it.

Invariants: this file does not import torch, so ``--help`` and a bad argument answer at once.
Settings that need neither the data nor the world size are checked here; the rest by ``run``. Every
refusal is a ConfigError of one sentence that names the fix. No option is the beginning of one of
torchrun's, which would take it for its own (so ``--log-file``, for it has ``--log-dir``).
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal, NoReturn, cast

from ..codecs import Compression, names
from ..codecs import parse as parse_codec
from ..errors import ConfigError

AUTO = "auto"
DDP_METHODS = ("gradients", "stale")
DENSITY = 1 / 20  # share of the elements that the method sparse sends

_DESCRIPTION = """\
Train a model with data parallelism and report where the time of a step goes.

  python -m ringcomm.train                                        one process
  torchrun --nproc-per-node 2 -m ringcomm.train                   two ranks on this host
  mpirun -n 4 -H host1,... -x MASTER_ADDR=host1 -x RINGCOMM_SECRET_FILE=FILE \\
      python -m ringcomm.train                                    four ranks on several
"""

_EPILOG = """\
models   resnet8, resnet20, resnet56 (any depth 6n+2), vit-mini, vit-s, vit-m, gpt-mini, gpt-s,
         gpt-m
         (mini, s and m have about 1, 21 and 25 million parameters)
data     digits                    8x8 scans of digits that come with scikit-learn
         stdlib-text[:MB]          source text of Python's standard library, byte by byte
         folder:PATH               PATH/train/CLASS/*.png and PATH/val/..., or PATH/CLASS/*.png
         synthetic:3x32x32,10      random images of that shape in 10 classes
"""


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one run, explained in the command line's help. Equal on all ranks."""

    model: str = "resnet8"
    data: str = ""
    image_size: int = 32
    batch: int = 64
    accumulate: int = 1
    steps: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    seed: int = 0
    backend: str = "ringcomm"
    hook: bool = True
    method: str = "gradients"
    compression: str | None = None
    every: int = 30
    bucket_mb: float | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 0
    resume: bool = False
    log_file: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            suits = "stdlib-text" if self.model.startswith("gpt") else "digits"
            object.__setattr__(self, "data", suits)
        for is_so, refusal in self._contradictions():
            if is_so:
                raise ConfigError(refusal)
        if self.compression == AUTO:
            return
        codec = parse_codec(self.compression, "--compression ")
        if not self.hook and codec.name != "none":
            if self.backend == "gloo":
                raise ConfigError(
                    f"--compression {codec.name} works with ringcomm only; leave it out, or "
                    "--no-hook, or use --backend ringcomm"
                )
            if codec.needs_feedback:
                raise ConfigError(
                    f"--compression {codec.name} needs error feedback, which only the hook keeps; "
                    "leave out --no-hook, or use another codec"
                )

    def _contradictions(self) -> list[tuple[bool, str]]:
        """Return what may not be, as settings of another method or other data than the chosen
        ones, each with whether it is so and the refusal."""
        return [
            (
                self.checkpoint is None and (self.resume or self.checkpoint_every > 0),
                f"{'--resume' if self.resume else '--checkpoint-every'} needs a place for "
                "checkpoints; add --checkpoint DIR",
            ),
            (
                self.image_size != Options.image_size and not self.data.startswith("folder:"),
                f"--image-size is about images of a folder; leave it out with --data {self.data}",
            ),
            (
                self.method != "gradients" and (self.backend == "gloo" or not self.hook),
                f"--method {self.method} is ringcomm's; leave out --backend gloo and --no-hook",
            ),
            (
                self.every != Options.every and self.method != "outer",
                "--every is about outer steps; add --method outer, or leave it out",
            ),
            (
                self.bucket_mb is not None and self.method not in DDP_METHODS,
                "--bucket-mb is about DDP's exchange of gradients; add --method gradients, or "
                "leave it out",
            ),
            (
                self.method == "sparse" and bool(self.compression),
                "--compression does not go with --method sparse, which sends the largest elements "
                "only; leave it out",
            ),
            (
                self.method == "sparse" and self.optimizer not in {None, "sgd", "adamw"},
                "--method sparse goes with --optimizer sgd or adamw (as Adam)",
            ),
            (
                self.method != "momentum" and self.optimizer in {"lion", "lamb", "zero-one-adam"},
                f"--optimizer {self.optimizer} sends its momentum; add --method momentum "
                "(--compression none loses nothing)",
            ),
            (
                self.method == "momentum" and self.optimizer == "muon",
                "--optimizer muon has no form that sends its momentum; use --method outer or "
                "gradients",
            ),
            (
                self.compression == AUTO and (self.method != "gradients" or not self.hook),
                "--compression auto is for --method gradients by ringcomm's hook; leave out "
                + ("--no-hook" if self.method == "gradients" else f"--method {self.method}"),
            ),
        ]

    @property
    def codec(self) -> Compression | Literal["auto"]:
        """Codec of the exchanged data, or "auto"; the method's default unless chosen. Without
        meaning for the method sparse."""
        alone = self.backend == "gloo" and not self.hook
        suits = {"momentum": "onebit", "outer": "int4"}.get(self.method, "bf16")
        chosen = self.compression or ("none" if alone else suits)
        return cast("Compression | Literal['auto']", chosen)  # checked above

    @property
    def sent(self) -> str:
        """Codec, or density, of the exchanged data, for the report."""
        return f"density {DENSITY:g}" if self.method == "sparse" else self.codec


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line (``sys.argv`` for None). Raises ConfigError; --help exits."""
    return Options(**vars(_parser().parse_args(arguments)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see python -m ringcomm.train --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m ringcomm.train",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )

    group = parser.add_argument_group("model and data")
    group.add_argument("--model", metavar="NAME", help="network, see below (default: resnet8)")
    group.add_argument(
        "--data",
        type=_text,
        metavar="SOURCE",
        help="see below (default: digits, or stdlib-text for a gpt)",
    )
    group.add_argument(
        "--image-size",
        type=_number(int, 4, 4096),
        metavar="PIXELS",
        help="side to which images of a folder are resized (default: 32)",
    )

    group = parser.add_argument_group("training")
    group.add_argument(
        "--batch",
        type=_number(int, 1),
        metavar="N",
        help="GLOBAL batch: samples per step over all ranks (default: 64)",
    )
    group.add_argument(
        "--accumulate",
        type=_number(int, 1),
        metavar="K",
        help="micro-batches per step on each rank; gradients are exchanged after "
        "the last one only (default: 1)",
    )
    group.add_argument(
        "--steps",
        type=_number(int, 1),
        metavar="N",
        help="length of the run (default: digits 15 epochs, a folder 10, else 1)",
    )
    group.add_argument(
        "--optimizer",
        choices=("sgd", "adamw", "muon", "lion", "lamb", "zero-one-adam"),
        help="default: sgd for ResNet, adamw for ViT and GPT; muon is for these two, "
        "and the last three come with --method momentum only",
    )
    group.add_argument(
        "--lr",
        type=_number(float, 0),
        metavar="RATE",
        help="peak learning rate (default: sgd 0.1, adamw 0.001, "
        "muon 0.02, lion 0.0002, lamb 0.005, zero-one-adam 0.001)",
    )
    group.add_argument("--seed", type=_number(int, 0, 2**31 - 1), metavar="N", help="default: 0")

    group = parser.add_argument_group("communication")
    group.add_argument(
        "--backend",
        choices=("ringcomm", "gloo"),
        help="torch.distributed's process group (default: ringcomm)",
    )
    group.add_argument(
        "--no-hook",
        dest="hook",
        action="store_false",
        help="gradients go by DDP's own all-reduce over the backend, not by "
        "ringcomm's hook, which works over either",
    )
    group.add_argument(
        "--method",
        choices=("gradients", "stale", "momentum", "outer", "sparse"),
        help="what travels: gradients, in every step; the same one step late, while "
        "the next step computes; the optimizer's momentum, at 1 bit (1-bit Adam for "
        "adamw); every so many steps how far the weights have come; or the largest "
        "blocks of gradients, with a sparse optimizer on the CPU (default: "
        "gradients)",
    )
    group.add_argument(
        "--compression",
        metavar="CODEC",
        help=f"codec on the wire: {names()}; auto: of none, bf16 and int8 the "
        "gentlest that hides, as it is measured, with gradients only (default: bf16; "
        "momentum onebit; outer int4; with --backend gloo --no-hook none; not with sparse)",
    )
    group.add_argument(
        "--every",
        type=_number(int, 1),
        metavar="STEPS",
        help="steps between two outer steps (default: 30)",
    )
    group.add_argument(
        "--bucket-mb",
        type=_number(float, 0.001, 4096),
        metavar="MB",
        help="size of DDP's buckets (default: DDP's own, 1 MiB and then 25 MiB; "
        "gradients and stale)",
    )

    group = parser.add_argument_group("checkpoints and log")
    group.add_argument(
        "--checkpoint",
        type=_text,
        metavar="DIR",
        help="keep DIR/checkpoint.pt, written by rank 0 at the end of the run",
    )
    group.add_argument(
        "--checkpoint-every", type=_number(int, 1), metavar="N", help="and after every N steps"
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="go on from DIR/checkpoint.pt; from the start where there is none",
    )
    group.add_argument(
        "--log-file", metavar="FILE", help="append JSON lines: one object per step, then the report"
    )
    return parser


def _text(text: str) -> str:
    """Return a text that is not empty: an empty one would count as not given."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty; give a value, or leave it out")
    return text


def _number(
    kind: type[int | float], low: float, high: float | None = None
) -> Callable[[str], float]:
    """Return a reader of numbers of a kind, within bounds."""

    def read(text: str) -> float:
        value = kind(text)
        if not (low <= value < math.inf and (high is None or value <= high)):
            bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"{value} does not fit, give a value {bounds}")
        return value

    read.__name__ = "whole number" if kind is int else "number"
    return read
