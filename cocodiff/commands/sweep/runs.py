"""A sweep on its ranks: what is not done yet, run by run, each against the exact run of the same slice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from cocodiff_eval.intensity import compose_native, prepare_slice
from cocodiff_eval.metrics import Result

from cocodiff.commands.journal import Journals
from cocodiff.commands.judging import Run, psnr_vs_exact_db, quality
from cocodiff.commands.modes import EXACT
from cocodiff.commands.options import engine_record, engine_settings
from cocodiff.commands.pipelines import Model
from cocodiff.commands.replicas import Replica
from cocodiff.commands.restoring import Restorer
from cocodiff.commands.session import load_requested
from cocodiff.commands.sweep.lines import Key, LineWriter, ReplicaLines, count_lines
from cocodiff.commands.sweep.points import Point
from cocodiff.commands.tasks import Task, slice_name
from cocodiff.commands.terminal import JobBar, say
from cocodiff.config import Config
from cocodiff.engine import Engine

if TYPE_CHECKING:
    from cocodiff.commands.sweep.command import Sweep

EXACT_RUN = "exact run"


@dataclass(frozen=True)
class Slice:
    """A slice under a mask at a number of steps, with the points that have no line for it yet."""

    task: Task
    index: int
    steps: int
    points: list[Point]

    @property
    def name(self) -> str:
        return slice_name(self.task.stack, self.index)


def run_sweep(sweep: Sweep, transport: Any) -> None:
    """Does what is missing. All ranks call it; each replica takes slices, and its leader judges and writes."""
    values = sweep.values
    writer = LineWriter(values["out"], sweep.settings, values["overwrite"]) if transport.rank == 0 else None
    done: set[Key] = transport.broadcast_object(writer.done if writer else None)
    missing = list(missing_slices(sweep, done))
    if writer is not None and done:
        say(f"{len(done)} of {sweep.settings['lines']} runs are done already")
    if missing:
        replica = Replica(transport, values["machine"], sweep.deal.replicas)
        claims = Journals(Path(values["out"]).resolve())
        if transport.rank == 0:
            claims.open_claims()
        transport.broadcast_object(None)
        replica.check_shared(claims, values["out"])
        lines = writer or (ReplicaLines(values["out"], transport.rank) if replica.leads else None)
        model = load_requested(sweep.request, values["dtype"], transport)
        runner = Runner(sweep, model, replica.transport, lines, transport.rank == 0)
        transport.broadcast_object(None)  # all ranks have their model
        if writer is not None:
            in_replicas = f" in {replica.count} replicas" if replica.count > 1 else ""
            say(f"{transport.size} rank(s){in_replicas} ready after {time.monotonic() - sweep.started:.1f} s")
        with torch.no_grad(), runner.bar:
            runner.warm_up(missing)
            for number in replica.take(range(len(missing)), claims):
                runner.run(missing[number])
            transport.gather_object(None)  # the bar goes on until all replicas are done
        if writer is not None:
            writer.gather()
    if writer is not None:
        Journals(writer.folder).remove()
    transport.broadcast_object(None)


def missing_slices(sweep: Sweep, done: set[Key]) -> Iterator[Slice]:
    """The slices that are to be done, the same on every rank. All points of a slice come together: its exact run is
    made once, and a machine that gets slower with time does so for all points."""
    for task in sweep.tasks:
        for index in range(len(task.stack)):
            if not task.mask.read(index).any():
                continue
            name = slice_name(task.stack, index)
            for steps in sweep.grid.steps:
                points = [p for p in sweep.grid.points if Key(p.name, steps, task.mask.name, name) not in done]
                if points:
                    yield Slice(task, index, steps, points)


@dataclass
class Runner:
    """The model and the engines of one rank, on the ranks of its replica. Points with the same settings share an
    engine. lines: of the replica's leader; speaks: whether this rank says and shows what is done."""

    sweep: Sweep
    model: Model
    transport: Any
    lines: LineWriter | ReplicaLines | None
    speaks: bool
    exact: Config = field(init=False)
    bar: JobBar = field(init=False)
    restorers: dict[int, Restorer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values, folder = self.sweep.values, Path(self.sweep.values["out"]).resolve()
        self.exact = engine_record().preset(EXACT, **engine_settings(values))
        self.engines: dict[Config, Engine] = {}
        shows_bar = self.speaks and not values["quiet"]
        self.bar = JobBar(self.sweep.settings["lines"], "runs", partial(count_lines, folder), shows_bar)

    def engine(self, config: Config) -> Engine:
        """Every rank asks for engines in the same order."""
        if config not in self.engines:
            self.engines[config] = Engine(self.model.pipe, config, self.transport)
        return self.engines[config]

    def restorer(self, steps: int) -> Restorer:
        if steps not in self.restorers:
            values = self.sweep.values
            self.restorers[steps] = Restorer.of_model(self.model, values, steps, {})
            self.restorers[steps].inpainter.on_step = self.bar.advance
        return self.restorers[steps]

    def restore(self, one: Slice, config: Config, name: str) -> Run:
        restorer = replace(self.restorer(one.steps), engines={name: self.engine(config)})
        original_YX, mask_YX = one.task.stack.read(one.index), one.task.mask.read(one.index)
        if self.bar.shown:
            self.bar.begin(1, restorer.tile_steps([mask_YX]))
        scale = one.task.scale
        return restorer.run([prepare_slice(original_YX, mask_YX, scale)], [mask_YX], name, scale.limits01)[0]

    def warm_up(self, missing: list[Slice]) -> None:
        """A short run in every mode, so that no result pays for first allocations and connections."""
        short = replace(missing[0], steps=1)
        points = {point.config for one in missing for point in one.points}
        for config in [self.exact, *(p.config for p in self.sweep.grid.points if p.config in points)]:
            if config not in self.engines:
                self.restore(short, config, "warm-up")

    def run(self, one: Slice) -> None:
        """The exact run, kept for as long as it is needed, then every point that has no line."""
        exact = self.restore(one, self.exact, EXACT_RUN)
        for point in one.points:
            if point.config == self.exact:
                run = exact
            else:
                run = self.restore(one, point.config, point.name)
            if self.lines is None:
                continue
            line = result_line(one, point, run, exact)
            self.lines.add(line)
            self.bar.begin(0, 0)
            if self.speaks:
                done = count_lines(Path(self.sweep.values["out"]).resolve())
                psnr = line["psnr_db"]
                shown = "" if psnr is None else f" {psnr:.2f} dB,"
                key = f"{point.name}, {one.steps} steps, {one.task.mask.name}, {one.name}"
                self.bar.say(f"{done}/{self.sweep.settings['lines']}  {key}:{shown} {run.cost.seconds:.1f} s")


def result_line(one: Slice, point: Point, run: Run, exact: Run) -> dict[str, Any]:
    """A line of results.jsonl. `bytes` are of q, k, v and o; `bytes_whole` what they would have been with all tokens as
    they are; `bytes_late` those that no call of attention waited for, where `arrival` is not now; `coding` is what
    travels in their place: full, v_major, or a codec. `psnr_vs_exact_db` is null where every bit is the exact run's;
    `exact` is that run's own quality, seconds and bytes; `drift` is `Engine.drift_profile()` of this run alone."""
    task = one.task
    original_YX, mask_YX = task.stack.read(one.index), task.mask.read(one.index)
    truth_YX = task.truth.read(one.index) if task.truth is not None else None

    def judged(of: Run) -> Result:
        native_YX: np.ndarray = compose_native(original_YX, of.restored01_YX, mask_YX, task.scale)
        measured = quality(task.scale, truth_YX, native_YX, mask_YX)
        return Result(one.name, task.mask.name, point.name, **measured, **of.cost.reported())

    return {
        "point": point.name,
        "settings": point.settings,
        "coding": point.config.selection if point.config.codec == "none" else point.config.codec,
        "arrival": point.config.arrival,
        "steps": one.steps,
        "mask": task.mask.name,
        "slice": one.name,
        **judged(run).of_run(),
        "psnr_vs_exact_db": psnr_vs_exact_db(task.scale, exact, run, mask_YX),
        "exact": judged(exact).of_run(),
        "drift": run.cost.drift,
    }
