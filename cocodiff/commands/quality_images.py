"""A bound on quality for generated images: one setting for all prompts, tried and checked on some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cocodiff_eval.uncertainty import Moments

from cocodiff.commands.bound import Slices
from cocodiff.commands.generate import Image, judge, paint, psnr_vs_exact_db, save
from cocodiff.commands.quality import Figure, Group, Quality, Trials
from cocodiff.commands.replicas import Queue
from cocodiff.commands.samples import Batch, Drawn, PartsOfSettings
from cocodiff.commands.session import Session

EXACT = "exact run"


@dataclass(frozen=True)
class ChosenImages:
    """With which setting images are made. kept: the prompts whose trials are their results."""

    quality: Quality
    group: Group
    trials: PartsOfSettings
    kept: frozenset[int]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self.group.record(self.quality)]

    @property
    def setting(self) -> str:
        return [*self.quality.rungs][self.group.taken]

    @property
    def modes(self) -> dict[str, str]:
        """For the images that are left: the preset, and the setting that it is made with."""
        return {self.quality.preset: self.setting}

    @property
    def exact(self) -> str | None:
        """What those are compared with: themselves, if they are made exactly."""
        return self.quality.preset if self.setting == self.quality.exact else None

    def put_together(self, session: Session, names: Sequence[str], rows: list[Any]) -> list[Any]:
        """Saves and judges the images that were kept. Returns the rows of metrics.json, those of the other images
        among them, in the order of prompts."""
        of_images = {row["name"]: [row] for row in rows}
        for number in sorted(self.kept):
            images = {
                mode: read(self.trials, setting, number)
                for mode, setting in {self.quality.preset: self.setting, EXACT: self.quality.exact}.items()
            }
            save(session, names[number], images)
            of_images[names[number]] = judge(session, names[number], images, EXACT)
        return [row for name in names for row in of_images[name]]


def read(trials: PartsOfSettings, setting: str, number: int) -> Image:
    drawn = trials.merged(setting, [batch_of(number)], number)
    return Image(drawn.restored01_YX.astype(np.float32), drawn.cost)


def tried(session: Session, rung: int, number: int) -> bool:
    """Whether what an earlier start has made of an image with a setting is there, whole."""
    assert session.job.quality is not None, "a bound is asked for"
    settings = [*session.job.quality.rungs]
    parts = PartsOfSettings(session.job.output.journals.folder, settings).of[settings[rung]]
    return parts.holds(batch_of(number), [settings[rung]])


def batch_of(number: int) -> Batch:
    return Batch(0, (number,), True)


def choose(session: Session, queue: Queue, names: Sequence[str], sides: tuple[int, int]) -> ChosenImages:
    """Chooses a setting, on all ranks alike, and keeps the images that were made meanwhile."""
    quality, replica = session.job.quality, session.replica
    assert quality is not None, "a bound is asked for"
    slices = Slices.chosen(len(names), quality.slices, quality.every)
    checked = {number: (number,) for number in slices.checks}
    group = Group("images", slices, dict(enumerate(names)), checked)
    trials = PartsOfSettings(queue.journals.folder, [*quality.rungs])

    def make(setting: str, number: int) -> None:
        queue.bar.begin(1, session.job.values["steps"])
        image = paint(session, setting, number, sides, queue.bar)
        if replica.leads:
            drawn = Drawn(Moments.of(image.image01_YXC), image.cost)
            trials.of[setting].keep(batch_of(number), {setting: [drawn]})

    def measure(_: Group, setting: str, numbers: Sequence[int]) -> dict[int, Figure]:
        figures = {}
        for number in numbers:
            exact, image = (read(trials, name, number) for name in (quality.exact, setting))
            figures[number] = Figure.of(psnr_vs_exact_db(exact, image), image.cost)
        return figures

    made = Trials(quality, queue, len(names), make, measure)
    made.begin(session.transport, trials)
    kept = made.settle([group], session.transport, replica.leads)
    return ChosenImages(quality, group, trials, kept)
