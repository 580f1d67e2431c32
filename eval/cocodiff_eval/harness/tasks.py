"""The tasks of a job: stacks of slices with their masks, how much work they are, and the files of their results."""

from __future__ import annotations

import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cocodiff.comm.launch import Launch, detect
from cocodiff.config.errors import UserError
from cocodiff.config.files import is_there
from cocodiff.jobs.terminal import reading_bar, say
from cocodiff_eval.data.formats import result_format, write_volume
from cocodiff_eval.data.intensity import IntensityRange, compare_truth, intensity_range, parse_range
from cocodiff_eval.data.masks import Mask, make_mask, nothing_masked
from cocodiff_eval.data.reoriented import AXES
from cocodiff_eval.data.slices import open_stacks, open_truth, unique_names
from cocodiff_eval.data.volume import NewVolume, Part, Progress, Reader, Stack
from cocodiff_eval.harness.items import count_batches
from cocodiff_eval.harness.partition import own_pixels
from cocodiff_eval.harness.pipelines import Request
from cocodiff_eval.harness.quality import Quality
from cocodiff_eval.harness.session import Prepared, start_job
from cocodiff_eval.harness.volume import Volume, axes_of, volume_of
from cocodiff_eval.quality.fusing import samples_along
from cocodiff_eval.restore.pipeline_inpainter import SMALL_MODEL
from cocodiff_eval.restore.tiling import plan_restoration

SHOWN = 12  # most numbers of slices that a message lists
BOUNDS = ("_low_90", "_high_90")  # added to a preset's name: files of both ends of the 90 % intervals
SPREAD = "_spread"  # added to a preset's name: file of the standard deviation of samples
BESIDE = (*BOUNDS, SPREAD)  # endings of files that are 0 outside the mask
MASK = "mask"  # takes the place of the preset in the name of a mask's file
# Most bytes of a stack's and a mask's name together. Slice, preset and suffix are added, and file systems take 255.
LONGEST_STEM = 210
COUNTED = 9  # number of slices along an axis whose tiles are counted, to estimate the tiles of all slices
# For every 4 samples of a slice, one is added in which known voxels are hidden too, to calibrate intervals; at most 4.
TESTED, MOST_TESTS = 4, 4
TOGETHER = 8  # most slices in a batch; more save little time per call, and leave replicas idle at a stack's end


@dataclass(frozen=True)
class FileNames:
    """The names of a task's result files, in which the names of its stack and mask are unique in a run."""

    stack: str  # the stack's part of file names
    mask: str  # the mask's part of file names

    def result(self, preset: str, suffix: str = ".tif") -> str:
        """Return the name of the file that holds a preset's results.

        Args:
            preset: the preset's name, which may have an ending such as SPREAD.
            suffix: the file's suffix, by its format.
        """
        return f"{self.stack}_{self.mask}_{preset}{suffix}"

    def preview(self, place: str, preset: str) -> str:
        """Return the name of the PNG preview of a slice.

        Args:
            place: "[3]" for slice 3 of a stack; empty for a single slice.
            preset: the preset's name.
        """
        return f"{self.stack}{place}_{self.mask}_{preset}.png"


