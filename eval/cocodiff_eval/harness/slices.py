"""The job of `inpaint`: masked slices of stacks are restored and written in the input's format."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from cocodiff import __version__
from cocodiff.config.config import Config
from cocodiff.config.grouping import by_key
from cocodiff.jobs.arrays import Outcome
from cocodiff.jobs.record import lasting
from cocodiff.jobs.terminal import reading_bar, say
from cocodiff_eval.data.volume import Progress
from cocodiff_eval.harness.items import Batch, ItemSamples, batches_of
from cocodiff_eval.harness.job import ItemResult, Job, JobResult
from cocodiff_eval.harness.judging import (
    SliceReview,
    encode_picture,
    judge_slice,
    jumps,
    outcome_of_slices,
    save_previews,
    shown_volume,
    slices_of_report,
)
from cocodiff_eval.harness.quality import MOST_DISTANCE_DB, Bound, Quality, SettingGroup, Slices
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.tasks import (
    BOUNDS,
    TOGETHER,
    ResultFile,
    Task,
    count_tests,
    count_tile_steps,
    export,
    kept_samples,
    result_files,
    slice_name,
    told_steps,
)
from cocodiff_eval.harness.volume import is_deep
from cocodiff_eval.harness.volumes import Volumes
from cocodiff_eval.quality.hidden import Hidden, hide_beside
from cocodiff_eval.quality.metrics import json_ready
from cocodiff_eval.report.pictures import plan_pictures, shown_slices

# Names of arrays that the store keeps beside a slice's results: `SliceReview.errors` of the first preset, and the
# encoded picture for the report.
ERRORS = ".errors"
PICTURE = ".picture"
# Most denoising steps of a sample with hidden regions, relative to a sample of the result; one more tile is always
# allowed.
TILES = 1.25


class SliceJob(Job):
    """The job of `inpaint`: it restores all masked slices of its tasks, in batches of several slices.

    A task is a stack with a mask. If its stack is a volume, it may be restored along several axes first; its batches
    then only fuse the results.
    """

    together = TOGETHER  # most slices that share calls of the model

    def __init__(self, session: Session, tasks: Sequence[Task]) -> None:
        """Divide the slices of all tasks into batches. All ranks call it.

        Rank 0 chooses the hidden regions of volumes, for which it reads them, and prints the number of tiles.

        Args:
            session: the job on this rank.
            tasks: the stacks with their masks.
        """
        values, quality = session.prepared.values, session.prepared.quality
        self.session, self.tasks = session, tasks
        self.presets, self.samples = list(session.prepared.presets), values["samples"]
        self.unit = "slices" if self.samples == 1 else "samples"
        self.restorers = {task.steps: Restorer.of(session, task.steps) for task in tasks}
        restorer = self.restorers[tasks[0].steps]
        compared, self.keeps = values["exact_slices"], bool(values["keep_samples"])
        whole = session.replica.whole
        hidden = whole.broadcast_value(find_hidden(tasks, values) if whole.rank == 0 else None)
        self.way = self.volumes = Volumes(session, restorer, tasks, hidden)
        self.tests = count_tests(values)
        if whole.rank == 0 and quality is None and len(self.restorers) == 1:
            self.tile_steps = count_tile_steps(tasks, values, restorer.inpainter.native_size) * len(self.presets)
            say(told_steps(self.tile_steps, restorer.inpainter.steps))
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
        modes = len(self.presets) * (1 + 2 * (self.samples > 1)) + 1
        self.plan = plan_pictures([task.mask.masked for task in tasks], modes)
        self._seen = lru_cache(1)(self._read)

    def begin(self, first: bool) -> None:
        """Print a warning, on rank 0, if the disk may be too small for the results.

        Args:
            first: True on rank 0.
        """
        output = self.session.prepared.output
        if not first:
            return
        files = [(task, one) for n, task in enumerate(self.tasks) for one in self._result_files(n).values()]
        results = sum(math.prod(task.stack.shape) * file.dtype.itemsize for task, file in files)
        free = shutil.disk_usage(output.partial).free
        if 2 * results - output.store.bytes > free:
            say(
                f"results take {results / 2**30:.1f} GiB while they are made, and then as much in their own format; "
                f"the disk of {output.out} has {free / 2**30:.1f} GiB left"
            )

    def _result_files(self, number: int, done: JobResult | None = None) -> dict[str, ResultFile]:
        """Return the result files of a task, by name.

        Args:
            number: the task's index.
            done: the finished job, from which slices are read; None to learn names and dtypes alone.
        """
        volume = self.volumes.of.get(number)
        bounds = BOUNDS if (self.tests if volume is None else volume.hidden) else ()
        further = [*bounds, *(kept_samples(self.samples) if self.keeps else ())]

        def read(name: str, index: int) -> np.ndarray:
            """Return a slice with masked voxels of a file, by the file's name and the slice's index in the task."""
            assert done is not None, "nothing is there before"
            return done.read(number, index, name)

        return result_files(self.tasks[number], self.presets, read, self.samples, further)

    def _provenance(self, task: int, configs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
        """Return, by preset, how a task's results were made, as plain data for the files' metadata.

        Args:
            task: the task's index.
            configs: settings of the engine by preset.
        """
        names = ("model", "steps", "strength", "seed", "prompt", "guidance", "dtype", "samples", "quality")
        values = self.session.prepared.values
        settings = {"version": __version__} | {name: values[name] for name in names if values.get(name) is not None}
        volume = self.volumes.of.get(task)
        if volume is not None:
            settings |= {"axes": volume.verdict.axes, "weights": dict(volume.verdict.weights)}
        told = {preset: {**settings, "preset": preset, "settings": lasting(of)} for preset, of in configs.items()}
        return dict(json_ready(told, otherwise=str))

    def watched(self, advance: Callable[[int], None]) -> None:
        """Have `advance` called after each denoising step, with the number of slices in the model's call."""
        for restorer in self.restorers.values():
            restorer.inpainter.on_step = advance

    def steps(self, batch: Batch) -> int:
        """Return the number of denoising steps of all tiles of a batch with one preset, for the progress bar.

        It is 0 for a batch that only fuses slices of a volume that have been restored before.
        """
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
        """Read the slices of a batch, and choose the known voxels to hide in each for calibration.

        Callers use `_seen`, which caches the last batch.
        """
        task, found = self.tasks[batch.task], []
        for index in batch.indices:
            pair = task.stack.read(index), task.mask.read(index)
            found.append(SliceReview(task, index, *pair, self._hidden_beside(batch, *pair)))
        return found

    def _hidden_beside(self, batch: Batch, original_YX: np.ndarray, mask_YX: np.ndarray) -> np.ndarray | None:
        """Return the known voxels of a slice that are hidden to calibrate its intervals, boolean [Y, X].

        They are the same on all ranks. Return None if the slice is not calibrated by itself. Nothing is hidden in a
        slice that is masked wholly. Regions that would need too many more tiles are left out.

        Args:
            batch: the slice's batch.
            original_YX: the slice as in the input.
            mask_YX: True where it is to be restored.
        """
        if not self.tests or batch.task in self.volumes.of:
            return None
        if mask_YX.all():
            return np.zeros_like(mask_YX)
        restorer = self.restorers[self.tasks[batch.task].steps]
        of_mask = restorer.tile_steps([mask_YX])
        most = max(TILES * of_mask, of_mask + restorer.inpainter.steps)
        seed = self.session.prepared.values["seed"]
        return hide_beside(original_YX, mask_YX, seed, lambda unknown_YX: restorer.tile_steps([unknown_YX]) <= most)

    def make(self, settings: Sequence[str], batch: Batch) -> dict[str, list[ItemSamples]]:
        """Restore a batch, or fuse it, with each of some settings. Return by setting the samples of each slice.

        All ranks of a replica call it. Ranks that do not lead the replica get empty lists.

        Args:
            settings: names of presets or candidates.
            batch: the batch.
        """
        leads, volume = self.session.replica.leads, self.volumes.of.get(batch.task)
        if volume is not None:
            slices = self._seen(batch) if leads else []
            return {one: [volume.fused(seen, one) for seen in slices] for one in settings}
        restorer = self.restorers[self.tasks[batch.task].steps]
        return {one: restorer.draw(batch, self._seen(batch), one, leads, self.keeps) for one in settings}

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        """Return a slice's rows of metrics.json and the arrays that are kept of it.

        Args:
            batch: the slice's batch.
            place: index of the slice in the batch.
            drawn: its samples in each mode, such as a preset.
            exact: the mode that others are compared with; None to compare with none.
        """
        volume, seen = self.volumes.of.get(batch.task), self._seen(batch)[place]
        of_volume = None if volume is None else volume.intervals(batch.indices[place])
        found = {mode: of_volume or seen.intervals(drawn[mode].tested) for mode in self.presets}
        intervals = {mode: one for mode, one in found.items() if one is not None}
        compared = None if exact is None else drawn[exact]
        judged = judge_slice(seen, self.presets, compared, drawn, batch.drawn, intervals)
        if self.tests and volume is None:
            errors = seen.errors(drawn[self.presets[0]].tested)
            judged = replace(judged, arrays={**judged.arrays, ERRORS: errors})
        if batch.indices[place] not in self.plan.shown[batch.task]:
            return judged
        text = encode_picture(seen.picture(self.presets, judged.arrays), self.plan)
        return replace(judged, arrays={**judged.arrays, PICTURE: np.frombuffer(text.encode(), np.uint8)})

    def groups(self, quality: Quality) -> dict[int, SettingGroup]:
        """Return, by the task's index, the group of slices for which --quality chooses one setting.

        A group has all slices under one mask.
        """
        return self._groups

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        """Return the quality of a slice in dB that --quality limits, for a setting that is tried.

        It is the PSNR against the exact run, or the loss of PSNR against the truth. Return None for equal results,
        unless it is a loss against a known truth, which is then 0. If the truth is unknown and results differ, return
        MOST_DISTANCE_DB.

        Args:
            bound: the bound, whose `against` says which figure.
            batch: the slice's batch.
            place: index of the slice in the batch.
            exact: its samples in the exact mode.
            one: its samples with the setting that is tried.
        """
        seen = self._seen(batch)[place]
        if bound.against == "exact":
            return seen.psnr_vs_exact_db(exact, one)
        before, after = seen.psnr_db(exact), seen.psnr_db(one)
        if before is not None and after is not None:
            return before - after
        same = seen.psnr_vs_exact_db(exact, one) is None
        return None if same else MOST_DISTANCE_DB  # the loss is unknown, so the bound counts as broken

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Write the results in their format, on rank 0. Return further keyword arguments of `session.finish`.

        Args:
            done: the finished job.
        """
        values, images = self.session.prepared.values, self.session.images
        progress, found = reading_bar(not values["quiet"]), []
        files_of = [self._result_files(number, done) for number in range(len(self.tasks))]
        images.mkdir(exist_ok=True)
        for number, task in enumerate(self.tasks):
            files, about = files_of[number], {"version": __version__, "seed": values["seed"]}
            provenance = self._provenance(number, done.configs[number])
            for line in export(task, files, images, provenance, about, progress):
                say(line)
            found += jumps(task, self.presets, files, progress)
            save_previews(task, files, self.presets, images)
        alone = [row for *_, row in done.rows if "samples" in row] if self.tests else []
        if unknown := sum(row["intervals"] is None for row in alone):
            say(f"{unknown} of {len(alone)} results have no intervals: too few voxels like the mask's could be hidden")
        numbers = {task.stack.name: task.stack.numbers for task in self.tasks if len(task.stack) > 1}
        outcomes = [self._outcome(number, done) for number in range(len(self.tasks))]
        deep, volumes = [n for n, task in enumerate(self.tasks) if is_deep(task.stack)], self.volumes.of.values()
        return {
            "pictures": self._pictures(done, files_of, progress),
            "shown": [shown_volume(self.tasks[n], self.presets, files_of[n]) for n in deep],
            "slices": numbers,
            "side": self.plan.side,
            "records": {
                "outcomes": [
                    {"name": task.stack.name, "mask": task.mask.name, **vars(one), "told": str(one)}
                    for task, one in zip(self.tasks, outcomes, strict=True)
                ],
                "inputs": [task.record() for task in self.tasks],
                "volumes": [made.verdict.record(made.task.stack.name, made.task.mask.name) for made in volumes],
                "jumps": found,
            },
        }

    def _outcome(self, number: int, done: JobResult) -> Outcome:
        """Return the outcome of a task: whether its results beat methods without a model, or why that is unknown.

        Args:
            number: the task's index.
            done: the finished job.
        """
        task, volume = self.tasks[number], self.volumes.of.get(number)
        if volume is not None and volume.volume.tested:
            return volume.verdict.outcome
        if volume is None and self.tests:
            masked = [index for index, has_mask in enumerate(task.mask.masked) if has_mask]
            return outcome_of_slices(task, [done.read(number, index, ERRORS) for index in masked])
        why = "as none was wanted" if self.session.prepared.quality is None else "with a bound on quality"
        why = "as one sample is drawn" if self.samples == 1 else why
        return Outcome(reason=f"no test was made on hidden regions, {why}")

    def _pictures(
        self, done: JobResult, files_of: Sequence[Mapping[str, ResultFile]], progress: Progress
    ) -> Iterator[str]:
        """Yield the encoded picture of each slice that the report shows, in order.

        Pictures come from the store. Those of slices that were not planned are made from the results.

        Args:
            done: the finished job.
            files_of: the result files of each task, by preset with an ending.
            progress: shows the progress of writing.
        """
        found = slices_of_report(self.plan, done.rows)
        for place in progress(range(len(found)), "writing the report"):
            number, index = found[place]
            if index in self.plan.shown[number] and self.tasks[number].mask.masked[index]:
                yield done.read(number, index, PICTURE).tobytes().decode()
                continue
            task, names = self.tasks[number], [preset + end for preset in self.presets for end in ("", *BOUNDS)]
            native = {name: files_of[number][name].read(index) for name in names if name in files_of[number]}
            seen = SliceReview(task, index, task.stack.read(index), task.mask.read(index))
            yield encode_picture(seen.picture(self.presets, native), self.plan)


def find_hidden(tasks: Sequence[Task], values: Mapping[str, Any]) -> dict[int, tuple[Hidden, ...]]:
    """Choose the known voxels that are hidden to test restorations, for each volume that is tested.

    Return by the task's index one `Hidden` for each round of the test. A volume in which nothing can be hidden has no
    rounds. Each volume and its mask are read once.

    Args:
        tasks: the tasks of the job.
        values: the options' values; `samples` and `seed` are used.
    """
    return {
        number: task.volume.regions(task.stack.read, values["samples"], values["seed"])
        for number, task in enumerate(tasks)
        if task.volume is not None and task.volume.tested
    }


def groups_of_masks(quality: Quality, tasks: Sequence[Task], exact_slices: int) -> dict[int, SettingGroup]:
    """Return, by the task's index, the group of slices for which a bound on quality chooses one setting.

    A group has the slices under one mask, of all stacks in order. Its batches are filled in later
    (`SettingGroup.take`).

    Args:
        quality: the bound and its candidates.
        tasks: the tasks of the job.
        exact_slices: number of slices of a task that are compared with the exact run in any case; they are checked too.
    """
    of_masks = by_key((task.mask.name, number) for number, task in enumerate(tasks))
    found: dict[int, SettingGroup] = {}
    for mask, numbers in of_masks.items():
        items = [(n, index) for n in numbers for index, masked in enumerate(tasks[n].mask.masked) if masked]
        compared = {(n, index) for n in numbers for index in shown_slices(tasks[n].mask.masked, exact_slices)}
        always = [place for place, item in enumerate(items) if item in compared]
        slices = Slices.chosen(len(items), quality.slices, quality.every, always)
        checked = {items[place]: place for place in slices.checks}
        names = {place: slice_name(tasks[n].stack, index) for (n, index), place in checked.items()}
        found |= dict.fromkeys(numbers, SettingGroup(f"mask {mask}", slices, names, {}, checked))
    return found
