"""The position in denoising: the image, its step, and the call that guidance makes in that step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEW_NOISE = 0.5  # relative distance of two samples at one timestep above which they belong to different images


class StepCounter:
    """The count of runs (images), their denoising steps, and the guidance branches of a step, by the calls of a
    transformer.

    With a pipeline it goes by the scheduler. New timesteps are a new run, another step index is another step, and calls
    at one index are the branches of guidance. Schedulers of second order have an index for each call, and a pipeline's
    `num_timesteps` counts those.

    Without a scheduler it compares each call with the last one. A lower timestep is a new step, a higher one a new run.
    At an equal timestep (several may be rounded to one), a sample that changed is a new step. It is another branch if
    it is unchanged, has another size, or comes with a text that is new in this step. At the first timestep of a run, a
    sample far from the last one is a new run.
    """

    def __init__(self) -> None:
        """Begin with no call of the transformer counted. The first one that is counted begins run 0 at step 0."""
        # Of the current call: run, step and branch, from 0; and the number of this run's calls, including this one.
        self.run, self.step, self.branch, self.calls = -1, -1, 0, 0
        # Noise level of the current call, in the scheduler's units; without a scheduler its timestep, or None.
        self.sigma: float | None = None
        self._sigmas: list[float] = []  # noise levels by step index, read once for each schedule
        self._begins, self._at_first_timestep = True, True
        self._schedule: object = None
        self._index: int | None = None
        self._timestep: Tensor | None = None
        self._sample: Tensor | None = None
        self._texts: list[Tensor | None] = []  # texts of the current step's calls

    @property
    def here(self) -> str:
        """The current call in words, such as "call 3 of image 1", for messages. It is the same on all ranks."""
        return f"call {self.calls} of image {self.run + 1}"

    def new_run(self) -> None:
        """Have the next call begin a new run, whatever its timestep and sample are."""
        self._begins = True

    def call(self, timestep: Tensor | None, sample: Tensor, text: Tensor | None = None, scheduler: Any = None) -> None:
        """Count a call of the transformer: set `run`, `step`, `branch`, `calls` and `sigma` to those of the call.

        Args:
            timestep: of any shape; the largest counts, since tokens of a given frame have 0.
            sample: the tensor that is denoised, of any shape.
            text: the prompt's embeddings, of any shape; None if the model has none.
            scheduler: the pipeline's scheduler; None for a bare transformer.
        """
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
            # If the scheduler counts, samples are not compared.
            self._sample, self._texts = (sample.detach().clone() if index is None else None), []
        self._texts.append(text)

    def _count(self, kind: str) -> None:
        """Update the counts for a call that begins a new "run", a new "step" or another guidance "branch"."""
        self.calls += 1
        if kind == "run":
            self.run, self.step, self.branch, self.calls = self.run + 1, 0, 0, 1
            self._at_first_timestep = True
        elif kind == "step":
            self.step, self.branch = self.step + 1, 0
        else:
            self.branch += 1

    def _read_sigma(self, timestep: Tensor | None, scheduler: Any) -> None:
        """Set `sigma` to the call's noise level: the scheduler's, or without a scheduler that counts steps the
        timestep.

        Args:
            timestep: the call's timestep, or None.
            scheduler: the pipeline's scheduler, or None.
        """
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
        """Return what a call begins, by comparing it with the last one, where no scheduler counts: "run", "step" or
        "branch".

        Args:
            timestep: the call's timestep, or None.
            sample: the tensor that is denoised.
            text: the prompt's embeddings, or None.
        """
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
    """Return True if two tensors are equal, or both None."""
    return one is other or (one is not None and other is not None and torch.equal(one, other))