@dataclass(frozen=True)
class Task:
    """The restoration of one stack of slices under one mask."""

    stack: Stack  # the slices to restore, along z
    mask: Mask  # the voxels to restore
    scale: IntensityRange  # range of the known intensities
    truth: Stack | None  # the original; None if it is unknown
    files: FileNames  # names of the files of results
    format: str = "tiff"  # format of the results, a key of `cocodiff_eval.data.formats.FORMATS`
    volume: Volume | None = None  # restoration along several axes; None: slice by slice along z
    steps: int = 0  # number of denoising steps

    @property
    def left(self) -> list[int]:
        """The numbers, from the input's start, of slices that stay as they are because they are masked wholly."""
        return [self.stack.numbers[index] for index in sorted(self.mask.full)]

    def record(self) -> dict[str, Any]:
        """Return the task's entry in `inputs` of metrics.json, which also has the names of the stack and the mask.

        - `slices`: numbers of the first slice and of the one after the last; None for a single slice.
        - `range`: the intensities that are normalised to 0 and 1.
        - `extremes`: smallest and largest known intensity.
        - `beyond`: number of known voxels outside the range.
        - `wholly_masked`: numbers of slices that are masked wholly.
        - `remarks`: lines on the mask.
        """
        numbers, scale = self.stack.numbers, self.scale
        return {
            "name": self.stack.name,
            "mask": self.mask.name,
            "slices": [numbers.start, numbers.stop] if self.stack.ndim == 3 else None,
            "range": [scale.low, scale.high],
            "extremes": [*(scale.extremes or (scale.low, scale.high))],
            "beyond": scale.beyond,
            "wholly_masked": self.left,
            "remarks": [*self.mask.remarks],
        }

    def remarks(self) -> list[str]:
        """Return lines that tell the user what is unusual about the input and its mask."""
        scale, kept, found = self.scale, self.stack.metadata, list[str]()
        if self.left:
            shown = ", ".join(map(str, self.left[:SHOWN])) + (", ..." if len(self.left) > SHOWN else "")
            why = "which leaves nothing to restore from: left as in the input"
            found.append(f"{len(self.left)} slice(s) masked wholly, {why} ({shown})")
        if kept.kind == "tiff" and kept.axes[:1] == "S" and len(self.stack) > 1:
            found.append(
                f"the file's axes are {kept.axes}, samples in the place of slices: {len(self.stack)} of them are "
                "restored like slices of one stack, with one range of intensities; --slices 0:1 takes the first"
            )
        size = kept.voxel_size
        if self.volume is not None and self.volume.axes != ("z",) and size is not None and len({*size}) > 1:
            sides = " x ".join(f"{side:g}" for side in size)
            how = "slices along each axis are restored as they are stored, with unequal sides of voxels"
            found.append(f"voxels of {sides} {kept.unit}: {how}")
        if scale.low == scale.high:
            found.append(f"all known voxels are {scale.low:.9g}: so is the result, without a PSNR")
        if scale.extremes is not None:
            low, high = scale.extremes
            found.append(
                f"intensities from {scale.low:.9g} to {scale.high:.9g}; {scale.beyond:,} known voxel(s) lie "
                f"beyond: --range {low:.9g},{high:.9g} takes them in"
            )
        others = [*self.mask.remarks, *(self.truth.metadata.remarks if self.truth is not None else ())]
        return [*kept.remarks, *others, *(f"{self.stack.name}, mask {self.mask.name}: {one}" for one in found)]


def start_slices(prepared: Prepared, launch: Launch, say_time: Callable[[Prepared, Launch, int], None]) -> int:
    """Find the tasks of a job on slices, divide its ranks for them, and start it. Return the command's exit code.

    Raise UserError for inputs that cannot be used, and for ranks that cannot be divided.

    Args:
        prepared: the job, with one replica.
        launch: how this process was started.
        say_time: prints, in a dry run, how long the job takes, given the denoising steps of all its tiles.
    """
    tasks, values = find_tasks(prepared.values), prepared.values
    for task in tasks:
        check_truth(prepared.quality, task)
    prepared, tile_steps = partitioned(prepared, tasks)
    if tile_steps is not None and launch.kind == "alone" and prepared.quality is None:
        say(told_steps(tile_steps, values["steps"]))
        say_time(prepared, launch, tile_steps)
    job, compared = "cocodiff_eval.harness.slices:SliceJob", values_to_compare(tasks)
    return start_job(prepared, launch, "slices", job, [tasks], compared)


