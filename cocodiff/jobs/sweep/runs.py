"""The job of a sweep: every point on every masked slice at each number of steps, beside the exact run of the same
slice. Its journal is `results.jsonl` (`lines.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cocodiff_eval.intensity import compose_native, prepare_slice
from cocodiff_eval.metrics import Result, masked_quality

from cocodiff.config import Config
from cocodiff.console.options import engine_record, engine_settings
from cocodiff.engine import Engine
from cocodiff.jobs.items import Batch, Drawn
from cocodiff.jobs.job import Job, Judged, Modes
from cocodiff.jobs.judging import Seen, psnr_vs_exact_db
from cocodiff.jobs.replicas import Queue, Replica
from cocodiff.jobs.restoring import Restorer
from cocodiff.jobs.running import Presets, make_batches
from cocodiff.jobs.session import EXACT, load_requested
from cocodiff.jobs.sweep.lines import Key, SweepRecord, count_lines
from cocodiff.jobs.sweep.points import Point, Sweep
from cocodiff.jobs.tasks import slice_name

EXACT_RUN = ""  # a name that no point has


def run_sweep(sweep: Sweep, transport: Any) -> None:
    """Does what is missing. All ranks call it; each replica takes slices, and its leader judges and writes."""
    values, speaks = sweep.values, transport.rank == 0
    batches = list(runs_of(sweep))
    keys = [Key(one.point.name, one.steps, sweep.tasks[one.task].mask.name, one.slice) for one in batches]
    record = SweepRecord(values["out"], sweep.settings, values["overwrite"], keys)
    replica, points = Replica(transport, values["machine"], sweep.deal.replicas), len(sweep.grid.points)
    queue = Queue(replica, record, [1] * len(keys), "runs", speaks and not values["quiet"], together=points)
    missing = [number for number in range(len(keys)) if not queue.is_done(number)]
    if missing:
        model = load_requested(sweep.request, values["dtype"], transport)
        job = SweepJob(sweep, batches, model, replica, speaks)
        transport.broadcast_object(None)  # all ranks have their model
        if speaks:
            replica.say_ready(sweep.started)
        with torch.no_grad(), queue:
            job.watched(queue.bar.advance)
            job.warm_up([batches[number] for number in missing])
            make_batches(job, queue, BesideExact(job.configs, EXACT_RUN), replica.leads)
    if speaks:
        record.end()
    transport.broadcast_object(None)


@dataclass(frozen=True, kw_only=True)
class PointRun(Batch):
    """A point on a slice at a number of steps. slice: its name."""

    steps: int
    slice: str
    point: Point


def runs_of(sweep: Sweep) -> Iterator[PointRun]:
    """All runs, the same on every rank. All points of a slice come together: its exact run is made once, and a machine
    that gets slower with time does so for all points."""
    for number, task in enumerate(sweep.tasks):
        for index in range(len(task.stack)):
            if not task.mask.read(index).any():
                continue
            name = slice_name(task.stack, index)
            for steps in sweep.grid.steps:
                for point in sweep.grid.points:
                    yield PointRun(number, (index,), steps=steps, slice=name, point=point)


class BesideExact(Presets):
    """Every point beside the exact run, which a point with the same settings is itself."""

    def of(self, batch: PointRun) -> Modes:
        name = batch.point.name
        same = batch.point.config == self.presets[EXACT_RUN]
        return Modes({EXACT_RUN: EXACT_RUN, name: EXACT_RUN if same else name}, EXACT_RUN)


class SweepJob(Job[PointRun]):
    """The model and the engines of one rank, on the ranks of its replica. Points with the same settings share an
    engine. speaks: whether this rank says what is done."""

    unit = "runs"

    def __init__(self, sweep: Sweep, batches: Sequence[PointRun], model: Any, replica: Replica, speaks: bool) -> None:
        self.sweep, self.batches, self.model, self.replica, self.speaks = sweep, batches, model, replica, speaks
        exact = engine_record().preset(EXACT, **engine_settings(sweep.values))
        self.configs = {EXACT_RUN: exact, **{point.name: point.config for point in sweep.grid.points}}
        self._folder = Path(sweep.values["out"]).resolve()
        self._engines: dict[Config, Engine] = {}
        self._restorers: dict[int, Restorer] = {}
        self._advance: Callable[[int], None] = lambda steps: None
        self._seen: Seen | None = None
        self._exact: tuple[object, list[Drawn]] = (None, [])  # of the slice and the steps that it was made for

    def watched(self, advance: Callable[[int], None]) -> None:
        self._advance = advance

    def steps(self, batch: PointRun) -> int:
        return self._restorer(batch).tile_steps([self.seen(batch).mask_YX])

    def seen(self, batch: PointRun) -> Seen:
        """The slice of a run, which is read once for all its points."""
        task, index = self.sweep.tasks[batch.task], batch.indices[0]
        if self._seen is None or self._seen.task is not task or self._seen.index != index:
            self._seen = Seen(task, index, task.stack.read(index), task.mask.read(index))
        return self._seen

    def _restorer(self, batch: PointRun) -> Restorer:
        if batch.steps not in self._restorers:
            self._restorers[batch.steps] = Restorer.of_model(self.model, self.sweep.values, batch.steps, {})
            self._restorers[batch.steps].inpainter.on_step = self._advance
        return self._restorers[batch.steps]

    def _engine(self, config: Config) -> Engine:
        """Every rank asks for engines in the same order."""
        if config not in self._engines:
            self._engines[config] = Engine(self.model.pipe, config, self.replica.transport)
        return self._engines[config]

    def warm_up(self, missing: Sequence[PointRun]) -> None:
        """A short run in every mode, so that no result pays for first allocations and connections."""
        configs = {run.point.config for run in missing}
        for name, config in self.configs.items():
            if (name == EXACT_RUN or config in configs) and config not in self._engines:
                self._restore(name, replace(missing[0], steps=1))

    def make(self, settings: Sequence[str], batch: PointRun) -> dict[str, list[Drawn]]:
        """The exact run is kept for as long as points of its slice come."""
        made: dict[str, list[Drawn]] = {}
        for setting in settings:
            slice_and_steps = (batch.task, batch.indices, batch.steps)
            if setting != EXACT_RUN:
                made[setting] = self._restore(setting, batch)
            elif self._exact[0] != slice_and_steps:
                self._exact = (slice_and_steps, self._restore(setting, batch))
            else:
                self._advance(self.steps(batch))
        return {EXACT_RUN: self._exact[1], **made}

    def _restore(self, setting: str, batch: PointRun) -> list[Drawn]:
        seen, restorer = self.seen(batch), self._restorer(batch)
        prepared_YX = prepare_slice(seen.original_YX, seen.mask_YX, seen.task.scale)
        own = replace(restorer, engines={setting: self._engine(self.configs[setting])})
        return own.draw(batch, [prepared_YX], [seen], setting, self.replica.leads)

    def judge(self, batch: PointRun, place: int, drawn: Mapping[str, Drawn], exact: str | None) -> Judged:
        assert exact is not None, "a sweep compares with the exact run"
        return Judged([result_line(self.seen(batch), batch, drawn[batch.point.name], drawn[exact])])

    def write(self, batch: PointRun, place: int, result: None) -> None:
        """The line is all that is written, and the journal's."""

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str | None:
        if not self.speaks:
            return None
        (line,), lines = rows, self.sweep.settings["lines"]
        shown = "" if line["psnr_db"] is None else f" {line['psnr_db']:.2f} dB,"
        key = f"{line['point']}, {line['steps']} steps, {line['mask']}, {line['slice']}"
        return f"{count_lines(self._folder)}/{lines}  {key}:{shown} {line['seconds']:.1f} s"


