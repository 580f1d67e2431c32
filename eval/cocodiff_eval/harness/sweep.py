"""The job of `sweep`: slices are restored as by `inpaint`, with each point of a grid and each number of steps.

A point is a named set of settings of the engine. Restored slices are not kept. Each run is a line of results.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.figure  # noqa: F401  imported at the start, so that its absence is not found after hours

from cocodiff_eval.harness.grid import SweepGrid
from cocodiff_eval.harness.items import Batch, ItemSamples
from cocodiff_eval.harness.job import ItemResult, JobResult
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.slices import SliceJob
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.quality.metrics import OF_RUN, json_ready
from cocodiff_eval.report.sweeps import LINES, PARETO, save_pareto, summarise, told


class SweepJob(SliceJob):
    """The job of `sweep`: it restores slices with every point, a set of the engine's settings, and keeps only figures.

    Slices share no calls of the model, so that measured seconds are those of one slice. All points of a slice follow
    each other, so that a machine that slows down with time does so for all of them.
    """

    together = 1

    def __init__(self, session: Session, tasks: Sequence[Task], grid: SweepGrid) -> None:
        """Take the work of a sweep.

        Args:
            session: the job on its ranks.
            tasks: each stack and mask, once for every number of steps.
            grid: the points and numbers of steps.
        """
        super().__init__(session, tasks)
        self.grid, self.plan = grid, replace(self.plan, shown=(frozenset(),) * len(tasks))  # no pictures

    def begin(self, first: bool) -> None:
        """Run one step in every preset, so that no measurement includes first allocations and connections.

        All ranks call it.

        Args:
            first: True on rank 0; not used.
        """
        own, self.restorers = self.restorers, dict.fromkeys(self.restorers, Restorer.of(self.session, 1))
        for batch in self.batches[:1]:
            self.make(self.presets, batch)
        self.restorers = own

    def _mode(self, point: str, steps: int) -> str:
        """Return the name that rows of metrics.json have for a sweep's point, run with a number of denoising steps."""
        return f"{point}, {steps} steps" if len(self.grid.steps) > 1 else point

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        """Return the rows of a slice, as `SliceJob.judge`, under the names of points. No arrays are kept.

        Args:
            batch: the slice's batch.
            place: index of the slice in the batch.
            drawn: its samples with each point.
            exact: name of the exact run, to compare with.
        """
        steps, rows = self.tasks[batch.task].steps, super().judge(batch, place, drawn, exact).rows
        return ItemResult([row | {"mode": self._mode(row["mode"], steps)} for row in rows])

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        """Return the text to print when a batch of a sweep is finished.

        It has a line for each point (a set of settings) and slice, with PSNR, if known, and seconds.

        Args:
            rows: rows of metrics.json of the batch's slices.
        """
        of_points = [row for row in rows if row["mode"] != self.session.exact]
        shown = ["" if row["psnr_db"] is None else f" {row['psnr_db']:.2f} dB," for row in of_points]
        return "\n".join(
            f"{row['mode']}, {row['mask']}, {row['name']}:{db} {row['seconds']:.1f} s"
            for row, db in zip(of_points, shown, strict=True)
        )

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Write results.jsonl and its picture. Return further keyword arguments of `session.finish`.

        Args:
            done: the finished job.
        """
        folder, once = self.session.prepared.output.partial, self.tasks[:: len(self.grid.steps)]
        lines = json_ready([*self._lines(done)])
        (folder / LINES).write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        rows = summarise(lines)
        save_pareto(folder / PARETO, rows)
        return {
            "pictures": (),
            "records": {"inputs": [task.record() for task in once]},
            "slices": {task.stack.name: task.stack.numbers for task in once if len(task.stack) > 1},
            "title": "Sweep",
            "swept": rows,
            "told": told(rows),
        }

    def _lines(self, done: JobResult) -> Iterator[dict[str, Any]]:
        """Yield the lines of results.jsonl: one for each point, slice, mask and number of steps.

        - `bytes`: bytes sent for q, k, v and o, by link class.
        - `bytes_whole`: bytes that all tokens without a codec would have taken.
        - `bytes_late`: bytes that no attention call waited for; only if `arrival` is not `now`.
        - `coding`: what is sent: "full", "v_major", or a codec's name.
        - `psnr_vs_exact_db`: PSNR under the mask against the exact run; null if all bits are equal.
        - `exact`: quality, seconds and bytes of the exact run.
        - `drift`: `Engine.drift_profile()` of this run.
        """
        found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
        for task, index, row in done.rows:
            found.setdefault((task, index), {})[row["mode"]] = row
        for (number, _), rows in found.items():
            steps = self.tasks[number].steps
            exact = rows[self._mode(next(iter(self.grid.presets)), steps)]
            for point in self.grid.points:
                row, config = rows[self._mode(point.name, steps)], point.config
                yield {
                    "point": point.name,
                    "settings": point.settings,
                    "coding": config.selection if config.codec == "none" else config.codec,
                    "arrival": config.arrival,
                    "steps": steps,
                    "mask": row["mask"],
                    "slice": row["name"],
                    **of_run(row),
                    "psnr_vs_exact_db": row["psnr_vs_exact_db"],
                    "exact": of_run(exact),
                    "drift": row.get("drift", []),
                }


def of_run(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurements of a row of metrics.json that a line of results.jsonl has: quality, seconds and bytes.

    row: measurements of one slice by name
    """
    return {name: value for name, value in row.items() if name in OF_RUN}
