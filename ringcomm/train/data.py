"""Sources of samples: digits, the standard library's text, an image folder, synthetic images.

A Data holds a training set and a held-out set, both addressed by sample number, so that a rank's
share is a list of numbers (``sampling``).

Invariants: the same source gives the same samples under the same numbers in every process; the
two sets share no sample; nothing is downloaded. ``fingerprint`` differs where the content differs:
ranks on several hosts compare it before they train.
"""

from __future__ import annotations

import math
import os
import sysconfig
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from .command_line import Options

Part = Literal["train", "held_out"]

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
_READERS = 4
_HELD_OUT = 0.2
_TEXT_HELD_OUT = 0.05
_TEXT_DEFAULT_MB = 4.0
_CONTEXT = 128
_SYNTHETIC_BYTES = 256_000_000
_SYNTHETIC_MOST_BYTES = 4_000_000_000


class Data(ABC):
    """Samples of one kind.

    Attributes:
        kind: "image" (float32 [C, H, W], one class each) or "text" (int64 [T], next byte each).
        shape: shape of one input: (C, H, W) or (T,).
        classes: number of classes, or of different bytes.
        sizes: number of samples of each part.
        epochs: length of a run that suits this data.
        on_disk: True if ``batch`` reads files, so that it pays to fetch ahead.
        fingerprint: crc32 over the content.
    """

    kind: Literal["image", "text"] = "image"
    shape: tuple[int, ...]
    classes: int
    sizes: dict[Part, int]
    epochs: int = 1
    on_disk: bool = False
    fingerprint: int

    @abstractmethod
    def batch(self, part: Part, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [n, *shape] and targets (int64 [n], or [n, T] for text) of n samples."""


def load(options: Options) -> Data:
    """Load the data that ``--data`` names.

    Raises ConfigError for an unknown source, a missing library or path, a file that cannot be read,
    or a set too small to split.
    """
    source, _, argument = options.data.partition(":")
    try:
        if source == "digits" and not argument:
            return _digits()
        if source == "stdlib-text":
            return TextWindows(_stdlib_text(argument), _CONTEXT)
        if source == "folder" and argument:
            return ImageFolder(Path(argument), options.image_size)
        if source == "synthetic" and argument:
            return _synthetic(argument)
    except OSError as error:
        raise ConfigError(f"--data {options.data} cannot be read: {error}") from None
    raise ConfigError(
        f"--data {options.data} is unknown; give digits, stdlib-text, folder:PATH or "
        "synthetic:3x32x32,10"
    )


class ImageTensors(Data):
    """Images held in memory, normalised by the training set's mean and deviation."""

    def __init__(self, images: Tensor, labels: Tensor, *, classes: int, epochs: int) -> None:
        """Split float32 images [n, C, H, W] with int64 labels [n], the same share of each class."""
        train, held_out = stratified_split(labels)
        mean, deviation = images[train].mean(), images[train].std()
        images = (images - mean) / deviation
        self._images: dict[Part, Tensor] = {"train": images[train], "held_out": images[held_out]}
        self._labels: dict[Part, Tensor] = {"train": labels[train], "held_out": labels[held_out]}
        self.shape = tuple(images.shape[1:])
        self.classes = classes
        self.sizes = {"train": len(train), "held_out": len(held_out)}
        self.epochs = epochs
        self.fingerprint = zlib.crc32(images.numpy().tobytes() + labels.numpy().tobytes())

    def batch(self, part: Part, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return self._images[part][numbers], self._labels[part][numbers]


class ImageFolder(Data):
    """RGB images from a folder with one sub-folder per class, resized to a square and scaled to
    [-1, 1]. Pillow reads them when they are needed.

    Two layouts: PATH/train/CLASS/* with PATH/val/CLASS/*, or PATH/CLASS/* of which a fixed 20 % of
    each class is held out. Classes are numbered in the order of their names.

    Invariants: files are listed in one sorted order on every rank; a file that cannot be read is an
    error that names it, never a sample left out.
    """

    epochs = 10
    on_disk = True

    def __init__(self, root: Path, side: int) -> None:
        """List the files below ``root``. ConfigError: no Pillow, no such folder, no images."""
        try:
            import PIL  # noqa: F401
        except ImportError:
            raise ConfigError(
                "--data folder: reads images with Pillow, which is missing; pip install pillow"
            ) from None
        if not root.is_dir():
            raise ConfigError(f"--data folder:{root} is no folder; give the path of one")
        split = (root / "train").is_dir() and (root / "val").is_dir()
        names = _class_names(root / "train" if split else root)
        if split:
            train = _list_images(root / "train", names)
            held_out = _list_images(root / "val", names)
        else:
            files = _list_images(root, names)
            labels = torch.tensor([label for _, label in files])
            train, held_out = ([files[i] for i in part] for part in stratified_split(labels))
        self._files: dict[Part, list[tuple[Path, int]]] = {"train": train, "held_out": held_out}
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="images")
        self._side = side
        self.shape = (3, side, side)
        self.classes = len(names)
        self.sizes = {"train": len(train), "held_out": len(held_out)}
        self.fingerprint = _fingerprint(root, train + held_out)

    def batch(self, part: Part, numbers: Tensor) -> tuple[Tensor, Tensor]:
        chosen = [self._files[part][number] for number in numbers.tolist()]
        images = self._readers.map(self._read, [path for path, _ in chosen])
        return torch.stack(list(images)), torch.tensor([label for _, label in chosen])

    def _read(self, path: Path) -> Tensor:
        from PIL import Image

        try:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((self._side, self._side))
        except Exception as error:  # Pillow's readers raise SyntaxError, ValueError and others
            raise ConfigError(f"{path} cannot be read as an image ({error}); remove it") from None
        pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
        return pixels.reshape(self._side, self._side, 3).permute(2, 0, 1).float() / 127.5 - 1


class TextWindows(Data):
    """Text cut into windows of T bytes; the target at each place is the byte that follows."""

    kind = "text"
    classes = 256

    def __init__(self, text: bytes, context: int) -> None:
        """Hold out the end of the text (5 %); ConfigError if that is no whole window."""
        tail = int(len(text) * _TEXT_HELD_OUT)
        if tail <= context:
            raise ConfigError(
                f"5 % of {len(text)} bytes of text do not fill a window of {context} bytes; give "
                "more text"
            )
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._text: dict[Part, Tensor] = {"train": whole[:-tail], "held_out": whole[-tail:]}
        self.shape = (context,)
        self.sizes = {part: (len(text) - 1) // context for part, text in self._text.items()}
        self.fingerprint = zlib.crc32(text)

    def batch(self, part: Part, numbers: Tensor) -> tuple[Tensor, Tensor]:
        places = numbers[:, None] * self.shape[0] + torch.arange(self.shape[0] + 1)
        window = self._text[part][places].long()
        return window[:, :-1], window[:, 1:]


def stratified_split(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Split sample numbers into (train, held out): 20 % of each class, always the same ones.

    Args:
        labels: int64 [n]. A class of one sample stays in the training set.

    Raises:
        ConfigError: nothing can be held out.
    """
    generator = torch.Generator().manual_seed(0)
    train, held_out = [], []
    for label in range(int(labels.max()) + 1):
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        cut = round(len(members) * _HELD_OUT)
        held_out.append(members[:cut])
        train.append(members[cut:])
    if not sum(map(len, held_out)):
        raise ConfigError(f"{len(labels)} samples are too few to hold any out; give more data")
    return torch.cat(train).sort().values, torch.cat(held_out).sort().values


def _class_names(root: Path) -> list[str]:
    names = sorted(_folders(root))
    if len(names) < 2:
        raise ConfigError(
            f"{root} holds {len(names)} class folders; put the images of each class into a folder "
            "of its own, two or more"
        )
    return names


def _folders(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if path.is_dir() and path.name[0] != "."}


def _list_images(root: Path, names: list[str]) -> list[tuple[Path, int]]:
    unknown = _folders(root) - set(names)
    if unknown:
        raise ConfigError(f"{root} holds class {min(unknown)}, which the training set has not")
    files = [
        (path, label)
        for label, name in enumerate(names)
        for path in sorted((root / name).glob("*"))
        if path.suffix.lower() in _SUFFIXES
    ]
    if not files:
        raise ConfigError(f"{root} holds no images; {', '.join(sorted(_SUFFIXES))} are read")
    return files


def _fingerprint(root: Path, files: list[tuple[Path, int]]) -> int:
    """Compute a crc32 of names and sizes; contents would take a whole pass over the disk."""
    lines = [f"{path.relative_to(root)} {path.stat().st_size} {label}\n" for path, label in files]
    return zlib.crc32("".join(lines).encode())


def _digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "--data digits needs scikit-learn, which brings the images; pip install scikit-learn"
        ) from None
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    return ImageTensors(pixels, torch.tensor(labels, dtype=torch.int64), classes=10, epochs=15)


def _stdlib_text(argument: str) -> bytes:
    """Read up to ``argument`` MB of the running interpreter's own library, folder by folder.

    Tests that a distribution ships or leaves out, and later installed packages, are skipped, so
    that hosts with the same Python hold the same text.
    """
    try:
        limit = round(float(argument or _TEXT_DEFAULT_MB) * 1e6)
    except (ValueError, OverflowError):
        limit = 0
    if limit <= 0:
        raise ConfigError(
            f"--data stdlib-text:{argument} is no size; give megabytes, as in stdlib-text:2"
        )
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}
    text = bytearray()
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - skipped)
        for name in sorted(names):
            if name.endswith(".py") and len(text) < limit:
                text += Path(folder, name).read_bytes()
    if not text:
        raise ConfigError(f"--data stdlib-text found no source files in {root}; use other data")
    return bytes(text[:limit])


def _synthetic(argument: str) -> Data:
    """Make noise around one random pattern per class: learnable, and of any requested size."""
    try:
        shape_text, classes_text = argument.split(",")
        shape = tuple(int(part) for part in shape_text.split("x"))
        classes = int(classes_text)
    except ValueError:
        shape, classes = (), 0
    if len(shape) != 3 or min(shape) < 1 or classes < 2:
        raise ConfigError(
            f"--data synthetic:{argument} cannot be read; give channels x height x width and two "
            "or more classes, as in synthetic:3x32x32,10"
        )
    image_bytes = 4 * math.prod(shape)
    count = max(10 * classes, min(4096, _SYNTHETIC_BYTES // image_bytes))
    needed = (count + classes) * image_bytes
    if needed > _SYNTHETIC_MOST_BYTES:
        raise ConfigError(
            f"--data synthetic:{argument} would take {needed / 1e9:.0f} GB of memory, for ten "
            f"images of each class; ask for smaller images or fewer classes, up to "
            f"{_SYNTHETIC_MOST_BYTES / 1e9:.0f} GB"
        )
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    patterns = torch.randn((classes, *shape), generator=generator)
    images = torch.randn((count, *shape), generator=generator).add_(patterns[labels])
    return ImageTensors(images, labels, classes=classes, epochs=1)