def find_tasks(values: Mapping[str, Any], unmasked: str | None = None) -> list[Task]:
    """Open the inputs, make the masks, and print remarks on them for the user. Return a task for each input and mask.

    Raise UserError for inputs that cannot be used. Nothing is written.

    Args:
        values: the options' values by name.
        unmasked: the mask's name that stands for no mask, in commands that do not restore; else None.
    """
    speaks = detect().speaks
    links, progress = values["follow_links"], reading_bar(not values["quiet"] and speaks)
    given = parse_range(values["range"]) if values.get("range") is not None else None
    stacks = open_stacks(values["input"], links, Part(values.get("slices") or "", values.get("roi") or ""))
    if values["truth"] and len(stacks) > 1:
        raise UserError(f"--truth is the original of one input and {len(stacks)} were given: run them one by one")
    masks = list(dict.fromkeys(values["mask"]))
    if len(masks) == 1 and not is_there(masks[0]):
        masks = list(dict.fromkeys(masks[0].split(",")))
    tasks: list[Task] = []
    for stack in stacks:
        truth = open_truth(values["truth"], stack, links) if values["truth"] else None
        for number, word in enumerate(masks):
            if word == unmasked:
                mask = nothing_masked(stack)
            else:
                along_z = unmasked is None and axes_of(values, stack)[0] == ("z",)
                changed = values.get("grow", 0), values.get("invert")
                mask = make_mask(word, stack, values["seed"], links, progress, along_z, *changed)
            if any(mask.name == task.mask.name for task in tasks if task.stack is stack):
                raise UserError(f"--mask {word}: two masks are called {mask.name}: rename file {number + 1}")
            scale = intensity_range(stack, mask, progress, given)
            known = None if mask.from_file else stack.as_truth()
            known = known if truth is None else compare_truth(truth.as_truth(), stack, mask, scale, progress)
            volume, mask = volume_of(values, stack, mask)
            files, steps = FileNames(stack.name, mask.name), values.get("steps", 0)
            tasks.append(Task(stack, mask, scale, known, files, volume=volume, steps=steps))
    for line in dict.fromkeys(line for task in tasks for line in task.remarks() if speaks):
        say(line)
    names = file_names([(task.stack.name, task.mask.name) for task in tasks])
    wanted = values.get("format") or "same"
    formats = [result_format(wanted, task.stack) for task in tasks]
    return [replace(task, files=name, format=one) for task, name, one in zip(tasks, names, formats, strict=True)]


def check_truth(quality: Quality | None, task: Task) -> None:
    """Raise UserError if `--quality` bounds the loss against the truth, and a task's truth is unknown.

    Args:
        quality: the option's bound; None without one.
        task: an input under a mask.
    """
    if quality is not None and quality.bound.against == "truth" and task.truth is None:
        raise UserError(
            f"--quality {quality.bound} is a loss against the truth, which mask {task.mask.name} of {task.stack.name} "
            f"hides: name the original with --truth, or give a distance to the exact run, as 50dB"
        )


