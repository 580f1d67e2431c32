"""The files of volumes while they are restored: copies in slices along other axes, and what was restored along each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from cocodiff_eval.baseline import SOLVERS, Window
from cocodiff_eval.fusing import dealt
from cocodiff_eval.hidden import Hidden
from cocodiff_eval.masks import depth
from cocodiff_eval.turned import AXES, Restored, Turned

from cocodiff.jobs.hidden_test import APART, LINES, METHODS, made_along, read_window
from cocodiff.jobs.tasks import Task
from cocodiff.jobs.volume import OWN, Verdict, Volume

TRACE = 1e-9  # of weight, so that a voxel without any other is restored along an axis


@dataclass(frozen=True)
class VolumeFiles:
    """modes: names of presets; samples: of each voxel in all."""

    folder: Path
    tasks: Sequence[Task]
    modes: Sequence[str]
    samples: int

    @cached_property
    def of(self) -> dict[int, Volume]:
        """The volumes, by the numbers of their tasks."""
        return {number: task.volume for number, task in enumerate(self.tasks) if task.volume is not None}

    def turned(self, task: int, axis: str) -> tuple[Turned, Turned]:
        stack = self.tasks[task].stack
        voxels = Turned(self.folder / f"{task}-{axis}.voxels", axis, stack.shape, stack.dtype)
        return voxels, Turned(self.folder / f"{task}-{axis}.mask", axis, stack.shape, np.dtype(bool))

    def voxels(self, task: int, axis: str, index: int) -> np.ndarray:
        return self.tasks[task].stack.read(index) if axis == "z" else self.turned(task, axis)[0].read(index)

    def mask(self, task: int, axis: str, index: int) -> np.ndarray:
        return self.of[task].read_mask(index) if axis == "z" else self.turned(task, axis)[1].read(index)

    def depth(self, task: int, index: int) -> np.ndarray:
        """Of a slice along z, float64 [Y, X]: as of `masks.depth`."""
        return depth(self.of[task].read_mask, index, self.of[task].census.shape[0])

    def restored(self, task: int, mode: str, axis: str, sample: int) -> Restored:
        """The file of a sample."""
        path = self.folder / f"{task}-{self.modes.index(mode)}-{axis}-{sample}.f32"
        return Restored(path, axis, self.of[task].census)

    def without_model(self, task: int, name: str) -> Restored:
        """The file of a method without a model, or of a line's ends."""
        method = name.removesuffix(APART)
        path = self.folder / f"{task}-{METHODS.index(method)}{'-ends' * (name != method)}.f32"
        return Restored(path, made_along(method), self.of[task].census)

    def window_reader(
        self, task: int, hidden: Hidden | None = None
    ) -> Callable[[Window], tuple[np.ndarray, np.ndarray]]:
        """Of a volume that is tested, for which there are copies along y: a window and its mask."""
        return partial(read_window, self.tasks[task], self.of[task], self.turned(task, "y"), hidden=hidden)

    def samples_of(
        self, task: int, index: int, mode: str, mask_YX: np.ndarray, verdict: Verdict
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The masked voxels of a slice along z in all samples and by all methods that are taken [S, P], their weights
        in the mean, and in the deviation."""
        census, count = self.of[task].census, int(mask_YX.sum())

        def without_model(name: str) -> np.ndarray:
            return self.without_model(task, name).read_along_z(index, mask_YX).astype(np.float64)

        if verdict.method != OWN:
            ones = np.ones((1, count))
            return without_model(verdict.method)[None], ones, ones
        values, shares, drawn = [], [], []
        places = dict(zip(AXES, (np.full(count, index), *mask_YX.nonzero()), strict=True))
        deal, trace = dealt(self.samples, verdict.axes), TRACE if verdict.mixture is not None else 0.0
        others = verdict.others
        if verdict.mixture is None:
            weights = {axis: np.full(count, weight) for axis, weight in verdict.axes.items()}
        else:
            ends = {name: without_model(name + APART) for name in others if name in LINES}
            weights = dict(zip(verdict.mixture.names, verdict.mixture.weights(ends, count), strict=True))
        for axis, drawn_along in deal.items():
            seen_P = ~census.full(axis)[places[axis]]
            for sample in range(drawn_along):
                values.append(self.restored(task, mode, axis, sample).read_along_z(index, mask_YX))
                shares.append(np.where(seen_P, (weights.get(axis, 0.0) + trace) / drawn_along, 0.0))
                drawn.append(seen_P / drawn_along if verdict.mixture is not None else shares[-1])
        for name in others:
            values.append(without_model(name))
            seen_P = np.isfinite(values[-1])
            if name not in SOLVERS:  # of a slice that is masked wholly nothing was written
                seen_P &= ~census.full(made_along(name))[places[made_along(name)]]
            shares.append(np.where(seen_P, weights[name], 0.0))
            drawn.append(np.zeros(count))
        return np.stack(values), np.stack(shares), np.stack(drawn)


def keep(path: Path, made: Mapping[str, Any]) -> None:
    """Writes what was made; it has its name when it is on the disk."""
    unfinished = path.with_name(path.name + ".partial")
    with unfinished.open("wb") as file:
        if path.suffix == ".npz":
            np.savez(file, **made)
        else:
            file.write(json.dumps(made).encode())
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
