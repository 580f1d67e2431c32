"""Batches of a job: how slices and samples are cut into them, what they cost, and how replicas take them."""

from __future__ import annotations

import copy
import io
import os
import re
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tifffile
import torch
from cocodiff_bench.stand_in import Late
from cocodiff_eval.cli.generate import OPTIONS as GENERATE
from cocodiff_eval.cli.inpaint import OPTIONS as INPAINT
from cocodiff_eval.cli.inpaint import prepare
from cocodiff_eval.data.reoriented import RestoredFile
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, batches_of, measured, packed, unpacked
from cocodiff_eval.harness.replicas import JobRecord, Queue, Replica
from cocodiff_eval.harness.restoring import Restorer
from cocodiff_eval.harness.session import describe
from cocodiff_eval.harness.tasks import Task, describe_inputs, find_tasks
from cocodiff_eval.quality.fusing import Moments
from covering import examples
from exactness import denoise
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, qwen_transformer

from cocodiff.cli.main import main
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.options import parse, with_settings
from cocodiff.jobs.store import Store
from cocodiff.jobs.terminal import JobBar, limit_threads, threads

SLICE = Path(__file__).parents[2] / "cocodiff" / "demo_model" / "samples" / "synthetic_organ_1.tif"


@pytest.mark.parametrize("set_by_user", [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}])
def test_one_rank_alone_has_the_threads_that_a_replica_has(monkeypatch: pytest.MonkeyPatch, set_by_user: Any) -> None:
    """Sums of a library on two threads have other last bits than on one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    for ranks in (1, 4):
        monkeypatch.setattr(os, "environ", dict(set_by_user))
        limit_threads(ranks)
        assert threads() == dict.fromkeys(threads(), "1") | set_by_user


@given(st.lists(st.booleans(), max_size=90), *(st.integers(1, most) for most in (9, 9, 20)), st.integers(0, 3))
@examples(40, 1000)
def test_every_sample_of_every_slice_is_made_once(
    masked: list[bool], together: int, sample: int, samples: int, tests: int
) -> None:
    """Of slices with something to restore, and calls take so many samples."""
    batches = batches_of(5, masked, together, sample, samples, tests=tests)
    made = [(index, one) for batch in batches for index in batch.indices for one in batch.samples]
    hidden = [index for index, has_mask in enumerate(masked) if has_mask]
    assert sorted(made) == [(index, one) for index in hidden for one in range(samples + tests)]
    for batch in batches:
        assert (batch.task, batch.of, batch.tests) == (5, samples + tests, tests)
        pairs = [pair for call in batch.calls for pair in call]
        every = [(place, one) for place in range(len(batch.indices)) for one in batch.samples]
        assert sorted(pairs) == every and (tests or pairs == every)
        assert all(len({one >= samples for _, one in call}) == 1 for call in batch.calls), "tests have calls apart"
        assert all(len(call) <= together for call in batch.calls)
    compared = {index for batch in batches if batch.compared for index in batch.indices}
    assert len(compared) == min(sample, len(hidden)) and compared <= {*hidden}
    assert sample < 2 or compared >= {*hidden[:1], *hidden[-1:]}


def test_samples_are_cut_where_slices_are_too_few_for_many_replicas() -> None:
    def cut(slices: int, together: int, samples: int) -> list[Any]:
        batches = batches_of(0, [True] * slices, together, 1, samples)
        return [(batch.indices, batch.samples) for batch in batches]

    assert cut(1, 8, 8) == [((0,), (n, n + 1)) for n in range(0, 8, 2)]
    assert cut(1, 1, 4) == [((0,), (n,)) for n in range(4)]
    assert len(cut(1, 1, 1000)) == 16
    assert cut(20, 8, 8) == [((index,), tuple(range(8))) for index in range(20)]
    assert [indices for indices, _ in cut(3, 8, 1)] == [(0,), (1, 2)]
    assert [indices for indices, _ in cut(3, 1, 1)] == [(0,), (1,), (2,)]
    assert {samples for _, samples in cut(40, 8, 3)} == {(0, 1, 2)}


def test_costs_of_samples_add_up_and_their_drift_is_the_mean() -> None:
    def cost(seconds: float, *changes: float | None) -> Cost:
        rows = [{"step": n, "change": one, "stable_fraction": 0.5} for n, one in enumerate(changes)]
        return Cost(seconds=seconds, bytes={"plane": 3}, drift=rows)

    total = Cost.summed([cost(1.0, None, 0.2), cost(2.5, None, 0.4), cost(1.0, None, None)])
    assert (total.seconds, total.bytes) == (4.5, {"plane": 9})
    first, second = total.drift
    assert first == {"step": 0, "change": None, "stable_fraction": 0.5} and second["change"] == pytest.approx(0.3)
    one, other = (Cost(seconds=2.0 * n, rank_seconds=4.0 * n, replica_seconds={str(n): 2.0 * n}) for n in (1, 2))
    total = Cost.summed([*one.shares(2), other])
    assert (total.seconds, total.wall_seconds, total.rank_seconds) == (6.0, 4.0, 12.0)


@pytest.mark.parametrize("slow", [0, 1])
def test_no_replica_goes_on_before_all_batches_are_done(tmp_path: Path, slow: int) -> None:
    """The batches of one replica take long; what the job does next needs the results of both."""
    output, done, both = OutputFolder(str(tmp_path / "out"), overwrite=False), [], threading.Barrier(2)
    output.open()

    def work(transport: Any) -> list[int]:
        record = JobRecord(output, dict, [1, 1, 1], "slices", lambda number: True, shows_bar=False)
        queue = Queue(Replica(transport, "local", 2), record, 3)
        with queue.bar:
            for count, number in enumerate(queue.take(range(3))):
                if count == 0:
                    both.wait(60)  # each has one
                time.sleep(0.1 * (transport.rank == slow))
                done.append(number)
                queue.add(number, [("rows", [number])])
            assert sorted(done) == [0, 1, 2] and queue.done == {0, 1, 2}
            return output.store.rows(range(3))

    assert run_ranks(2, work) == [[0, 1, 2]] * 2


def test_a_job_that_goes_on_expects_what_is_done_and_what_is_left(tmp_path: Path) -> None:
    output = OutputFolder(str(tmp_path / "out"), overwrite=False)
    output.open()

    def work(transport: Any) -> None:
        record = JobRecord(output, dict, [1, 2, 4], "slices", lambda number: True, shows_bar=False)
        Queue(Replica(transport, "local", 1), record, 3).add(0, ())
        for number in (99, 3, 10**9):  # which this job does not have
            output.store.add(number, [("rows", [[0, 0, {"psnr_db": 1}]])])
        queue = Queue(Replica(transport, "local", 1), record, 3)
        queue.expect([2])
        assert queue.bar.total == 5 and str(output.store.kept()) == "1 of 5 slices"

    run_ranks(1, work)


def test_each_run_is_measured_by_itself() -> None:
    """What an engine noted of a run before is not told of the next one: neither its steps nor its bytes."""
    model, (_, inputs_of) = qwen_transformer(4), FAMILIES["qwen"]
    inputs = inputs_of(1, 6, 7, 5)

    def work(transport: Any) -> list[Cost]:
        costs, own = list[Cost](), copy.deepcopy(model)
        engine = parallelize(own, "flat", transport=transport, codec="int2", arrival="displaced", fine_steps=0)
        for steps in (3, 2, 3):
            with torch.no_grad(), measured(engine) as cost:
                denoise(own, inputs, *[nullcontext] * steps)
            costs.append(cost)
        restorer = Restorer(inpainter=Mock(frames=1), engines={"lossy": engine}, batch=4, strength=1.0, replica=3)
        image_YX = np.zeros((8, 8), np.float32)
        (one,) = restorer.run([image_YX], [image_YX > 0], "lossy", (0.0, 1.0))
        assert one.cost.replica_seconds == {"3": one.cost.seconds}
        late = Late.of([engine.trace.spans])
        assert engine.trace.dropped == 0 and late.sent == sum(engine.trace.bytes("late").values()) > 0
        return costs

    three, two, again = run_ranks(2, work)[0]
    assert [row["step"] for row in two.drift] == [0, 1] and again.drift == three.drift
    for name in ("bytes", "bytes_whole", "bytes_late"):
        sent, sent_of_two, sent_again = (sum(getattr(cost, name).values()) for cost in (three, two, again))
        assert sent == sent_again > sent_of_two > 0
    assert two.rank_seconds == 2 * two.seconds > 0


def test_samples_that_batches_divide_stay_with_their_mask(tmp_path: Path) -> None:
    """Two masks of a slice, whose samples are more than a batch makes."""
    fixed = f"inpaint --input {SLICE} --samples 3 --batch 1 --steps 1 --no_exact --quiet".split()
    names = ("block", "center")
    for masks in (*names, ",".join(names)):
        assert main([*fixed, "--mask", masks, "--out", str(tmp_path / masks)]) == 0
    for name in names:
        alone, together = (tmp_path / folder / "images" / f"{SLICE.stem}_{name}_tapa.tif" for folder in (name, masks))
        assert alone.read_bytes() != b"" and np.array_equal(tifffile.imread(alone), tifffile.imread(together))


def test_replicas_wait_until_the_files_of_a_volume_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create = RestoredFile.create
    monkeypatch.setattr(RestoredFile, "create", lambda file: (time.sleep(0.5), create(file)))
    volume, mask = np.arange(16**3, dtype="u2").reshape(16, 16, 16), np.zeros((16, 16, 16), "u1")
    mask[4:12, 6:10, 6:10] = 1
    for name, one in (("scan", volume), ("mask", mask)):
        np.save(tmp_path / f"{name}.npy", one)
    words = ["--samples", "2", "--axes", "z", "y", "--no_hidden_test", "--steps", "1", "--no_exact", "--quiet"]
    words += ["--ranks", "2", "--replicas", "2", "--mask", str(tmp_path / "mask.npy"), "--out", str(tmp_path / "out")]
    assert main(["inpaint", "--input", str(tmp_path / "scan.npy"), *words]) == 0


def test_a_folder_that_leaders_do_not_share_is_refused(tmp_path: Path) -> None:
    """Two ranks with folders of their own, as on hosts without a common file system."""
    (tmp_path / "0").mkdir()  # seen by rank 0 alone

    def work(transport: Any) -> None:
        with pytest.raises(UserError, match=r"--out out: rank\(s\) 1 do not see what rank 0 writes there"):
            Replica(transport, "local", 2).check_shared(tmp_path / str(transport.rank), "out", patience_s=0.2)

    run_ranks(2, work)


def test_samples_of_several_units_are_put_together(tmp_path: Path) -> None:
    """Those of an item alone, in the order of units, of one sample or several, with tests and kept ones."""
    store, random = Store(tmp_path), np.random.default_rng(0)
    store.folder.mkdir()
    batches = [Batch(0, (4, 5), samples=samples, of=3) for samples in ((0, 1), (2,))]
    images = random.random((2, 3, 2, 3), np.float32)
    every = [[Moments.of(image_YX) for image_YX in images[place]] for place in range(2)]
    for number, batch in enumerate(batches):
        drawn = []
        for place in range(2):
            moments = reduce(Moments.merged, [every[place][sample] for sample in batch.samples])
            kept = tuple(images[place][[*batch.samples]])
            cost, psnr_db = Cost(seconds=1.0 + number), (None, 2.5)[: len(kept)]
            drawn.append(ItemSamples(moments, cost, psnr_db, kept, every[1 - place][0]))
        store.add(number, packed(batch, {"tapa": drawn, "flat": drawn[::-1]}))
    for place in range(2):
        for mode, item in (("tapa", place), ("flat", 1 - place)):
            found = unpacked(store, [0, 1], 4 + place)[mode]
            expected = every[item][0].merged(every[item][1]).merged(every[item][2])
            np.testing.assert_array_equal(found.moments.mean_YX, expected.mean_YX)
            np.testing.assert_array_equal(found.moments.squares_YX, expected.squares_YX)
            np.testing.assert_array_equal(found.kept, images[item])
            assert (found.cost.seconds, found.psnr_db) == (3.0, (None, 2.5, None))
            assert found.tested is not None and found.tested.count == 2
    assert [*unpacked(store, [1], 5)["flat"].kept[0].ravel()] == [*images[0, 2].ravel()]


# Options that change no bit of a result, and those that presets, voxels and a bound's own record tell apart.
UNSEEN = {
    *("input", "mask", "slices", "roi", "truth", "image", "format", "preset", "quality", "quality_slices"),
    *("quality_every", "exact", "out", "overwrite", "resume", "ranks", "parallel", "replicas", "dry_run", "quiet"),
    *("log_level", "follow_links", "grow", "invert"),
}


@pytest.mark.parametrize("name", sorted({one.name for one in (*INPAINT, *GENERATE)} - UNSEEN))
def test_whatever_results_depend_on_is_compared_when_a_run_goes_on(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    given = ["--input", str(SLICE), "--out", str(tmp_path / "out"), "--ranks", "1", "--samples", "2"]
    values = parse("inpaint", "", with_settings(INPAINT), given)
    prepared = prepare(values, 1, 0.0)

    def described(values: dict[str, Any]) -> dict[str, Any]:
        return describe(replace(prepared, values=values, inputs=partial(describe_inputs, (), values)))

    before = described(values)
    assert described(values | {name: 3}) != before == described(dict(values))
    assert [describe(replace(prepared, ranks=ranks))["ranks of a replica"] for ranks in (1, 2)] == [1, 2]
    monkeypatch.setenv("MKL_NUM_THREADS", "97")
    assert described(values) != before


def tasks_of(folder: Path, shape: tuple[int, ...], *words: str) -> tuple[list[Task], dict[str, Any]]:
    """The tasks of a command for a slice or a volume, and its options."""
    np.save(folder / "scan.npy", np.arange(np.prod(shape), dtype="u2").reshape(shape))
    fixed = ["--input", str(folder / "scan.npy"), "--out", str(folder / "out"), "--quiet"]
    values = parse("inpaint", "", with_settings(INPAINT), [*fixed, *words])
    return find_tasks(values), values


def test_a_mask_that_is_grown_or_inverted_is_another_when_a_run_goes_on(tmp_path: Path) -> None:
    marked = np.zeros((16, 16), np.uint8)
    marked[4:7, 5:9] = 1
    np.save(tmp_path / "mask.npy", marked)
    words, changes = ("--mask", str(tmp_path / "mask.npy")), ([], ["--grow=1"], ["--invert=true"], ["--invert=false"])
    found = [describe_inputs(*tasks_of(tmp_path, (16, 16), *words, *more)) for more in changes]
    as_it_is, grown, inverted, not_inverted = found
    assert as_it_is == not_inverted and as_it_is not in (grown, inverted) and grown != inverted


@pytest.mark.parametrize("samples", [1, 2])
def test_the_axes_of_a_volume_are_compared_when_a_run_goes_on(tmp_path: Path, samples: int) -> None:
    """Those of one that is restored along another axis than that of its slices, and not those of a slice."""
    (task,), values = tasks_of(tmp_path, (16, 16, 16), "--axes", "y")
    values["samples"] = samples
    assert describe_inputs([task], values)["axes"] == ["y"]
    assert ("axes" in describe_inputs([replace(task, volume=None)], values)) == (samples > 1)


@pytest.mark.parametrize("count", [12, 13])
def test_twelve_slices_that_are_left_are_listed_and_of_more_the_first_ones(tmp_path: Path, count: int) -> None:
    (task,), _ = tasks_of(tmp_path, (16, 16, 16))
    (told,) = replace(task, mask=replace(task.mask, full=frozenset(range(count)))).remarks()
    assert told.endswith(f"({', '.join(map(str, range(12)))}{', ...' * (count > 12)})")


@pytest.mark.parametrize(("steps", "percent"), [(0, "25%"), (5, "50%"), (10, "75%"), (11, "75%")])
def test_the_bar_of_a_job_counts_a_batch_as_far_as_it_has_come(steps: int, percent: str, capsys: Any) -> None:
    """One of four slices is done, and this rank is at work on two."""
    with JobBar(4, "slices", lambda: 1, True) as bar:
        bar.begin(2, 4)
        bar.advance(4)
        bar.begin(2, 10)
        bar.advance(steps)
    assert re.findall(r"\d+%", capsys.readouterr().err)[-1] == percent


def test_a_line_has_a_line_of_its_own_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, and in a file that both go to."""
    seen = io.StringIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{name}", seen)
    with JobBar(4, "slices", lambda: 0, True) as bar:
        bar.say("a line")
    assert "a line" in re.split("[\r\n]", seen.getvalue())


def test_the_first_calls_of_a_model_tell_how_long_it_takes(monkeypatch: Any, capsys: Any) -> None:
    """Of 100 steps ten are done in ten seconds, after ten whose time is not known."""
    now = [0.0]
    monkeypatch.setattr("cocodiff.jobs.terminal.time", SimpleNamespace(monotonic=lambda: now[0]))
    with JobBar(4, "slices", lambda: 0, True) as bar:
        bar.expect_steps(100)
        for _ in range(12):
            bar.advance(10)
            now[0] += 10
    (told,) = capsys.readouterr().out.splitlines()
    assert "1.33 min" in told or "80 s" in told
