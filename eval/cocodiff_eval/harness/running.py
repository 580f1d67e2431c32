"""Runs any job (`job.py`) on its replicas: a queue of batches, journals, going on, and a bound on quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from cocodiff.jobs.journal import Entry
from cocodiff.jobs.replicas import JobRecord, Queue, Replica
from cocodiff.jobs.terminal import reading_bar
from cocodiff_eval.harness.items import Batch, ItemSamples, Parts
from cocodiff_eval.harness.job import Job, JobResult, Presets, Row


def run_batches(
    job: Job,
    way: Presets,
    replica: Replica,
    output: Any,
    settings: Callable[[], dict[str, Any]],
    shows_bar: bool = False,
) -> JobResult:
    """Makes, judges and writes what is missing of a job's results; all ranks call it.

    way: how batches are made; output: the `OutputFolder`, with the journals; settings: all that results depend on.
    Raises UserError where those of an earlier start were others.
    """
    first, batches = replica.whole.rank == 0, job.batches
    before = len(batches) * (1 + way.tried)
    parts = Parts(output.journals.folder / "samples")

    def is_whole(entry: Entry) -> bool:
        if entry.number >= before:
            return job.holds_before(entry.number - before)
        if entry.number >= len(batches):
            return way.holds(entry.number)
        batch = batches[entry.number]
        if not batch.whole:
            return parts.holds(batch, way.names(batch))
        try:
            return job.holds(batch, entry.sums)
        except Exception:  # each format raises kinds of its own for a damaged file
            return False

    counts = [*[batch.size for batch in batches] * (1 + way.tried), *job.before]
    record = JobRecord(output, settings, counts, job.unit, is_whole, shows_bar)
    with Queue(replica, record, len(batches)) as queue, torch.no_grad():
        job.watched(queue.bar.advance)
        way.choose(queue, replica)
        if job.before:
            job.make_before(queue, before)
        if first:
            parts.folder.mkdir(exist_ok=True)
        job.begin(first)
        replica.whole.broadcast_object(None)  # the files are there
        make_batches(job, queue, way, replica.leads, parts)
    rows = queue.rows() + put_together(job, way, parts, reading_bar(shows_bar)) if first else []
    configs = {task: way.configs(task) for task in {batch.task for batch in batches}}
    return JobResult(sorted(rows, key=lambda row: row[:2]), way.records, configs)


def make_batches(job: Job, queue: Queue, way: Presets, leads: bool, parts: Parts) -> None:
    """The batches that this replica takes. What has samples in other batches is kept in `parts` until all are there."""
    for number in queue.take([number for number in range(len(job.batches)) if number not in way.kept]):
        batch = job.batches[number]
        settings, exact = way.of(batch)
        queue.begin(batch.size, job.steps(batch) * len(settings))
        made = job.make([*dict.fromkeys(settings.values())], batch)
        if not leads:
            continue
        drawn = {name: made[setting] for name, setting in settings.items()}
        if not batch.whole:
            parts.keep(batch, drawn)
            queue.add(number, [])
            continue
        rows = []
        for place in range(len(batch.indices)):
            rows += finish_item(job, batch, place, {name: items[place] for name, items in drawn.items()}, exact)
        queue.add(number, rows, job.sums(batch))
        if told := job.told([row for *_, row in rows]):
            queue.bar.say(told)


def finish_item(job: Job, batch: Batch, place: int, drawn: Mapping[str, ItemSamples], exact: str | None) -> list[Row]:
    """Judges and writes an item whose samples are all there."""
    judged = job.judge(batch, place, drawn, exact)
    job.write(batch, place, judged.result)
    return [[batch.task, batch.indices[place], row] for row in judged.rows]


def put_together(job: Job, way: Presets, parts: Parts, progress: Callable[..., Any]) -> list[Row]:
    """On rank 0, when all batches are done: the items whose samples were divided, and those that were made before."""
    groups: dict[tuple[int, tuple[int, ...], bool], list[Batch]] = {}
    for number, batch in enumerate(job.batches):
        if number in way.kept or not batch.whole:
            groups.setdefault((batch.task, batch.indices, number in way.kept), []).append(batch)
    divided, rows = [*groups.items()], []
    for number in progress(range(len(divided)), f"putting {job.unit} together"):
        (*_, kept), batches = divided[number]
        for place, index in enumerate(batches[0].indices):
            if kept:
                (_, exact), drawn = way.made(batches, index)
            else:
                exact, drawn = way.of(batches[0]).exact, parts.merged(batches, index)
            rows += finish_item(job, batches[0], place, drawn, exact)
    return rows
