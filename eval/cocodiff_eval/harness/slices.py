"""The job of `inpaint`: slices of stacks under masks, restored and written in the input's format."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cocodiff import __version__
from cocodiff.config.errors import UserError
from cocodiff.jobs.record import lasting
from cocodiff.jobs.terminal import reading_bar, say
from cocodiff_eval.harness.bound import Bound, Slices
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, batches_of
from cocodiff_eval.harness.job import BatchPolicy, ItemResult, Job, JobResult
from cocodiff_eval.harness.judging import (
    ReportPictures,
    Restored,
    SliceReview,
    judge_slice,
    jumps,
    picture_of,
    psnr_vs_exact_db,
    save_previews,
    shown_volume,
)
from cocodiff_eval.harness.quality import Group, Quality
from cocodiff_eval.harness.restoring import TOGETHER, Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import (
    BOUNDS,
    Task,
    WorkingFile,
    checksums,
    describe_inputs,
    export,
    kept_samples,
    result_files,
    slice_name,
)
from cocodiff_eval.harness.volume import is_deep
from cocodiff_eval.harness.volumes import Volumes
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.quality.hidden import Hidden, hide_beside
from cocodiff_eval.quality.metrics import json_ready
from cocodiff_eval.report.pictures import plan_pictures, shown_slices

if TYPE_CHECKING:
    from cocodiff.jobs.replicas import Queue

TESTED, MOST_TESTS = 4, 4  # samples of a slice for each one in which more is hidden, and these at most
TILES = 1.25  # times as many has such a sample at most, but one more in any case


def check_truth(bound: Bound, tasks: Sequence[Task]) -> None:
    """Raises UserError for a loss against a truth that is not there."""
    for task in tasks:
        if bound.against == "truth" and task.truth is None:
            raise UserError(
                f"--quality {bound} is a loss against the truth, which mask {task.mask.name} of {task.stack.name} "
                f"hides: name the original with --truth, or give a distance to the exact run, as 50dB"
            )


class SliceJob(Job[Batch]):
    """tasks: stacks and their masks; masked: which slices of each have something to restore; hidden: what is hidden of
    the volumes that are tested."""

    together = TOGETHER

    def __init__(
        self,
        session: Session,
        tasks: Sequence[Task],
        masked: Sequence[Sequence[bool]],
        hidden: Mapping[int, Sequence[Hidden]],
    ) -> None:
        values, quality = session.prepared.values, session.prepared.quality
        self.session, self.tasks, self.masked = session, tasks, masked
        self.presets, self.samples = list(session.prepared.presets), values["samples"]
        self.unit = "slices" if self.samples == 1 else "samples"
        self.restorers = {task.steps: self._restorer(task.steps) for task in tasks}
        restorer = self.restorers[tasks[0].steps]
        compared = values["exact_slices"]
        self.volumes = Volumes(session, restorer, tasks, hidden)
        # Of several samples of a slice alone, unless it is asked for a test of its own, or for none.
        calibrates = self.samples > 1 and quality is None and values.get("hidden_test", False) is None
        self.tests = min(MOST_TESTS, max(1, self.samples // TESTED)) if calibrates else 0
        self.before = [len(work.indices) * work.counted for work in self.volumes.works]
        self._masks = {} if quality is None else slices_of_masks(quality, tasks, masked, compared)
        self.batches: list[Batch] = []
        for number, (task, of_task) in enumerate(zip(tasks, masked, strict=True)):
            if number in self.volumes.of:
                self.batches += self.volumes.batches(number)
                continue
            together = restorer.together(task.stack.shape[1:], self.together)
            apart = self._masks[number].apart(number) if self._masks else []
            video = restorer.inpainter.frames > 1
            self.batches += batches_of(number, of_task, together, compared, self.samples, apart, self.tests, video)
        journals = session.prepared.output.journals.folder
        self._store = journals / "results"
        plan = plan_pictures(masked, len(self.presets) * (1 + (self.samples > 1)) + 1)
        self.pages = ReportPictures(journals, plan)
        self._way: BatchPolicy | None = None
        self._last: tuple[Batch | None, list[SliceReview]] = (None, [])

    def _restorer(self, steps: int) -> Restorer:
        session = self.session
        prepared, number = session.prepared, session.replica.number
        return Restorer.of_model(session.model, prepared.request, prepared.values, steps, session.engines, number)

    def settings(self) -> dict[str, Any]:
        return describe_inputs(self.tasks, self.session.prepared.values)

    def make_before(self, queue: Queue, first: int) -> None:
        self.volumes.make(queue, first)

    def holds_before(self, number: int) -> bool:
        return self.volumes.holds(number)

    def begin(self, way: BatchPolicy, first: bool) -> None:
        """Makes the files of results, where an earlier start has not."""
        self._way = way
        if not first:
            return
        self.session.images.mkdir(exist_ok=True)
        self._store.mkdir(exist_ok=True)
        files = [file for number in range(len(self.tasks)) for file in self._files(number).values()]
        for file in files:
            file.create()
        results, free = sum(file.bytes for file in files), shutil.disk_usage(self._store).free
        there = sum(512 * file.path.stat().st_blocks for file in files)
        if 2 * results - there > free:
            say(
                f"results take {results / 2**30:.1f} GiB while they are made, and then as much in their own format; "
                f"the disk of {self.session.prepared.output.out} has {free / 2**30:.1f} GiB left"
            )

    def _files(self, task: int) -> dict[str, WorkingFile]:
        bounds = BOUNDS if self._calibrates(task) or self.volumes.tested(task) else ()
        further = [*bounds, *(kept_samples(self.samples) if self.volumes.keeps else ())]
        return result_files(self.tasks[task], self.presets, self._store, self.samples, further)

    def _provenance(self, task: int) -> dict[str, dict[str, Any]]:
        """How a task's results of each preset are made, for the files' own metadata: plain data."""
        assert self._way is not None, "it is known how results are made"
        names = ("model", "steps", "strength", "seed", "prompt", "guidance", "dtype", "samples", "quality")
        values = self.session.prepared.values
        settings = {"version": __version__} | {name: values[name] for name in names if values.get(name) is not None}
        settings |= self.volumes.provenance(task)
        configs = self._way.configs(task).items()
        told = {preset: {**settings, "preset": preset, "settings": lasting(config)} for preset, config in configs}
        return {preset: json_ready(of_preset, otherwise=str) for preset, of_preset in told.items()}

    def watched(self, advance: Callable[[int], None]) -> None:
        for restorer in self.restorers.values():
            restorer.inpainter.on_step = advance

    def steps(self, batch: Batch) -> int:
        if batch.task in self.volumes.of:
            return 0
        masks = [
            seen.given(sample >= batch.drawn)[1]
            for seen in self._seen(batch)
            for sample in batch.samples
            if sample < batch.drawn or seen.hides
        ]
        return self.restorers[self.tasks[batch.task].steps].tile_steps(masks)

    def _seen(self, batch: Batch) -> list[SliceReview]:
        """The slices of a batch, which are read once: those of the last one are remembered."""
        if self._last[0] != batch:
            task = self.tasks[batch.task]
            pairs = [(task.stack.read(index), task.mask.read(index)) for index in batch.indices]
            hidden = [self._hidden_beside(batch, *pair) for pair in pairs]
            found = zip(batch.indices, pairs, hidden, strict=True)
            self._last = (batch, [SliceReview(task, index, *pair, hides) for index, pair, hides in found])
        return self._last[1]

    def _calibrates(self, task: int) -> bool:
        """Whether slices of a task have intervals each of its own."""
        return self.tests > 0 and task not in self.volumes.of

    def _hidden_beside(self, batch: Batch, original_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray | None:
        """What is hidden of a slice besides its mask, on all ranks alike; None where it has no intervals of its own."""
        if not self._calibrates(batch.task):
            return None
        if batch.copied or mask_YX.all():
            return np.zeros_like(mask_YX)
        restorer = self.restorers[self.tasks[batch.task].steps]
        of_mask = restorer.tile_steps([mask_YX])
        most = max(TILES * of_mask, of_mask + restorer.inpainter.steps)
        seed = self.session.prepared.values["seed"]
        return hide_beside(original_YX, mask_YX, seed, lambda unknown_YX: restorer.tile_steps([unknown_YX]) <= most)

    def make(self, settings: Sequence[str], batch: Batch) -> dict[str, list[ItemSamples]]:
        leads = self.session.replica.leads
        if batch.task in self.volumes.of:
            indices = batch.indices if leads else ()
            return {one: [self.volumes.fused(batch.task, index, one) for index in indices] for one in settings}
        seen = self._seen(batch)
        if batch.copied:  # a slice without masked voxels is its own restoration
            pairs = [(Moments.of(one.given(False)[0]), one.original_YX) for one in (seen if leads else [])]
            kept = self.samples if self.volumes.keeps else 0
            copies = [ItemSamples(moments, Cost(), kept=(original_YX,) * kept) for moments, original_YX in pairs]
            return dict.fromkeys(settings, copies)
        restorer = self.restorers[self.tasks[batch.task].steps]
        return {one: restorer.draw(batch, seen, one, leads, self.volumes.keeps) for one in settings}

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        of_volume, seen = self.volumes.intervals(batch.task, batch.indices[place]), self._seen(batch)[place]
        found = {mode: of_volume or seen.intervals(drawn[mode].tested) for mode in self.presets}
        intervals = {mode: one for mode, one in found.items() if one is not None}
        return judge_slice(seen, self.presets, exact, drawn, batch.drawn, intervals)

    def write(self, batch: Batch, place: int, result: Restored) -> None:
        index = batch.indices[place]
        for name, file in self._files(batch.task).items():
            file.write(index, result.native[name])
        self.pages.add(batch.task, index, result.picture)

    def sums(self, batch: Batch) -> list[int]:
        return checksums(self._files(batch.task).values(), batch.indices)

    def groups(self, quality: Quality) -> dict[int, Group]:
        groups = {id(mask): mask.group(self.tasks, self.batches) for mask in self._masks.values()}
        return {task: groups[id(mask)] for task, mask in self._masks.items()}

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        seen = self._seen(batch)[place]
        if bound.against == "exact":
            return psnr_vs_exact_db(seen.task.scale, exact, one, seen.mask_YX)
        before, after = seen.psnr_db(exact), seen.psnr_db(one)
        return None if before is None or after is None else before - after

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Writes results in their own format, on rank 0. Returns what `session.finish` takes besides the rows."""
        values, images = self.session.prepared.values, self.session.images
        progress, found = reading_bar(not values["quiet"]), []
        if self.session.folder is not None:
            for number, (task, of_task) in enumerate(zip(self.tasks, self.masked, strict=True)):
                files, about = self._files(number), {"version": __version__, "seed": values["seed"]}
                for line in export(task, files, images, self._provenance(number), about, progress):
                    say(line)
                found += jumps(task, self.presets, files, of_task, progress)
                save_previews(task, of_task, files, self.presets, images)
        alone = [row for *_, row in done.rows if "samples" in row] if self.tests else []
        if unknown := sum(row["intervals"] is None for row in alone):
            say(f"{unknown} of {len(alone)} results have no intervals: no regions like the mask's could be hidden")
        numbers = {task.stack.name: task.stack.numbers for task in self.tasks if len(task.stack) > 1}
        volumes = [number for number, task in enumerate(self.tasks) if is_deep(task.stack)]
        return {
            "pictures": self.pages.all(done.rows, self._picture, progress),
            "shown": [shown_volume(self.tasks[n], self.presets, self._files(n)) for n in volumes],
            "slices": numbers,
            "side": self.pages.plan.side,
            "records": {
                "inputs": [task.record() for task in self.tasks],
                "volumes": self.volumes.records(),
                "jumps": found,
            },
        }

    def _picture(self, task: int, index: int) -> Any:
        return picture_of(self.tasks[task], index, self.presets, self._store, self.samples)


