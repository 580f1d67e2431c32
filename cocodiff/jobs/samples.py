"""Several restorations of a slice, each with noise of its own: how the slices of a task and their samples are cut into
batches.

The samples of a slice are made in one batch where there are slices enough for many replicas. Otherwise they are cut
into batches as well, whose sums lie beside the journals until rank 0 puts them together, in the order of samples.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cocodiff_eval.report import shown_slices

from cocodiff.jobs.items import Batch, evenly

BATCHES = 16  # of a task; with fewer, samples are dealt to replicas too
SHARING = 2  # samples that a small model restores in one call at least
COPIED_TOGETHER = 64  # slices without masked voxels in a batch


def batches_of(
    task: int,
    masked: Sequence[bool],
    together: int,
    sample: int,
    samples: int = 1,
    apart: Sequence[Collection[int]] = (),
) -> list[Batch]:
    """The slices of a task in batches, which depend on nothing but these arguments.

    masked: which slices have something to restore. together: so many of them, or samples of one, at most share calls.
    sample: so many slices, evenly spread, are compared with an exact run, and have batches of their own: it then runs
    the same calls. samples: of each slice. apart: sets of slices that are compared as well, each with batches of its
    own.
    """
    hidden = [index for index, has_mask in enumerate(masked) if has_mask]
    slices, at_once = shape_of_batch(len(hidden), together, samples)
    groups, left = [], {*hidden}
    for compared in (*apart, shown_slices(masked, sample)):
        groups += [(group, True) for group in evenly(sorted(left & {*compared}), slices)]
        left -= {*compared}
    groups += [(group, False) for group in evenly(sorted(left), slices)]
    batches = [
        Batch(task, group, compared, part, samples, together)
        for group, compared in groups
        for part in evenly(range(samples), at_once)
    ]
    empty = evenly(sorted({*range(len(masked))} - {*hidden}), COPIED_TOGETHER)
    batches += [Batch(task, group, False, tuple(range(samples)), samples, copied=True) for group in empty]
    return sorted(batches, key=lambda batch: (batch.indices, batch.samples))


def shape_of_batch(slices: int, together: int, samples: int) -> tuple[int, int]:
    """At most so many slices, and samples of each, in a batch of a task with so many slices to restore."""
    least = SHARING if together > 1 else 1
    at_once = min(samples, max(least, -(-slices * samples // BATCHES)))
    return max(1, together // at_once), at_once


def count_batches(slices: int, together: int, samples: int) -> tuple[int, int]:
    """How many batches a task has with so many slices to restore, and how many calls of the model take a batch's
    slices, as far as tiles of one strength fit a call."""
    of_slices, at_once = shape_of_batch(slices, together, samples)
    return -(-slices // of_slices) * -(-samples // at_once), -(-at_once // together)