def result_line(seen: Seen, one: PointRun, run: Drawn, exact: Drawn) -> dict[str, Any]:
    """A line of results.jsonl. `bytes` are of q, k, v and o; `bytes_whole` what they would have been with all tokens as
    they are; `bytes_late` those that no call of attention waited for, where `arrival` is not now; `coding` is what
    travels in their place: full, v_major, or a codec. `psnr_vs_exact_db` is null where every bit is the exact run's;
    `exact` is that run's own quality, seconds and bytes; `drift` is `Engine.drift_profile()` of this run alone."""
    task, mask_YX, config = seen.task, seen.mask_YX, one.point.config

    def judged(of: Drawn) -> Result:
        native_YX = compose_native(seen.original_YX, of.restored01_YX, mask_YX, task.scale)
        measured = masked_quality(task.scale, seen.truth_YX, native_YX, mask_YX)
        return Result(one.slice, task.mask.name, one.point.name, **measured, **of.cost.reported())

    return {
        "point": one.point.name,
        "settings": one.point.settings,
        "coding": config.selection if config.codec == "none" else config.codec,
        "arrival": config.arrival,
        "steps": one.steps,
        "mask": task.mask.name,
        "slice": one.slice,
        **judged(run).of_run(),
        "psnr_vs_exact_db": psnr_vs_exact_db(task.scale, exact, run, mask_YX),
        "exact": judged(exact).of_run(),
        "drift": run.cost.drift,
    }
