"""The job of `inpaint`: slices of stacks under masks, restored and written in the input's format."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from cocodiff import __version__
from cocodiff.config.config import Config
from cocodiff.config.grouping import by_key
from cocodiff.jobs.record import lasting
from cocodiff.jobs.terminal import reading_bar, say
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, batches_of
from cocodiff_eval.harness.job import ItemResult, Job, JobResult
from cocodiff_eval.harness.judging import (
    ReportPictures,
    Restored,
    SliceReview,
    judge_slice,
    jumps,
    save_previews,
    shown_volume,
)
from cocodiff_eval.harness.quality import MOST_DISTANCE_DB, Bound, Group, Quality, Slices
from cocodiff_eval.harness.restoring import TOGETHER, Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import BOUNDS, Task, WorkingFile, export, kept_samples, result_files, slice_name
from cocodiff_eval.harness.volume import is_deep
from cocodiff_eval.harness.volumes import Volumes
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.quality.hidden import Hidden, hide_beside
from cocodiff_eval.quality.metrics import json_ready
from cocodiff_eval.report.pictures import Picture, plan_pictures, shown_slices

TESTED, MOST_TESTS = 4, 4  # samples of a slice for each one in which more is hidden, and these at most
TILES = 1.25  # times as many has such a sample at most, but one more in any case


class SliceJob(Job):
    """hidden: of volumes that are tested."""

    together = TOGETHER

    def __init__(self, session: Session, tasks: Sequence[Task], hidden: Mapping[int, Sequence[Hidden]]) -> None:
        values, quality = session.prepared.values, session.prepared.quality
        self.session, self.tasks = session, tasks
        self.presets, self.samples = list(session.prepared.presets), values["samples"]
        self.unit = "slices" if self.samples == 1 else "samples"
        self.restorers = {task.steps: Restorer.of(session, task.steps) for task in tasks}
        restorer = self.restorers[tasks[0].steps]
        compared, self.keeps = values["exact_slices"], bool(values["keep_samples"])
        self.volumes = Volumes(session, restorer, tasks, hidden)
        # Of several samples of a slice alone, unless it is asked for a test of its own, or for none.
        calibrates = self.samples > 1 and quality is None and values["hidden_test"] is None
        self.tests = min(MOST_TESTS, max(1, self.samples // TESTED)) if calibrates else 0
        self.before = self.volumes if self.volumes.works else None
        self._groups = {} if quality is None else groups_of_masks(quality, tasks, compared)
        self.batches: list[Batch] = []
        for number, task in enumerate(tasks):
            if number in self.volumes.of:
                self.batches += self.volumes.batches(number)
                continue
            together = restorer.together(task.stack.shape[1:], self.together)
            apart = self._groups[number].apart(number) if self._groups else []
            video = restorer.inpainter.frames > 1
            masked = task.mask.masked
            self.batches += batches_of(number, masked, together, compared, self.samples, apart, self.tests, video)
        for group in self._groups.values():
            group.take(self.batches)
        journals = session.prepared.output.journals.folder
        self._store = journals / "results"
        self._files = [*map(self._result_files, range(len(tasks)))]
        plan = plan_pictures([task.mask.masked for task in tasks], len(self.presets) * (1 + (self.samples > 1)) + 1)
        self.pages = ReportPictures(journals, plan)
        self._seen = lru_cache(1)(self._read)

    def begin(self, first: bool) -> None:
        """Makes the files of results, where an earlier start has not."""
        if not first:
            return
        self.session.images.mkdir(exist_ok=True)
        self._store.mkdir(exist_ok=True)
        files = [file for of_task in self._files for file in of_task.values()]
        for file in files:
            file.create()
        results, free = sum(file.bytes for file in files), shutil.disk_usage(self._store).free
        there = sum(512 * file.path.stat().st_blocks for file in files)
        if 2 * results - there > free:
            say(
                f"results take {results / 2**30:.1f} GiB while they are made, and then as much in their own format; "
                f"the disk of {self.session.prepared.output.out} has {free / 2**30:.1f} GiB left"
            )

    def _result_files(self, number: int) -> dict[str, WorkingFile]:
        """Of a task, by name."""
        volume = self.volumes.of.get(number)
        bounds = BOUNDS if (self.tests if volume is None else volume.hidden) else ()
        further = [*bounds, *(kept_samples(self.samples) if self.keeps else ())]
        return result_files(self.tasks[number], self.presets, self._store, self.samples, further)

    def _provenance(self, task: int, configs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
        """How a task's results of each preset are made, for the files' own metadata: plain data."""
        names = ("model", "steps", "strength", "seed", "prompt", "guidance", "dtype", "samples", "quality")
        values = self.session.prepared.values
        settings = {"version": __version__} | {name: values[name] for name in names if values.get(name) is not None}
        volume = self.volumes.of.get(task)
        if volume is not None and volume.verdict is not None:
            settings |= {"axes": volume.verdict.axes, "weights": dict(volume.verdict.weights)}
        told = {preset: {**settings, "preset": preset, "settings": lasting(of)} for preset, of in configs.items()}
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

    def _read(self, batch: Batch) -> list[SliceReview]:
        """The slices of a batch, of which those of the last one are remembered."""
        task, found = self.tasks[batch.task], []
        for index in batch.indices:
            pair = task.stack.read(index), task.mask.read(index)
            found.append(SliceReview(task, index, *pair, self._hidden_beside(batch, *pair)))
        return found

    def _hidden_beside(self, batch: Batch, original_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray | None:
        """What is hidden of a slice besides its mask, on all ranks alike; None where it has no intervals of its own."""
        if not self.tests or batch.task in self.volumes.of:
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
        if (volume := self.volumes.of.get(batch.task)) is not None:
            slices = self._seen(batch) if leads else []
            return {one: [volume.fused(seen, one) for seen in slices] for one in settings}
        seen = self._seen(batch)
        if batch.copied:  # a slice without masked voxels is its own restoration
            pairs = [(Moments.of(one.given(False)[0]), one.original_YX) for one in (seen if leads else [])]
            kept = self.samples if self.keeps else 0
            copies = [ItemSamples(moments, Cost(), kept=(original_YX,) * kept) for moments, original_YX in pairs]
            return dict.fromkeys(settings, copies)
        restorer = self.restorers[self.tasks[batch.task].steps]
        return {one: restorer.draw(batch, seen, one, leads, self.keeps) for one in settings}

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        volume, seen = self.volumes.of.get(batch.task), self._seen(batch)[place]
        of_volume = None if volume is None else volume.intervals(batch.indices[place])
        found = {mode: of_volume or seen.intervals(drawn[mode].tested) for mode in self.presets}
        intervals = {mode: one for mode, one in found.items() if one is not None}
        compared = None if exact is None else drawn[exact]
        return judge_slice(seen, self.presets, compared, drawn, batch.drawn, intervals)

    def write(self, batch: Batch, place: int, result: Restored) -> None:
        index = batch.indices[place]
        for name, file in self._files[batch.task].items():
            file.write(index, result.native[name])
        self.pages.add(batch.task, index, result.picture)

    def sums(self, batch: Batch) -> list[int]:
        files = self._files[batch.task].values()
        return [zlib.crc32(file.read(index).tobytes()) for file in files for index in batch.indices]

    def groups(self, quality: Quality) -> dict[int, Group]:
        return self._groups

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        seen = self._seen(batch)[place]
        if bound.against == "exact":
            return seen.psnr_vs_exact_db(exact, one)
        before, after = seen.psnr_db(exact), seen.psnr_db(one)
        if before is not None and after is not None:
            return before - after
        same = seen.psnr_vs_exact_db(exact, one) is None
        return None if same else MOST_DISTANCE_DB  # nothing shows what is lost, so it counts as all

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Writes results in their own format, on rank 0. Returns what `session.finish` takes besides the rows."""
        values, images = self.session.prepared.values, self.session.images
        progress, found = reading_bar(not values["quiet"]), []
        if self.session.folder is not None:
            for number, task in enumerate(self.tasks):
                files, about = self._files[number], {"version": __version__, "seed": values["seed"]}
                provenance = self._provenance(number, done.configs[number])
                for line in export(task, files, images, provenance, about, progress):
                    say(line)
                found += jumps(task, self.presets, files, progress)
                save_previews(task, files, self.presets, images)
        alone = [row for *_, row in done.rows if "samples" in row] if self.tests else []
        if unknown := sum(row["intervals"] is None for row in alone):
            say(f"{unknown} of {len(alone)} results have no intervals: no regions like the mask's could be hidden")
        numbers = {task.stack.name: task.stack.numbers for task in self.tasks if len(task.stack) > 1}
        volumes = [number for number, task in enumerate(self.tasks) if is_deep(task.stack)]
        return {
            "pictures": self.pages.all(done.rows, self._picture, progress),
            "shown": [shown_volume(self.tasks[n], self.presets, self._files[n]) for n in volumes],
            "slices": numbers,
            "side": self.pages.plan.side,
            "records": {
                "inputs": [task.record() for task in self.tasks],
                "volumes": self.volumes.records(),
                "jumps": found,
            },
        }

    def _picture(self, task: int, index: int) -> Picture:
        """What the report shows of a slice whose results are in their files."""
        files, names = self._files[task], [preset + end for preset in self.presets for end in ("", *BOUNDS)]
        native = {name: files[name].read(index) for name in names if name in files}
        stack, mask = self.tasks[task].stack, self.tasks[task].mask
        return SliceReview(self.tasks[task], index, stack.read(index), mask.read(index)).picture(self.presets, native)


