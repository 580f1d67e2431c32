"""The job of `generate`: an image or a video for each prompt, and the files of videos."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from cocodiff.config.errors import UserError
from cocodiff.config.files import flush
from cocodiff.config.packages import hide_broken
from cocodiff.jobs.model_checks import check_sides
from cocodiff.jobs.terminal import say
from cocodiff_eval.data.intensity import IntensityRange
from cocodiff_eval.data.slices import safe_stem, unique_names
from cocodiff_eval.data.tiff import tifffile_library
from cocodiff_eval.harness.items import Batch, ItemSamples, measured
from cocodiff_eval.harness.job import ItemResult, Job, JobResult
from cocodiff_eval.harness.quality import Bound
from cocodiff_eval.harness.session import Session
from cocodiff_eval.quality.fusing import Moments
from cocodiff_eval.quality.metrics import Result, distance_db
from cocodiff_eval.report.pictures import Generated, encode, plan_pictures
from cocodiff_eval.restore.pipeline_inpainter import check_finite, frames_of_latents, made_by, own_size, side_multiple


class ImageJob(Job):
    """The job of `generate`: it makes an image or a video for each prompt. Every prompt is a batch of its own.

    Images are [Y, X, C], videos [F, Y, X, C] with F frames; values are in [0, 1].
    """

    unit = "images"

    def __init__(self, session: Session) -> None:
        """Take the prompts and sizes from the session's options. Raise UserError for sizes that the model would round.

        Print on rank 0, if no MP4 encoder is installed, that videos will only be TIFF stacks.
        """
        self.session, self.presets = session, list(session.prepared.presets)
        self.frames, video = video_frames(session), session.prepared.request.video
        self.fps = session.prepared.values["fps"] or (0 if video is None else video.fps)
        self.sides = image_sides(session, self.frames)
        self.prompts = session.prepared.request.prompts or ("",)
        self.names = unique_names([safe_stem(prompt)[:40] if prompt else "image" for prompt in self.prompts])
        self.batches = [Batch(0, (number,)) for number in range(len(self.prompts))]
        self._advance: Callable[[int], None] = lambda steps: None
        if self.frames is not None:
            self.unit = "videos"
            if session.folder is not None and not has_encoder():
                say("videos are TIFF stacks alone, without an MP4: pip install imageio-ffmpeg brings what writes it")

    def settings(self) -> dict[str, Any]:
        return {"sides": list(self.sides)}

    def watched(self, advance: Callable[[int], None]) -> None:
        self._advance = advance

    def steps(self, batch: Batch) -> int:
        return int(self.session.prepared.values["steps"])

    def make(self, settings: Sequence[str], batch: Batch) -> dict[str, list[ItemSamples]]:
        found = {setting: self._paint(setting, batch.indices[0]) for setting in settings}
        return {setting: [drawn] if self.session.replica.leads else [] for setting, drawn in found.items()}

    def _paint(self, setting: str, prompt: int) -> ItemSamples:
        """Make one image or video, on all ranks of the replica. Raise UserError if it is NaN or Inf.

        Args:
            setting: name of the session's engine that makes it.
            prompt: index of the prompt.
        """
        model, values = self.session.model, self.session.prepared.values
        given = {"height": self.sides[0], "width": self.sides[1], "num_inference_steps": values["steps"]}
        given |= {"output_type": "np"} | ({} if self.frames is None else {"num_frames": self.frames})
        given |= {"generator": torch.Generator("cpu").manual_seed(values["seed"])} | model.arguments(1, prompt)
        with measured(self.session.engines[setting]) as cost:
            made, _ = made_by(model.pipe, values["seed"], partial(self._advance, 1), **given)
        pixels = made[0]
        check_finite(model.pipe, torch.from_numpy(pixels))
        return ItemSamples(Moments.of(pixels.astype(np.float32)), cost)

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        """Return the rows of metrics.json of an image or video, and its 8-bit pixels by preset.

        It has no truth, so the rows compare only with the exact run, if there is one.

        Args:
            batch: the batch, of one prompt.
            place: index of the prompt in the batch, 0.
            drawn: the image or video with each setting.
            exact: name of the exact run; None to compare with none.
        """
        name, rows, compared = self.names[batch.indices[place]], [], None if exact is None else drawn[exact]
        for preset in self.presets:
            told: dict[str, Any] = {**drawn[preset].cost.reported(), "exact_compared": compared is not None}
            if compared is not None:
                told["psnr_vs_exact_db"] = psnr_vs_exact_db(compared, drawn[preset])
                told["bytes_exact"] = compared.cost.bytes
            rows.append(Result(name, None, preset, **told).row())
        pixels8 = {preset: np.rint(image01(drawn[preset]) * 255).astype(np.uint8) for preset in self.presets}
        return ItemResult(rows, pixels8)

    def _write(self, name: str, pixels8: np.ndarray) -> None:
        """Write an image as PNG, or a video as a TIFF stack and, if it can be encoded, as MP4.

        Args:
            name: the file's name without its suffix.
            pixels8: uint8 [Y, X, C], or [F, Y, X, C] for a video of F frames.
        """
        if self.frames is None:
            path = self.session.images / f"{name}.png"
            Image.fromarray(pixels8).save(path, "PNG")
            flush(path)
            return
        save_frames(self.session.images / f"{name}.tif", pixels8)
        if has_encoder():
            save_mp4(self.session.images / f"{name}.mp4", pixels8, self.fps)

    def name(self, number: int) -> str:
        return self.names[number]

    def figure_db(self, bound: Bound, batch: Batch, place: int, exact: ItemSamples, one: ItemSamples) -> float | None:
        return psnr_vs_exact_db(exact, one)

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Write the images or videos of all presets. Return further keyword arguments of `session.finish`, for the
        report.

        Args:
            done: the finished job.
        """
        plan = plan_pictures([[True] * len(self.prompts)], len(self.presets))
        self.session.images.mkdir(exist_ok=True)
        for number, preset in product(range(len(self.prompts)), self.presets):
            self._write(f"{self.names[number]}_{preset}", done.read(0, number, preset))
        return {
            "pictures": (encode(self._shown(done, number), plan.side, plan.share) for number in sorted(plan.shown[0])),
            "title": f"Generated {self.unit}",
            "prompts": dict(zip(self.names, self.prompts, strict=True)),
            "side": plan.side,
            "frames": self.frames,
        }

    def _shown(self, done: JobResult, number: int) -> Generated:
        """Return one prompt's image with each preset as the report shows it. A video is shown as a few frames.

        Args:
            done: the finished job.
            number: index of the prompt.
        """
        found = {preset: done.read(0, number, preset) for preset in self.presets}
        if self.frames is not None:
            found = {preset: shown_frames(frames_FYXC) for preset, frames_FYXC in found.items()}
        return Generated(self.names[number], found)


