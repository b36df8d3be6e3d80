"""What the reference trainer refuses: in one sentence that names the fix, and before it trains."""

from __future__ import annotations

import subprocess
import sys

import pytest
from patience import PATIENCE

torch = pytest.importorskip("torch")

from ringcomm.errors import ConfigError  # noqa: E402
from ringcomm.train.__main__ import main  # noqa: E402
from ringcomm.train.command_line import _parser  # noqa: E402
from ringcomm.train.data import ImageTensors, TextWindows, stratified_split  # noqa: E402
from ringcomm.train.distributed import World  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        ("--model alexnet", "give resnet8"),
        ("--model resnet9", "6n+2"),
        ("--model gpt-mini --data digits", "--data stdlib-text"),
        ("--data stdlib-text", "--data digits"),
        ("--data imagenet", "give digits"),
        ("--data stdlib-text:much --model gpt-mini", "give megabytes"),
        ("--data folder:/no/such/place", "give the path"),
        ("--data synthetic:3x32,10", "as in synthetic:3x32x32,10"),
        ("--data synthetic:3x9999x9999,100", "GB of memory, for ten images of each class"),
        ("--data synthetic:3x10x10,4 --model vit-mini --batch 0", "1 or more"),
        ("--data synthetic:3x9x9,4 --model vit-mini", "multiples of 2"),
        ("--batch 63 --accumulate 2", "multiple of 2 (62, 64)"),
        ("--batch 2000", "smaller"),
        ("--lr nan", "0 or more"),
        ("--steps x", "whole number"),
        ("--resume", "--checkpoint DIR"),
        ("--checkpoint-every 2", "--checkpoint DIR"),
        ("--checkpoint=", "argument --checkpoint: it is empty; give a value, or leave it out"),
        ("--data=", "--data: it is empty"),
        ("--compression=", "give one of none"),
        ("--log-file=", "cannot be written"),
        ("--model=", "give resnet8"),
        ("--checkpoint /dev/null/x", "cannot be used"),
        ("--log-file /dev/null/x", "cannot be written"),
        ("--backend gloo --no-hook --compression bf16", "--backend ringcomm"),
        ("--no-hook --compression onebit", "leave out --no-hook"),
        ("--no-hook --compression auto", "leave out --no-hook"),
        ("--compression int3", "give one of none, bf16, fp16, int8"),
        ("--compression onebit --optimizer adamw", "or int4, or --optimizer sgd"),
        ("--compression onebit-deepspeed", "has been removed"),
        ("--compression topk:0.01", "ringcomm.torch.sparse and OuterStep(outer='sparse')"),
        ("--every 5", "add --method outer"),
        ("--method outer --bucket-mb 2", "--method gradients, or leave it out"),
        ("--image-size 8", "--image-size is about images of a folder"),
        ("--method sparse --compression int8", "largest elements only; leave it out"),
        ("--method outer --backend gloo", "leave out --backend gloo"),
        ("--method outer --every never", "whole number"),
        ("--method outer --every 0", "1 or more"),
        ("--image-size 100000 --data folder:.", "from 4 to 4096"),
        ("--epochs 2", "unrecognized arguments: --epochs 2"),
        ("--optimizer lion", "--method momentum"),
        ("--method momentum --optimizer muon", "--method outer or gradients"),
        ("--optimizer muon", "hidden matrices"),
        ("--comp bf16", "--help"),
    ],
)
def test_refusals_are_one_sentence_that_names_the_fix(
    arguments: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ringcomm.train: ")
    assert said.err.count("\n") == 1
    assert fix in said.err


@pytest.mark.parametrize(
    ("module", "arguments", "fix"),
    [
        ("sklearn.datasets", "", "pip install scikit-learn"),
        ("PIL", "--data folder:.", "pip install pillow"),
        ("torch", "", "pip install 'ringcomm[torch]'"),
    ],
)
def test_a_missing_library_is_named(
    module: str,
    arguments: str,
    fix: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert main(arguments.split()) == 2
    assert fix in capsys.readouterr().err


def test_help_and_bad_arguments_do_without_pytorch() -> None:
    code = (
        "import runpy, sys; sys.modules['torch'] = None\n"
        "from ringcomm.train.__main__ import main\n"
        "assert main(['--batch', '0']) == 2\n"
        "sys.argv[1:] = ['--help']\n"
        "runpy.run_module('ringcomm.train', run_name='__main__')"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "stdlib-text" in done.stdout
    assert "give a value of 1 or more" in done.stderr


def test_no_option_is_the_beginning_of_one_of_torchruns() -> None:
    from torch.distributed.run import get_args_parser

    theirs = [name for action in get_args_parser()._actions for name in action.option_strings]
    ours = [name for action in _parser()._actions for name in action.option_strings]
    assert [name for name in ours if any(other.startswith(name) for other in theirs)] == [
        "-h",
        "--help",
    ]


def test_ranks_that_fail_alone_fail_together() -> None:
    """In a world of one: an error passes through as it is."""
    with pytest.raises(ConfigError, match="as it is"):
        World().agree(lambda: (_ for _ in ()).throw(ConfigError("as it is")))


def test_data_too_small_is_refused() -> None:
    with pytest.raises(ConfigError, match="too few"):
        stratified_split(torch.tensor([0, 1]))
    with pytest.raises(ConfigError, match="more text"):
        TextWindows(b"short", 128)
    images = torch.randn(20, 1, 4, 4)
    data = ImageTensors(images, torch.arange(20) % 2, classes=2, epochs=1)
    assert data.sizes == {"train": 16, "held_out": 4}