def find_masked(tasks: Sequence[Task]) -> list[list[bool]]:
    """Which slices of each task have something to restore."""
    return [[bool(task.mask.read(index).any()) for index in range(len(task.stack))] for task in tasks]


def find_hidden(tasks: Sequence[Task], values: Mapping[str, Any]) -> dict[int, tuple[Hidden, ...]]:
    """Of each volume that is tested what is hidden in each round; none where nothing can be."""
    return {
        number: task.volume.regions(task.stack.read, values["samples"], values["seed"])
        for number, task in enumerate(tasks)
        if task.volume is not None and task.volume.tested
    }


@dataclass(frozen=True)
class MaskSlices:
    """The slices under one mask in all stacks, in their order. places: task and index of each that has something to
    restore; slices: which of them, by their number in `places`, are tried and checked."""

    mask: str
    places: list[tuple[int, int]]
    slices: Slices

    def apart(self, task: int) -> list[set[int]]:
        """Of a task the slices that settings are tried on, and those that are checked: they have batches of their
        own."""
        return [
            {index for place in places for of, index in [self.places[place]] if of == task}
            for places in (self.slices.calibration, self.slices.checks)
        ]

    def group(self, tasks: Sequence[Task], batches: Sequence[Batch]) -> Group:
        checked = {self.places[place]: place for place in self.slices.checks}
        names = {place: slice_name(tasks[task].stack, index) for (task, index), place in checked.items()}
        of_batches = {
            number: tuple(checked[batch.task, index] for index in batch.indices)
            for number, batch in enumerate(batches)
            if (batch.task, batch.indices[0]) in checked
        }
        return Group(f"mask {self.mask}", self.slices, names, of_batches)


def slices_of_masks(
    quality: Quality, tasks: Sequence[Task], masked: Sequence[Sequence[bool]], exact_slices: int
) -> dict[int, MaskSlices]:
    """For each task the slices under its mask. What is compared with the exact run in any case is checked as well."""
    of_masks: dict[str, list[int]] = {}
    for number, task in enumerate(tasks):
        of_masks.setdefault(task.mask.name, []).append(number)
    found: dict[int, MaskSlices] = {}
    for mask, numbers in of_masks.items():
        places = [(n, index) for n in numbers for index, has_mask in enumerate(masked[n]) if has_mask]
        compared = {(n, index) for n in numbers for index in shown_slices(masked[n], exact_slices)}
        always = [place for place, one in enumerate(places) if one in compared]
        slices = Slices.chosen(len(places), quality.slices, quality.every, always)
        found |= dict.fromkeys(numbers, MaskSlices(mask, places, slices))
    return found
