"""The report's pictures of a job: made where a slice is restored, kept on the disk, read when the page is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.formats.units import unit_symbol
from cocodiff_eval.formats.volume import Progress, VolumeFile
from cocodiff_eval.metrics import json_ready, slice_jumps
from cocodiff_eval.report import Picture, PicturePlan, ShownVolume, encode, worst_slices
from cocodiff_eval.slices import SMALLEST_SIDE

from cocodiff.jobs.tasks import BOUNDS, Task, spread_of
from cocodiff.outputs.folder import storage_faults

FOLDER = "pictures"  # beside a job's journals, and removed with them


@dataclass(frozen=True)
class ReportPictures:
    """The pictures of a job's slices, a file each. folder: of the job's journals."""

    folder: Path
    plan: PicturePlan

    def add(self, task: int, index: int, make: Callable[[], Picture]) -> None:
        """Keeps what `make` gives of a slice, if the report is to show it."""
        if index in self.plan.shown[task]:
            path, text = self._path(task, index), self.encoded(make())
            with storage_faults(str(path)):
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)

    def encoded(self, picture: Picture) -> str:
        share = self.plan.share if picture.mask_YX.any() else self.plan.unmasked_share
        return encode(picture, self.plan.side, share)

    def read(self, task: int, index: int) -> str | None:
        """The text of a slice's pictures; None where there is none, or no whole one."""
        try:
            text = self._path(task, index).read_text()
            json.loads(text)
        except (OSError, ValueError):
            return None
        return text

    def _path(self, task: int, index: int) -> Path:
        return self.folder / FOLDER / f"{task}-{index}.json"

    def all(
        self,
        rows: Sequence[Sequence[Any]],
        make: Callable[[int, int], Picture],
        progress: Callable[[range, str], Iterable[int]],
    ) -> Iterator[str]:
        """The texts of all slices that the report shows, one after the other.

        rows: those of metrics.json, each with its task and slice. make: a slice's picture from the files of results,
        for slices that turned out worst, or whose text was lost with a run that was killed.
        """
        found: list[tuple[int, int]] = []
        for task, shown in enumerate(self.plan.shown):
            quality: dict[int, list[float]] = {}
            for _, index, row in (one for one in rows if one[0] == task):
                quality.setdefault(index, []).extend([row["psnr_db"]] if row["psnr_db"] is not None else [])
            found += [(task, n) for n in sorted({*shown, *worst_slices(quality, shown, self.plan.worst)})]
        for place in progress(range(len(found)), "writing the report"):
            text = self.read(*found[place])
            yield text if text is not None else self.encoded(make(*found[place]))


def picture(
    task: Any,
    index: int,
    name: str,
    images: tuple[np.ndarray, np.ndarray, np.ndarray | None],
    native: Mapping[str, np.ndarray],
    smooth_YX: np.ndarray | None,
) -> Picture:
    """What the report shows of a slice.

    images: as given, its mask, and its truth (None where it is unknown). native: what the result files hold, by preset,
    and as `spread_of(preset)` the standard deviation of its samples. smooth_YX: the slice restored without a model;
    None where nothing is masked, or everything.
    """
    input_YX, mask_YX, truth_YX = images
    spread = {preset: native[spread_of(preset)] for preset in native if spread_of(preset) in native}
    restored = {name: native[name] for name in native if name not in map(spread_of, spread)}
    if not mask_YX.any():
        restored, spread = {}, {}
    elif smooth_YX is not None:
        restored["biharmonic"] = smooth_YX
    return Picture(name, task.mask.name, index, input_YX, mask_YX, task.scale, restored, truth_YX, spread)


def is_volume(task: Task) -> bool:
    """Whether a stack is shown as a volume, and its neighbouring slices compared."""
    return task.stack.ndim == 3 and len(task.stack) >= SMALLEST_SIDE


def shown_volume(task: Task, presets: Sequence[str], files: Mapping[str, VolumeFile]) -> ShownVolume:
    """What the report's three views show of a task. files: of its results, by name; their intervals and their spread
    are shown where there are such files."""
    kept, region = task.stack.metadata, task.stack.volume.region
    grey = {preset: files[preset].read for preset in presets}
    for preset in presets:
        for end, told in zip(BOUNDS, ("low 90 %", "high 90 %"), strict=True):
            if f"{preset}{end}" in files:
                grey[f"{preset}: {told}"] = files[f"{preset}{end}"].read
    return ShownVolume(
        task.stack.name,
        task.mask.name,
        task.stack.shape,
        task.scale,
        task.stack.read,
        task.mask.read,
        task.truth.read if task.truth is not None else None,
        grey,
        {f"{one}: uncertainty": files[spread_of(one)].read for one in presets if spread_of(one) in files},
        region.start if region is not None else (0, 0, 0),
        kept.voxel_size,
        unit_symbol(kept.unit),
    )


def jumps(
    task: Task, presets: Sequence[str], files: Mapping[str, VolumeFile], masked: Sequence[bool], progress: Progress
) -> list[dict[str, Any]]:
    """Entries of `jumps` of metrics.json: of a volume whose truth is known, one for each preset."""
    truth = task.truth
    if truth is None or not is_volume(task):
        return []

    def read(index: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        return task.mask.read(index), truth.read(index), {one: files[one].read(index) for one in presets}

    found = slice_jumps(read, masked, progress)
    named = {"name": task.stack.name, "mask": task.mask.name}
    return [json_ready({**named, "mode": mode, "slice_jump": value}) for mode, value in found.items()]
