"""The work of a job: stacks and their masks, and the files that their results go to."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.formats.ome_zarr_file import ZarrFile
from cocodiff_eval.formats.table import new_volume
from cocodiff_eval.formats.volume import VolumeFile
from cocodiff_eval.intensity import IntensityRange
from cocodiff_eval.masks import Mask
from cocodiff_eval.slices import Stack, unique_names

from cocodiff.jobs.volume import Volume

SHOWN = 12  # numbers of slices in a line
BOUNDS = ("_low_90", "_high_90")  # added to a preset's name: the ends of intervals that hold 90 % of the truth
MASK = "mask"  # in the place of a preset, in the name of a mask's file
LONGEST_STEM = 210  # bytes; file systems take names of 255, with the slice, the preset and the suffix


@dataclass(frozen=True)
class FileNames:
    """The names of a stack and a mask in those of result files; no two tasks of a run are called the same."""

    stack: str
    mask: str

    def result(self, preset: str, suffix: str = ".tif") -> str:
        return f"{self.stack}_{self.mask}_{preset}{suffix}"

    def preview(self, place: str, preset: str) -> str:
        """place: `[3]` of a stack's slice, nothing of a single one."""
        return f"{self.stack}{place}_{self.mask}_{preset}.png"


@dataclass(frozen=True)
class Task:
    """One stack under one mask. scale: intensities outside the mask; truth: None where it is unknown; format: of the
    results, a word of `cocodiff_eval.formats.table.FORMATS`; volume: how it is restored, unless it is slice by slice
    along z alone; steps: of denoising."""

    stack: Stack
    mask: Mask
    scale: IntensityRange
    truth: Stack | None
    files: FileNames
    format: str = "tiff"
    volume: Volume | None = None
    steps: int = 0

    @property
    def left(self) -> list[int]:
        """The numbers of the slices that are masked wholly, and so left as they are."""
        return [self.stack.numbers[index] for index in sorted(self.mask.full)]

    def record(self) -> dict[str, Any]:
        """What metrics.json and the report say of the input: the numbers of its slices, from the first to before the
        second; the range of intensities, and how many voxels outside the mask lie beyond it, up to which; the slices
        that are masked wholly."""
        numbers, scale = self.stack.numbers, self.scale
        return {
            "name": self.stack.name,
            "mask": self.mask.name,
            "slices": [numbers.start, numbers.stop] if self.stack.ndim == 3 else None,
            "range": [scale.low, scale.high],
            "extremes": [*(scale.extremes or (scale.low, scale.high))],
            "beyond": scale.beyond,
            "wholly_masked": self.left,
        }

    def remarks(self) -> list[str]:
        """What the user has to know of the input before it is restored."""
        scale, where, kept = self.scale, f"{self.stack.name}, mask {self.mask.name}", self.stack.metadata
        found = [*kept.remarks]
        if self.left:
            shown = ", ".join(map(str, self.left[:SHOWN])) + (", ..." if len(self.left) > SHOWN else "")
            found.append(
                f"{where}: {len(self.left)} slice(s) masked wholly, which leaves nothing to restore from: left as in "
                f"the input ({shown})"
            )
        if kept.kind == "tiff" and kept.axes[:1] in ("C", "S") and len(self.stack) > 1:
            found.append(
                f"{where}: the file's axes are {kept.axes}, channels in the place of slices: {len(self.stack)} of them "
                "are restored like slices of one stack, with one range of intensities; --slices 0:1 takes the first"
            )
        size = kept.voxel_size
        if self.volume is not None and self.volume.axes != ("z",) and size is not None and len({*size}) > 1:
            sides = " x ".join(f"{side:g}" for side in size)
            found.append(
                f"{where}: voxels of {sides} {kept.unit}: slices along each axis are restored as they "
                f"are stored, with unequal sides of voxels"
            )
        if scale.extremes is not None:
            low, high = scale.extremes
            found.append(
                f"{where}: intensities from {scale.low:.9g} to {scale.high:.9g}; {scale.beyond:,} voxel(s) outside the "
                f"mask lie beyond: --range {low:.9g},{high:.9g} takes them in"
            )
        return found


