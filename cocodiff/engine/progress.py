"""Where denoising stands: which image, which of its steps, which of the calls that guidance makes in one step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEW_NOISE = 0.5  # relative distance of two samples at one timestep above which they belong to different images


class StepCounter:
    """Counts runs (images), their steps, and the branches of a step, call by call of a transformer.

    A pipeline's scheduler tells: new timesteps are a new run, another step index is another step, and calls at one
    index are the branches of guidance. Schedulers of second order have an index for each call, and a pipeline's
    `num_timesteps` counts those.

    Where no scheduler moves, the calls themselves tell. A lower timestep is a new step, a higher one a new run. At
    the same timestep, which is what several become when they are rounded, a sample that moved is a new step; one that
    did not, that has another size, or that comes with a text which the step has not seen, is another branch. As long
    as a run is at its first timestep, a sample that has nothing to do with the last one is a new run.

    run, step, branch: of the current call, from 0. calls: of this run, the current one included. sigma: the noise level
    of the current call, in the scheduler's units; its timestep where no scheduler counts, None where it has none."""

    def __init__(self) -> None:
        self.run, self.step, self.branch, self.calls = -1, -1, 0, 0
        self.sigma: float | None = None
        self._sigmas: list[float] = []  # of the scheduler, read once for each of its schedules
        self._begins, self._at_first_timestep = True, True
        self._schedule: object = None
        self._index: int | None = None
        self._timestep: Tensor | None = None
        self._sample: Tensor | None = None
        self._texts: list[Tensor | None] = []  # of the current step's calls

    @property
    def here(self) -> str:
        """The current call in words, alike on all ranks: the same call has the same words."""
        return f"call {self.calls} of image {self.run + 1}"

    def new_run(self) -> None:
        """The next call begins a run, whatever it looks like."""
        self._begins = True

    def call(self, timestep: Tensor | None, sample: Tensor, text: Tensor | None = None, scheduler: Any = None) -> None:
        """timestep: of any shape; the largest counts, since tokens of a given frame have 0. sample, text: what is
        denoised, and the prompt's embeddings, of any shape. scheduler: None for a bare transformer."""
        schedule, index = getattr(scheduler, "timesteps", None), getattr(scheduler, "step_index", None)
        if self._begins or schedule is not self._schedule:
            kind = "run"
        elif index != self._index:
            kind = "step" if (index or 0) > (self._index or 0) else "run"
        else:
            kind = self._kind_of_call(timestep, sample, text)
        self._count(kind)
        self._read_sigma(timestep, scheduler)
        self._begins, self._schedule, self._index = False, schedule, index
        # Copies, since a loop may change its tensors in place.
        self._timestep = None if timestep is None else timestep.detach().max()
        if kind != "branch" or index is not None:
            # Where the scheduler moves, no sample need be looked at.
            self._sample, self._texts = (sample.detach().clone() if index is None else None), []
        self._texts.append(text)

    def _count(self, kind: str) -> None:
        self.calls += 1
        if kind == "run":
            self.run, self.step, self.branch, self.calls = self.run + 1, 0, 0, 1
            self._at_first_timestep = True
        elif kind == "step":
            self.step, self.branch = self.step + 1, 0
        else:
            self.branch += 1

    def _read_sigma(self, timestep: Tensor | None, scheduler: Any) -> None:
        schedule = getattr(scheduler, "timesteps", None)
        if schedule is None or not hasattr(scheduler, "step_index"):
            self.sigma = None if timestep is None else float(timestep.max())
            return
        if schedule is not self._schedule:
            sigmas = getattr(scheduler, "sigmas", None)
            self._sigmas = torch.as_tensor(schedule if sigmas is None else sigmas).tolist()
        index = scheduler.step_index
        if index is None:  # before the first step
            index = getattr(scheduler, "begin_index", None) or 0
        self.sigma = self._sigmas[index]

    def _kind_of_call(self, timestep: Tensor | None, sample: Tensor, text: Tensor | None) -> str:
        """Whether a call that the scheduler does not tell from the last one is a new "run", "step" or "branch"."""
        if timestep is not None and self._timestep is not None:
            change = float(timestep.max()) - float(self._timestep)
            if change:
                self._at_first_timestep = False
                return "step" if change < 0 else "run"
        if self._sample is None or self._sample.shape != sample.shape:
            return "branch"
        last = self._sample.float()
        distance = float((sample.float() - last).norm() / last.norm())
        if self._at_first_timestep and distance > NEW_NOISE:
            return "run"
        return "step" if distance and any(same(text, seen) for seen in self._texts) else "branch"


def same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))
