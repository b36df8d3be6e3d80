"""The command line: one frozen dataclass of settings and the parser that fills it.

Invariants: this file does not import torch, so ``--help`` and a bad argument answer at once. What
can be judged without the data and the world size is judged here; the rest by ``loop``. Every
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
    """Settings of one run; the command line's help says what each one means. Equal on all ranks."""

    model: str = "resnet8"
    width: int = 16
    dropout: float = 0.0
    data: str = ""
    image_size: int = 32
    context: int = 128
    batch: int = 64
    accumulate: int = 1
    epochs: int | None = None
    steps: int | None = None
    optimizer: str | None = None
    lr: float | None = None
    momentum: float = 0.9
    weight_decay: float | None = None
    warmup: float = 0.1
    precision: str = "fp32"
    seed: int = 0
    threads: int | None = None
    backend: str = "ringcomm"
    hook: bool = True
    method: str = "gradients"
    compression: str | None = None
    density: float = 1 / 64
    every: int | str = 30
    outer: str | None = None
    fragments: int = 1
    delay: int = 0
    dense_steps: int = 0
    force: bool = False
    bucket_mb: float | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 0
    resume: bool = False
    log_file: str | None = None
    log_every: int = 10
    eval_every: int = 1

    def __post_init__(self) -> None:
        if not self.data:
            suits = "stdlib-text" if self.model.startswith("gpt") else "digits"
            object.__setattr__(self, "data", suits)
        if self.epochs is not None and self.steps is not None:
            raise ConfigError("--epochs and --steps both set the length of the run; give one")
        if self.checkpoint is None and (self.checkpoint_every or self.resume):
            flag = "--resume" if self.resume else "--checkpoint-every"
            raise ConfigError(f"{flag} needs a place for checkpoints; add --checkpoint DIR")
        if self.dense_steps and not self.hook:
            raise ConfigError("--dense-steps is about ringcomm's hook; use --hook")
        self._require_task()
        self._require_method()
        if self.compression == AUTO:
            if not self.hook or self.method != "gradients":
                raise ConfigError("--compression auto is for --method gradients by ringcomm's "
                                  "hook; use --hook")  # fmt: skip
            return
        codec = parse_codec(self.compression, "--compression ")
        if not self.hook and codec.name != "none":
            if self.backend == "gloo":
                raise ConfigError(
                    f"--compression {codec.name} works with ringcomm only; leave it out, or use "
                    "--hook or --backend ringcomm"
                )
            if codec.needs_feedback:
                raise ConfigError(
                    f"--compression {codec.name} needs error feedback, which only the hook keeps; "
                    "use --hook, or another codec"
                )

    def _require_task(self) -> None:
        """Raises ConfigError for settings of other models or data than those chosen."""
        is_resnet = self.model.startswith("resnet")
        about = {"width": (is_resnet, "ResNets"), "dropout": (not is_resnet, "ViT and GPT"),
                 "image_size": (self.data.startswith("folder:"), "images of a folder"),
                 "context": (self.data.startswith("stdlib-text"), "text")}  # fmt: skip
        for name, (is_used, what) in about.items():
            if not is_used and getattr(self, name) != getattr(Options, name):
                raise ConfigError(f"--{name.replace('_', '-')} is about {what}; leave it out with "
                                  f"--model {self.model} and --data {self.data}")  # fmt: skip

    def _require_method(self) -> None:
        """Raises ConfigError for settings of other methods than the one chosen."""
        if self.method != "gradients" and (self.backend == "gloo" or not self.hook):
            raise ConfigError(f"--method {self.method} is ringcomm's; leave out --backend gloo and "
                              "--no-hook")  # fmt: skip
        about = {"every": ("outer",), "outer": ("outer",), "fragments": ("outer",),
                 "delay": ("outer", "sparse"), "dense_steps": DDP_METHODS,
                 "bucket_mb": DDP_METHODS}  # fmt: skip
        for name, methods in about.items():
            value = getattr(self, name)
            if self.method not in methods and value and value != getattr(Options, name):
                what = "outer steps" if "outer" in methods else "DDP's exchange of gradients"
                raise ConfigError(f"--{name.replace('_', '-')} is about {what}; add --method "
                                  f"{methods[0]}, or leave it out")  # fmt: skip
        if self.density != Options.density and not self.sends_largest:
            raise ConfigError("--density is about what sends the largest elements only; add "
                              "--method sparse or --outer sparse, or leave it out")  # fmt: skip
        if self.compression and self.sends_largest:
            way = "--outer sparse" if self.outer else "--method sparse"
            raise ConfigError(f"--compression does not go with {way}, which sends the largest "
                              "elements only; leave it out, and give --density to send more or "
                              "fewer")  # fmt: skip
        if self.method == "sparse" and (self.delay > 1 or self.optimizer not in {
            None, "sgd", "adamw"
        }):  # fmt: skip
            raise ConfigError("--method sparse goes with --optimizer sgd or adamw (as Adam), and "
                              "--delay 0 or 1")  # fmt: skip
        own = {"lion", "lamb", "zero-one-adam"}
        if self.optimizer in own and self.method != "momentum":
            raise ConfigError(f"--optimizer {self.optimizer} sends its momentum; add --method "
                              "momentum (--compression none loses nothing)")  # fmt: skip
        if self.optimizer == "muon" and self.method == "momentum":
            raise ConfigError("--optimizer muon has no form that sends its momentum; use --method "
                              "outer or gradients")  # fmt: skip

    @property
    def sends_largest(self) -> bool:
        """Whether the largest elements travel, as many as the density says, and by no codec."""
        return "sparse" in (self.method, self.outer)

    @property
    def codec(self) -> Compression | Literal["auto"]:
        """The codec of what travels, or "auto": as suits the method unless chosen. It says nothing
        of what sends the largest elements."""
        alone = self.backend == "gloo" and not self.hook
        suits = {"momentum": "onebit", "outer": "int4"}.get(self.method, "bf16")
        chosen = self.compression or ("none" if alone else suits)
        return cast("Compression | Literal['auto']", chosen)  # checked above

    @property
    def sent(self) -> str:
        """What the report says of what travels: the codec, or the density."""
        return f"density {self.density:g}" if self.sends_largest else self.codec


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Options from the command line (``sys.argv`` for None). Raises ConfigError; --help exits."""
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
    _add_task(parser)
    _add_training(parser)
    _add_communication(parser)
    _add_files(parser)
    return parser


def _add_task(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and data")
    group.add_argument("--model", metavar="NAME", help="network, see below (default: resnet8)")
    group.add_argument("--width", type=_whole(1, 4096), metavar="N",
                       help="channels of a ResNet's first stage (default: 16)")
    group.add_argument("--dropout", type=_number(0, 0.95), metavar="P",
                       help="dropout of ViT and GPT (default: 0)")
    group.add_argument("--data", metavar="SOURCE",
                       help="see below (default: digits, or stdlib-text for a gpt)")
    group.add_argument("--image-size", type=_whole(4, 4096), metavar="PIXELS",
                       help="side to which images of a folder are resized (default: 32)")
    group.add_argument("--context", type=_whole(2, 65536), metavar="BYTES",
                       help="length of a text sample (default: 128)")


def _add_training(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    group.add_argument("--batch", type=_whole(1), metavar="N",
                       help="GLOBAL batch: samples per step over all ranks (default: 64)")
    group.add_argument("--accumulate", type=_whole(1), metavar="K",
                       help="micro-batches per step on each rank; gradients are exchanged after "
                       "the last one only (default: 1)")
    group.add_argument("--epochs", type=_whole(1), metavar="N",
                       help="passes over the data (default: digits 15, folder 10, else 1)")
    group.add_argument("--steps", type=_whole(1), metavar="N",
                       help="length of the run in steps, instead of --epochs")
    group.add_argument("--optimizer",
                       choices=("sgd", "adamw", "muon", "lion", "lamb", "zero-one-adam"),
                       help="default: sgd for ResNet, adamw for ViT and GPT; the last three come "
                       "with --method momentum only")
    group.add_argument("--lr", type=_number(0), metavar="RATE",
                       help="peak learning rate (default: sgd 0.1, adamw 0.001, "
                       "muon 0.02, lion 0.0002, lamb 0.005, zero-one-adam 0.001)")
    group.add_argument("--momentum", type=_number(0, 0.9999), metavar="M",
                       help="momentum of sgd (default: 0.9)")
    group.add_argument("--weight-decay", type=_number(0), metavar="D",
                       help="of matrices and filters (default: sgd 0.0005, lion 0.1, "
                       "others 0.05)")
    group.add_argument("--warmup", type=_number(0, 1), metavar="FRACTION",
                       help="part of the run in which the rate rises; a cosine follows "
                       "(default: 0.1)")
    group.add_argument("--precision", choices=("fp32", "bf16"),
                       help="of forward and backward; bf16 is autocast, quick only on processors "
                       "with bf16 instructions (default: fp32)")
    group.add_argument("--seed", type=_whole(0, 2**31 - 1), metavar="N", help="default: 0")
    group.add_argument("--threads", type=_whole(1, 1024), metavar="N",
                       help="PyTorch's threads per rank (default: cores / ranks on this host)")


def _add_communication(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("communication")
    group.add_argument("--backend", choices=("ringcomm", "gloo"),
                       help="torch.distributed's process group (default: ringcomm)")
    group.add_argument("--hook", action=argparse.BooleanOptionalAction,
                       help="gradients go by ringcomm's DDP hook, over either backend; without, "
                       "by DDP's own all-reduce over the backend (default: --hook)")
    group.add_argument("--method", choices=("gradients", "stale", "momentum", "outer", "sparse"),
                       help="what travels: gradients, in every step; the same one step late, while "
                       "the next step computes; the optimizer's momentum, at 1 bit (1-bit Adam for "
                       "adamw); every so many steps how far the weights have come; or the largest "
                       "blocks of gradients, with a sparse optimizer on the CPU (default: "
                       "gradients)")
    group.add_argument("--compression", metavar="CODEC",
                       help=f"codec on the wire: {names()}; auto: of none, bf16 and int8 the "
                       "gentlest that hides, as it is measured (default: bf16; momentum onebit; "
                       "outer int4; with --backend gloo --no-hook none; sparse and --outer sparse "
                       "have a density instead)")
    group.add_argument("--density", type=_number(1e-6, 1), metavar="SHARE",
                       help="share of the elements that --method sparse and --outer sparse send, "
                       "the largest (default: 0.015625)")
    group.add_argument("--every", type=_period, metavar="STEPS",
                       help="steps between two outer steps; end: one, at the end; auto: as few as "
                       "the link allows; speed:STEPS: so "
                       "many of the fastest rank, and of others what they make in that time "
                       "(default: 30)")
    group.add_argument("--outer", choices=("mean", "sgd", "nesterov", "sparse"),
                       help="how weights follow the mean of all ranks (default: nesterov)")
    group.add_argument("--fragments", type=_whole(1), metavar="P",
                       help="parts of the model that take outer steps at staggered times "
                       "(default: 1)")
    group.add_argument("--delay", type=_whole(0), metavar="STEPS",
                       help="steps that go on while an outer step's part travels; with --method "
                       "sparse 1: the next step goes on with the weights before (default: 0)")
    group.add_argument("--dense-steps", type=_whole(0), metavar="N",
                       help="first steps in which codecs of few bits give way to bf16 "
                       "(default: 0; gradients and stale)")
    group.add_argument("--force", action="store_true",
                       help="onebit even with adamw, which learns little from it")
    group.add_argument("--bucket-mb", type=_number(0.001, 4096), metavar="MB",
                       help="size of DDP's buckets (default: DDP's own, 1 MiB and then 25 MiB; "
                       "gradients and stale)")


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints and log")
    group.add_argument("--checkpoint", metavar="DIR",
                       help="keep DIR/checkpoint.pt, written by rank 0 at the end of the run")
    group.add_argument("--checkpoint-every", type=_whole(1), metavar="N",
                       help="and after every N steps")
    group.add_argument("--resume", action="store_true",
                       help="go on from DIR/checkpoint.pt; from the start where there is none")
    group.add_argument("--log-file", metavar="FILE",
                       help="append JSON lines: one object per step, then the report")
    group.add_argument("--log-every", type=_whole(1), metavar="N",
                       help="show and log after every N steps (default: 10)")
    group.add_argument("--eval-every", type=_whole(0), metavar="N",
                       help="held-out evaluation after every N epochs; 0: at the end only "
                       "(default: 1)")


def _whole(low: int, high: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        value = int(text)
        _check(value, low, high)
        return value

    read.__name__ = "whole number"
    return read


def _period(text: str) -> int | str:
    if text in ("end", "auto") or (text.startswith("speed:") and text[6:].isdecimal()):
        return text
    if not text.isdecimal() or text == "0":
        raise argparse.ArgumentTypeError(
            f"give a whole number, end, auto or speed:STEPS, not {text!r}"
        )
    return int(text)


def _number(low: float, high: float | None = None) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = float(text)
        _check(value, low, high)
        return value

    read.__name__ = "number"
    return read


def _check(value: float, low: float, high: float | None) -> None:
    if not (low <= value < math.inf and (high is None or value <= high)):
        bounds = f"of {low} or more" if high is None else f"from {low} to {high}"
        raise argparse.ArgumentTypeError(f"{value} does not fit, give a value {bounds}")