def find_hidden(tasks: Sequence[Task], values: Mapping[str, Any]) -> dict[int, tuple[Hidden, ...]]:
    """Of each volume that is tested what is hidden in each round; none where nothing can be."""
    return {
        number: task.volume.regions(task.stack.read, values["samples"], values["seed"])
        for number, task in enumerate(tasks)
        if task.volume is not None and task.volume.tested
    }


def groups_of_masks(quality: Quality, tasks: Sequence[Task], exact_slices: int) -> dict[int, Group]:
    """For each task the group of the slices under its mask, in all stacks in their order, without batches so far. What
    is compared with the exact run in any case is checked as well."""
    of_masks = by_key((task.mask.name, number) for number, task in enumerate(tasks))
    found: dict[int, Group] = {}
    for mask, numbers in of_masks.items():
        items = [(n, index) for n in numbers for index, masked in enumerate(tasks[n].mask.masked) if masked]
        compared = {(n, index) for n in numbers for index in shown_slices(tasks[n].mask.masked, exact_slices)}
        always = [place for place, item in enumerate(items) if item in compared]
        slices = Slices.chosen(len(items), quality.slices, quality.every, always)
        checked = {items[place]: place for place in slices.checks}
        names = {place: slice_name(tasks[n].stack, index) for (n, index), place in checked.items()}
        found |= dict.fromkeys(numbers, Group(f"mask {mask}", slices, names, {}, checked))
    return found
