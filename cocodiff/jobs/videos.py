"""Generated videos on the disk: all frames in a TIFF stack, and an MP4 to look at where imageio-ffmpeg is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import tifffile

from cocodiff.files import flush


def has_encoder() -> bool:
    """Whether an MP4 can be written."""
    return find_spec("imageio_ffmpeg") is not None


def save_frames(path: Path, frames_FYXC: np.ndarray) -> None:
    """uint8 [F, Y, X, C], without loss. Returns when they are on the disk."""
    tifffile.imwrite(path, frames_FYXC, photometric="rgb", compression="zlib", metadata={"axes": "TYXS"})
    flush(path)


def save_mp4(path: Path, frames_FYXC: np.ndarray, fps: int) -> None:
    """uint8 [F, Y, X, C], with loss, fps frames a second. Returns when it is on the disk."""
    from imageio_ffmpeg import write_frames

    height, width = frames_FYXC.shape[1:3]
    writer = write_frames(str(path), (width, height), fps=fps, quality=8)
    writer.send(None)
    for frame_YXC in frames_FYXC:
        writer.send(np.ascontiguousarray(frame_YXC))
    writer.close()
    flush(path)


def frames_of(path: Path) -> np.ndarray:
    """What `save_frames` has written."""
    frames = np.asarray(tifffile.imread(path))
    return frames if frames.ndim == 4 else frames[None]


def shown_frames(frames_FYXC: np.ndarray) -> np.ndarray:
    """Four frames in a picture [Y, X, C], row by row from the first to the last; of fewer than four the middle one."""
    count = len(frames_FYXC)
    if count < 4:
        return frames_FYXC[count // 2]
    four = [frames_FYXC[round(place * (count - 1) / 3)] for place in range(4)]
    return np.concatenate([np.concatenate(four[row : row + 2], axis=1) for row in (0, 2)])