def video_frames(session: Session) -> int | None:
    """Return the number of frames of each video to generate; None if the model makes images.

    It is the option's, or else the model's own. Raise UserError for a number that the model would round.
    """
    request, asked = session.prepared.request, session.prepared.values["frames"]
    if request.video is None:
        return None
    frames, each = asked or request.video.frames, frames_of_latents(session.model.pipe)
    if frames % each != 1:
        near = frames // each * each + 1
        raise UserError(f"--frames {frames}: model {request.model} makes {each} n + 1 of them; give {near}")
    return int(frames)


def image_sides(session: Session, frames: int | None) -> tuple[int, int]:
    """Return height and width, in pixels, of the images or videos to generate: the options', or else the model's own.

    Raise UserError for sides that the model would round.

    Args:
        session: the job on its ranks.
        frames: number of frames of each video; None for images.
    """
    pipe, values, video = session.model.pipe, session.prepared.values, session.prepared.request.video
    own = [own_size(pipe)] * 2 if video is None else [video.height, video.width]
    height, width = values["height"] or own[0], values["width"] or own[1]
    check_sides(pipe, height, width, session.model.name, frames or 1, multiple=side_multiple(pipe))
    return height, width


def image01(drawn: ItemSamples) -> np.ndarray:
    """Return the pixels of a generated image or video: float32 [Y, X, C] or [F frames, Y, X, C], in [0, 1]."""
    return drawn.moments.mean_YX.astype(np.float32)


def psnr_vs_exact_db(exact: ItemSamples, one: ItemSamples) -> float | None:
    """Return the PSNR in dB of a generated image or video against the exact run's; None if all bits are equal.

    Args:
        exact: the exact run's.
        one: the one to judge.
    """
    images = image01(exact), image01(one)
    return distance_db(IntensityRange(0.0, 1.0), *images, np.ones(images[0].shape, bool))


# Videos: all frames in a TIFF stack, and an MP4 to look at where imageio-ffmpeg is installed --------------------------


def has_encoder() -> bool:
    """Return True if imageio-ffmpeg can be imported, which writes MP4 files."""
    hide_broken("imageio_ffmpeg")
    return find_spec("imageio_ffmpeg") is not None


def save_frames(path: Path, frames_FYXC: np.ndarray) -> None:
    """Write a video's frames as a compressed TIFF stack, without loss. Return when it is on the disk.

    Args:
        path: the file.
        frames_FYXC: uint8 [frames, Y, X, C], in RGB.
    """
    tifffile_library().imwrite(path, frames_FYXC, photometric="rgb", compression="zlib", metadata={"axes": "TYXS"})
    flush(path)


def save_mp4(path: Path, frames_FYXC: np.ndarray, fps: int) -> None:
    """Write a video's frames as an MP4, with loss. Return when it is on the disk.

    Args:
        path: the file.
        frames_FYXC: uint8 [frames, Y, X, C], in RGB.
        fps: frames per second.
    """
    from imageio_ffmpeg import write_frames

    height, width = frames_FYXC.shape[1:3]
    writer = write_frames(str(path), (width, height), fps=fps, quality=8)
    writer.send(None)
    for frame_YXC in frames_FYXC:
        writer.send(np.ascontiguousarray(frame_YXC))
    writer.close()
    flush(path)


def shown_frames(frames_FYXC: np.ndarray) -> np.ndarray:
    """Return a picture [Y, X, C] of four frames of a video in two rows, evenly spread from the first to the last.

    If there are fewer than four, return the middle one.
    """
    count = len(frames_FYXC)
    if count < 4:
        return frames_FYXC[count // 2]
    four = [frames_FYXC[round(place * (count - 1) / 3)] for place in range(4)]
    return np.concatenate([np.concatenate(four[row : row + 2], axis=1) for row in (0, 2)])