def partitioned(prepared: Prepared, tasks: Sequence[Task]) -> tuple[Prepared, int | None]:
    """Divide a job's ranks into replicas and guidance branches, by the number of slices to restore.

    Return the job, and for a dry run the denoising steps of all its tiles, else None. Raise UserError if the ranks
    cannot be divided.

    Args:
        prepared: the job.
        tasks: the stacks and their masks.
    """
    values, request = prepared.values, prepared.request
    native = values["tile"] or own_pixels(request)
    tiles, samples, frames = tiles_in_a_call(values["batch"], native), values["samples"], frames_of(values, request)
    together = [slices_together(task.stack.shape[1:], native, tiles, frames) for task in tasks]
    pairs = zip(tasks, together, strict=True)
    counts = [count_batches(sum(task.mask.masked), slices, samples, frames > 1) for task, slices in pairs]
    groups, batch = max(calls for _, calls in counts), tiles if native <= SMALL_MODEL else 1
    steps = count_tile_steps(tasks, values, native) if values["dry_run"] else None
    prepared = prepared.partitioned(
        images=samples * sum(sum(task.mask.masked) for task in tasks),
        batches=sum(batches for batches, _ in counts),
        batch=batch,
        steps=values["steps"] * groups,
        calls=None if steps is None else -(-steps // (batch * values["steps"] * groups)),
    )
    return replace(prepared, inputs=partial(describe_inputs, tasks, values)), steps


# The work of a job ----------------------------------------------------------------------------------------------------


def tiles_in_a_call(wanted: int | None, native: int) -> int:
    """Return the most tiles in one call of the model: 16 for a small one, 2 for a large one, whose memory is short.

    Args:
        wanted: the option `--batch`, which is returned if it is given.
        native: side of a tile in pixels.
    """
    return wanted or (16 if native <= SMALL_MODEL else 2)


def slices_together(shape: Sequence[int], native: int, batch: int, frames: int, most: int = TOGETHER) -> int:
    """Return the number of slices that share calls of the model.

    It is the number of frames of a video model. It is 1 for a large image model. For a small one it is the number of
    slices whose tiles fit in a call.

    Args:
        shape: [Y, X] of a slice.
        native: side of a tile in pixels.
        batch: most tiles in a call.
        frames: most slices in a video; 1 for a model that makes images.
        most: most slices that share calls of a small model.
    """
    if frames > 1:
        return frames
    tiles = math.prod(-(-side // native) for side in shape)
    return min(most, max(1, batch // tiles)) if native <= SMALL_MODEL else 1


def frames_of(values: Mapping[str, Any], request: Request) -> int:
    """Return the most slices that the model restores as one video; 1 for a model that makes images.

    Raise UserError if `--frames` is given for a model that makes images.

    Args:
        values: the options' values, by name.
        request: the model.
    """
    asked = values.get("frames")
    if request.video is None:
        if asked is not None:
            raise UserError(f"--frames {asked}: model {request.model} restores images: leave it away")
        return 1
    return int(asked or request.video.frames)


def count_tests(values: Mapping[str, Any]) -> int:
    """Return the number of calibration samples of each slice: samples that serve only to calibrate its intervals.

    It is 0 for one sample, with a bound on quality, and if `--hidden_test` is given or refused. Volumes restored along
    several axes have a test of their own instead.

    Args:
        values: the options' values, by name.
    """
    calibrates = values["samples"] > 1 and not values["quality"] and values["hidden_test"] is None
    return min(MOST_TESTS, max(1, values["samples"] // TESTED)) if calibrates else 0


def count_tile_steps(tasks: Sequence[Task], values: Mapping[str, Any], native: int) -> int:
    """Return an estimate of the work of a job in each preset: the denoising steps of all tiles, tests included.

    A tile that is restored in n steps counts n. Tiles are counted in a few slices along each axis.

    Args:
        tasks: the stacks and their masks.
        values: the options' values, by name.
        native: side of a tile in pixels.
    """

    def of_slice(task: Task, mask_YX: np.ndarray) -> int:
        """Return the denoising steps of all tiles of one slice in one sample."""
        plan = plan_restoration(mask_YX, native, 1, values["strength"], 8 if native <= SMALL_MODEL else None)
        return plan.tile_steps(task.steps)

    def of_axis(task: Task, read: Reader, axis: str, indices: Sequence[int]) -> float:
        """Return the mean denoising steps of a slice along an axis, over a few of its slices.

        Args:
            task: the volume.
            read: gives a slice of the mask along z; slices along other axes are cut from these.
            axis: "z", "y" or "x".
            indices: the slices along the axis to choose from.
        """
        chosen = [indices[n] for n in np.unique(np.linspace(0, len(indices) - 1, COUNTED).astype(int))]
        if axis == "z":
            return float(np.mean([of_slice(task, read(n)) for n in chosen]))
        place = AXES.index(axis)
        found = np.stack([np.take(read(n), chosen, place - 1) for n in range(len(task.stack))])
        return float(np.mean([of_slice(task, mask_YX) for mask_YX in np.moveaxis(found, place, 0)]))

    total, samples = 0.0, values["samples"]
    for task in tasks:
        volume, slices = task.volume, {"z": np.flatnonzero(task.mask.masked).tolist()}
        if volume is not None:
            slices = {axis: volume.statistics.restorable(axis) for axis in volume.axes}
        slices = {axis: indices for axis, indices in slices.items() if indices}
        drawn = samples_along(samples, dict.fromkeys(slices, 1.0))
        for axis, indices in slices.items():
            read, tests = (task.mask.read, count_tests(values)) if volume is None else (volume.read_mask, 0)
            runs = len(indices) * (drawn[axis] + tests)
            if volume is not None and volume.tested:
                runs += volume.tested_slices(samples) * volume.sampled(samples)
            total += runs * of_axis(task, read, axis, indices)
    return round(total)


def told_steps(tile_steps: int, steps: int) -> str:
    """Return the sentence for the user with the number of tiles that a job restores.

    Args:
        tile_steps: denoising steps of all tiles, as `count_tile_steps` returns it.
        steps: denoising steps of a tile.
    """
    return f"about {-(-tile_steps // steps):,} tiles for the model, at {steps} steps"


# What ranks, and a job that is resumed, must agree on -----------------------------------------------------------------


def values_to_compare(tasks: Sequence[Task]) -> dict[str, str]:
    """Return what ranks have read from the inputs and must agree on, by a phrase for errors: intensity ranges and
    masks.

    Each rank reads the inputs by itself and decides by them; the job's ranks compare these texts when they start.

    Args:
        tasks: the tasks of the job.
    """
    found = {}
    for task in tasks:
        stack, mask = task.stack.name, task.mask
        found[f"intensities of {stack} outside {mask.name}"] = str(task.scale)
        digest = zlib.crc32(bytes(mask.masked))
        found[f"slices of {stack} that {mask.name} masks"] = f"{sum(mask.masked)}, digest {digest:08x}"
    return found


def describe_inputs(tasks: Sequence[Task], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs and options that results of slices depend on, besides presets and steps, as plain data.

    A resumed job compares them. All voxels are read once, for their checksums.

    Args:
        tasks: the tasks of the job.
        values: the options' values, by name.
    """
    described = {name: values[name] for name in ("samples", "exact_slices")} | {"inputs": hash_inputs(tasks)}
    if values["samples"] > 1 or values["keep_samples"] or any(task.volume is not None for task in tasks):
        described |= {name: values[name] for name in ("axes", "hidden_test", "keep_samples")}
    others = [task.format for task in tasks]
    return described if set(others) == {"tiff"} else described | {"formats": others}


def hash_inputs(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Return the record of each task's inputs, one dict a task: hashes of all voxels, and metadata that results keep.

    A run with `resume` compares it with that of the earlier run. Each input is read once, as a whole.

    Args:
        tasks: the tasks of the job.
    """
    used = {id(one): one for task in tasks for one in (task.stack, task.mask, task.truth) if one is not None}
    hashes = {key: _hash_voxels(one) for key, one in used.items()}
    return [
        {
            "name": task.stack.name,
            "mask": task.mask.name,
            **_kept_metadata(task.stack),
            "voxels": hashes[id(task.stack)],
            "hidden": hashes[id(task.mask)],
            "truth": hashes.get(id(task.truth)),
        }
        for task in tasks
    ]


def _kept_metadata(stack: Stack) -> dict[str, Any]:
    """Return the metadata of a volume that its results depend on, by name. The file's path is not included."""
    kept, region = stack.metadata, stack.region
    others = [kept.kind, kept.axes, kept.description, kept.byteorder, kept.attributes]
    return {
        "dtype": str(stack.dtype),
        "voxel size": kept.voxel_size,
        "unit": kept.unit,
        "region": None if region is None else [region.start, region.stop],
        "metadata": hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:16],
    }


def _hash_voxels(slices: Stack | Mask) -> str:
    """Return a hash, 16 hexadecimal digits, of the shape, dtype and all voxels of a volume or mask."""
    found = hashlib.sha256(str(slices.shape).encode())
    for index in range(slices.shape[0]):
        image_YX = slices.read(index)
        found.update(image_YX.dtype.str.encode() + image_YX.tobytes())
    return found.hexdigest()[:16]


# The files of results -------------------------------------------------------------------------------------------------


def file_names(pairs: Sequence[tuple[str, str]]) -> list[FileNames]:
    """Return the parts of file names for each task of a run, in order, so that no two tasks have the same file.

    Names are numbered if two pairs would give the same, such as `a` + `b_c` and `a_b` + `c`. They are cut if they are
    too long for a file system.

    Args:
        pairs: the names of each task's stack and mask.
    """
    fitting = [
        (stack, mask) if len(os.fsencode(f"{stack}_{mask}")) <= LONGEST_STEM else (_cut(stack), _cut(mask))
        for stack, mask in pairs
    ]
    stems = unique_names([f"{stack}_{mask}" for stack, mask in fitting])
    return [FileNames(stack, stem[len(stack) + 1 :]) for (stack, _), stem in zip(fitting, stems, strict=True)]


def _cut(name: str) -> str:
    """Return the name of a stack or mask, cut for file names to half of LONGEST_STEM in bytes."""
    return os.fsencode(name)[: LONGEST_STEM // 2 - 2].decode(errors="ignore")


class ResultFile(NamedTuple):
    """A file of results before it is written: the function that gives its slices, and their dtype."""

    dtype: np.dtype  # dtype of its voxels
    preset: str  # the preset whose results it holds
    read: Reader  # function that returns the slice [Y, X] with an index in the task


def result_files(
    task: Task,
    presets: Sequence[str],
    read: Callable[[str, int], np.ndarray],
    samples: int = 1,
    more: Sequence[str] = (),
) -> dict[str, ResultFile]:
    """Return the files of a task's restored slices, before they are written, by preset with an ending.

    The file with a preset's name holds the mean of its samples. The file with SPREAD added holds their standard
    deviation, float32 in the input's units, and exists for several samples only. A slice without masked voxels is the
    input's; in files that end with one of BESIDE it is 0.

    Args:
        task: the stack and its mask.
        presets: names of the presets.
        read: returns a slice with masked voxels of a file, given the file's name and the slice's index.
        samples: number of samples of each slice.
        more: endings of further files, such as BOUNDS, which are added to each preset's name.
    """
    kinds = {preset: (task.stack.dtype, preset) for preset in presets}
    kinds |= {preset + SPREAD: (np.dtype(np.float32), preset) for preset in presets if samples > 1}
    kinds |= {f"{preset}{one}": (task.stack.dtype, preset) for preset in presets for one in more}

    def slice_of(name: str, index: int) -> np.ndarray:
        """Return slice `index` of the file `name`, [Y, X]."""
        if task.mask.masked[index]:
            return read(name, index)
        return np.zeros(task.stack.shape[1:], kinds[name][0]) if name.endswith(BESIDE) else task.stack.read(index)

    return {name: ResultFile(*kind, partial(slice_of, name)) for name, kind in kinds.items()}


def export(
    task: Task,
    files: Mapping[str, ResultFile],
    folder: Path,
    provenance: Mapping[str, Mapping[str, Any]],
    of_mask: Mapping[str, Any],
    progress: Progress,
) -> list[str]:
    """Write a task's results in its format, slice by slice, and its mask if that is not simply an input file's.

    In Zarr stores the mask is a label image, and the label images of a Zarr input are copied. In other formats it is a
    file of its own, 255 for restored voxels. Return a line for each label image of the input that could not be kept.

    Args:
        task: the stack, its mask and the format.
        files: the files to write, as `result_files` returns them.
        folder: where to write.
        provenance: by preset, how its results were made, for the files' metadata.
        of_mask: how the mask was made, for its metadata.
        progress: wraps the indices of slices to show the progress of writing; see `reading_bar`.
    """
    mask, stack, lost = task.mask, task.stack, list[str]()
    made = not mask.from_file or mask.changed

    def write(
        name: str, like: Stack, dtype: np.dtype, read: Reader, about: Mapping[str, Any], sparse: bool
    ) -> NewVolume:
        """Write one file of results, and return it.

        Args:
            name: the preset with its ending, or MASK, for the file's name.
            like: the stack whose metadata it gets.
            dtype: dtype of its voxels.
            read: gives a slice by its index.
            about: how it was made, for its metadata.
            sparse: True if it is 0 outside the mask.
        """
        about, slices = {**about, "mask": mask.name}, iter(progress(range(len(task.stack)), f"writing {name}"))

        def shown(index: int) -> np.ndarray:
            """Return a slice, and advance the progress by one."""
            next(slices, None)
            return read(index)

        return write_volume(task.format, folder, partial(task.files.result, name), like, dtype, shown, about, sparse)

    for name, file in files.items():
        like = stack.as_map() if name.endswith(SPREAD) else stack
        written = write(name, like, file.dtype, file.read, provenance[file.preset], name.endswith(BESIDE))
        if task.format == "zarr" and name == file.preset:
            from cocodiff_eval.data.labels import write_labels  # imports Zarr's library, which takes a second

            lost += write_labels(written, stack, mask.read if made else None, {**of_mask, "mask": mask.name})
    if (made or mask.full or stack.region is not None) and task.format != "zarr":
        write(MASK, stack.as_map(), np.dtype(np.uint8), lambda index: mask.read(index) * np.uint8(255), of_mask, True)
    return lost


def kept_samples(samples: int) -> list[str]:
    """Return the endings that are added to a preset's name for its samples' files: "_sample_0", "_sample_1" and on.

    `--keep_samples` writes these files beside the samples' mean. A single sample has an ending as well.

    Args:
        samples: number of samples.
    """
    return [f"_sample_{number}" for number in range(samples)]


def slice_name(stack: Stack, index: int) -> str:
    """Return a slice's name, such as "scan[12]"; the stack's name alone for a single slice.

    The number counts from the first slice of the input, also if `--slices` takes a later part of it.

    Args:
        stack: the slices that are restored.
        index: index of the slice in `stack`.
    """
    return stack.name if stack.ndim == 2 else f"{stack.name}[{stack.numbers[index]}]"
