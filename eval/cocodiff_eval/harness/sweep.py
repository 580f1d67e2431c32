"""The job of a sweep: slices as `inpaint` restores them, in every point of a grid at each number of steps. Figures are
kept, and no slices: a line of results.jsonl for each run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import matplotlib.figure  # noqa: F401  at the start: the picture comes last, where it would fail after hours

from cocodiff_eval.harness.grid import Grid
from cocodiff_eval.harness.items import Batch, ItemSamples
from cocodiff_eval.harness.job import ItemResult, JobResult
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import Session
from cocodiff_eval.harness.slices import SliceJob
from cocodiff_eval.harness.tasks import Task
from cocodiff_eval.quality.metrics import OF_RUN, json_ready
from cocodiff_eval.report.sweeps import LINES, PARETO, save_pareto, summarise, told


class SweepJob(SliceJob):
    """tasks: each stack and mask once for every number of steps. A slice has its calls to itself, so that seconds are
    its own, and all points of it follow each other: a machine that gets slower with time does so for all of them."""

    together = 1

    def __init__(self, session: Session, tasks: Sequence[Task], grid: Grid) -> None:
        super().__init__(session, tasks)
        self.grid, self.plan = grid, replace(self.plan, shown=(frozenset(),) * len(tasks))  # figures alone

    def begin(self, first: bool) -> None:
        """A short run in every preset, so that no figure pays for first allocations and connections."""
        own, self.restorers = self.restorers, dict.fromkeys(self.restorers, Restorer.of(self.session, 1))
        for batch in self.batches[:1]:
            self.make(self.presets, batch)
        self.restorers = own

    def _mode(self, point: str, steps: int) -> str:
        """What rows of metrics.json call a point at a number of steps."""
        return f"{point}, {steps} steps" if len(self.grid.steps) > 1 else point

    def judge(self, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> ItemResult:
        steps, rows = self.tasks[batch.task].steps, super().judge(batch, place, drawn, exact).rows
        return ItemResult([row | {"mode": self._mode(row["mode"], steps)} for row in rows])

    def told(self, rows: Sequence[Mapping[str, Any]]) -> str:
        of_points = [row for row in rows if row["mode"] != self.session.exact]
        shown = ["" if row["psnr_db"] is None else f" {row['psnr_db']:.2f} dB," for row in of_points]
        return "\n".join(
            f"{row['mode']}, {row['mask']}, {row['name']}:{db} {row['seconds']:.1f} s"
            for row, db in zip(of_points, shown, strict=True)
        )

    def complete(self, done: JobResult) -> dict[str, Any]:
        """Writes the lines and their picture."""
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
        """`bytes` are of q, k, v and o; `bytes_whole` what they would have been with all tokens as they are;
        `bytes_late` those that no call of attention waited for, where `arrival` is not now; `codec` is what travels in
        their place: full, v_major, or a codec. `psnr_vs_exact_db` is null where every bit is the exact run's; `exact`
        is that run's own quality, seconds and bytes; `drift` is `Engine.drift_profile()` of this run alone."""
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
    """What a line says of a run and of the exact one alike: quality, seconds and bytes."""
    return {name: value for name, value in row.items() if name in OF_RUN}
