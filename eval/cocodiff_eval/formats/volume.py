"""What the formats of slices and masks share: a volume whose voxels are not read yet, and what is refused of one.

A reader knows the shape and dtype at once and reads one slice at a time: a stack larger than memory is no special case.
Every failure is a `UserError` that names the file and the remedy.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cocodiff.errors import UserError
from cocodiff.files import irregular

# Of each voxel of a slice at work, at least: the slice normalised and filled, in float64.
WORKING_BYTES = 16


@dataclass(frozen=True)
class RawVolume:
    """The contents of a file, not read yet: `ndim` 2 or 3, `shape` always [N, Y, X], native-endian `dtype`, and how to
    read a slice."""

    path: str
    stem: str
    shape: tuple[int, int, int]
    dtype: np.dtype
    ndim: int
    reader: Callable[[int], np.ndarray]


# Called with the numbers of slices and what is read: gives the same numbers, and may show how far it is.
Progress = Callable[[range, str], Iterable[int]]


def unwatched(numbers: range, what: str) -> Iterable[int]:
    """The progress of what nobody watches."""
    return numbers


class _Messages(logging.Handler):
    """Keeps what a library logs instead of printing it."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(re.sub(r"^<[^>]*> *", "", " ".join(record.getMessage().split())))


@contextlib.contextmanager
def quiet_libraries() -> Iterator[list[str]]:
    """Keep Pillow's and tifffile's own messages off the user's terminal; gives the list of what tifffile logged."""
    logger, messages = logging.getLogger("tifffile"), _Messages()
    propagate = logger.propagate
    logger.addHandler(messages)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield messages.texts
    finally:
        logger.removeHandler(messages)
        logger.propagate = propagate


def one_line(error: BaseException) -> str:
    """A library's message on one line, never empty."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def check_file(file: str) -> None:
    """Raises UserError for what is no regular file: opening a named pipe or a device may never return."""
    try:
        kind = irregular(file)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{file}: no such file; check the path (relative paths start at {Path.cwd()})") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; check the path") from error
    except ValueError as error:  # a null character
        raise UserError(f"{file!r}: {error}; check the path") from error
    if kind == "a directory":
        raise UserError(f"{file}: is a directory; name the files in it, e.g. {Path(file) / '*.png'}")
    if kind:
        raise UserError(f"{file}: is {kind}; save its data as a regular file")


def check_memory(path: str, shape: tuple[int, ...], itemsize: int, working: int = WORKING_BYTES) -> None:
    """Raises UserError where so many voxels fit in no memory of this machine: a header can claim any number of them.

    itemsize: bytes of a voxel as it is stored; working: bytes of a voxel that work on it takes besides.
    """
    needed = math.prod(shape) * (itemsize + working)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"{path}: claims {format_shape(shape)} voxels of {8 * itemsize} bit, which take {needed / 2**30:,.0f} GiB "
            f"or more to work on, and this machine has {memory / 2**30:,.0f} GiB; if they are that many indeed, save "
            "them as smaller slices"
        )


def as_volume_shape(shape: tuple[int, ...], path: str) -> tuple[int, int, int]:
    """[Y, X] or [N, Y, X] as [N, Y, X]; anything else is a UserError."""
    if len(shape) == 2:
        return (1, shape[0], shape[1])
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    raise UserError(
        f"{path}: {len(shape)} dimensions {format_shape(shape)}; a slice has 2 (rows, columns) and a stack 3 "
        "(slices, rows, columns): save the part to restore in that form"
    )


def format_shape(shape: tuple[int, ...]) -> str:
    """`(3, 640, 480)` as `3 x 640 x 480`."""
    return " x ".join(str(side) for side in shape) if shape else "(a single value)"


def same_channels(image_YXC: np.ndarray, path: str) -> np.ndarray:
    """The one grey image of several equal channels [Y, X]; UserError when the channels differ."""
    first_YX = image_YXC[..., 0]
    colours = image_YXC[..., :3] if image_YXC.shape[-1] >= 3 else image_YXC[..., :1]
    if not np.array_equal(colours, np.repeat(first_YX[..., None], colours.shape[-1], axis=-1)):
        raise UserError(f"{path}: a colour image whose channels differ; save it as grey (8 or 16 bit)")
    if image_YXC.shape[-1] in (2, 4):
        alpha_YX = image_YXC[..., -1]
        opaque = np.iinfo(alpha_YX.dtype).max if alpha_YX.dtype.kind in "ui" else 1.0
        if alpha_YX.size and not bool((alpha_YX == opaque).all()):
            raise UserError(f"{path}: has transparent pixels; remove the alpha channel and save it as grey")
    return np.ascontiguousarray(first_YX)
