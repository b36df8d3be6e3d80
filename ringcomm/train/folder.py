"""Images from a folder with one sub-folder per class, read with Pillow when they are needed.

Two layouts: PATH/train/CLASS/* with PATH/val/CLASS/*, or PATH/CLASS/* of which a fixed 20 % of
each class is held out. Classes are numbered in the order of their names.

Invariants: files are listed in one sorted order on every rank; a file that cannot be read is an
error that names it, never a sample left out.
"""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigError
from .data import Data, Part, stratified_split

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
_READERS = 4


class ImageFolder(Data):
    """RGB images, resized to a square and scaled to [-1, 1]."""

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
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as image:
                small = image.convert("RGB").resize((self._side, self._side))
        except (OSError, UnidentifiedImageError) as error:
            raise ConfigError(f"{path} cannot be read as an image ({error}); remove it") from None
        pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
        return pixels.reshape(self._side, self._side, 3).permute(2, 0, 1).float() / 127.5 - 1


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