def file_names(pairs: Sequence[tuple[str, str]]) -> list[FileNames]:
    """Names for the files of each stack and mask of a run: their own; numbered where `a` + `b_c` and `a_b` + `c` would
    be one, and cut where a file system would not take them."""
    fitting = [
        (stack, mask) if len(os.fsencode(f"{stack}_{mask}")) <= LONGEST_STEM else (_cut(stack), _cut(mask))
        for stack, mask in pairs
    ]
    stems = unique_names([f"{stack}_{mask}" for stack, mask in fitting])
    return [FileNames(stack, stem[len(stack) + 1 :]) for (stack, _), stem in zip(fitting, stems, strict=True)]


def _cut(name: str) -> str:
    return os.fsencode(name)[: LONGEST_STEM // 2 - 2].decode(errors="ignore")


def result_files(
    task: Task,
    presets: Sequence[str],
    folder: Path,
    samples: int = 1,
    provenance: Mapping[str, Mapping[str, Any]] | None = None,
    more: Sequence[str] = (),
) -> dict[str, VolumeFile]:
    """For each preset the file of its restored slices. Of several samples it holds the mean, and one more file,
    `spread_of(preset)`, their standard deviation in the input's units: float32, 0 outside the mask. more: what is added
    to a preset's name for further files in the input's dtype, as of BOUNDS and of `kept_samples`.

    provenance: how each preset's results are made, for those who create and finish the files.
    """
    spread = np.dtype(np.float32)
    dtypes = {preset: (preset, task.stack.dtype) for preset in presets}
    if samples > 1:
        dtypes |= {spread_of(preset): (preset, spread) for preset in presets}
    dtypes |= {f"{preset}{one}": (preset, task.stack.dtype) for preset in presets for one in more}
    return {
        name: new_volume(
            task.format,
            folder,
            partial(task.files.result, name),
            task.stack.volume,
            dtype,
            {**provenance[preset], "mask": task.mask.name} if provenance else {},
        )
        for name, (preset, dtype) in dtypes.items()
    }


def checksums(files: Iterable[VolumeFile], indices: Iterable[int]) -> list[int]:
    """Of slices as they are read from files of results."""
    numbers = [*indices]
    return [zlib.crc32(file.read(index).tobytes()) for file in files for index in numbers]


def save_mask(task: Task, presets: Sequence[str], folder: Path, about: Mapping[str, Any]) -> list[str]:
    """Saves a mask that was made beside the files of results, in their format, where 255 is restored; in stores of
    results as a label image, with the labels of a Zarr input.

    about: how it was made, for the file's own metadata. Returns a line for each label of the input's that is not kept.
    """
    made = None if task.mask.from_file else task.mask
    about = {**about, "mask": task.mask.name}
    if task.format == "zarr":
        from cocodiff_eval.formats.labels import write_labels

        stores = [file for name, file in result_files(task, presets, folder).items() if isinstance(file, ZarrFile)]
        read = None if made is None else made.read
        return [line for store in stores for line in write_labels(store, task.stack.volume, read, about)]
    if made is not None:
        name = partial(task.files.result, MASK)
        file = new_volume(task.format, folder, name, task.stack.volume, np.dtype(np.uint8), about)
        if file.path.is_dir():  # of a start that was killed here
            shutil.rmtree(file.path)
        file.create()
        for index in range(len(task.stack)):
            file.write(index, made.read(index) * np.uint8(255))
        file.finish()
    return []


def kept_samples(samples: int) -> list[str]:
    """What is added to a preset's name for the files of its samples."""
    return [f"_sample_{number}" for number in range(samples)]


def spread_of(preset: str) -> str:
    """The name under which a preset's standard deviation is kept."""
    return f"{preset}_std"


def slice_name(stack: Stack, index: int) -> str:
    """`scan[12]` for slice 12 of the input, also where the stack begins at a later one than 0."""
    return stack.name if stack.ndim == 2 else f"{stack.name}[{stack.numbers[index]}]"
