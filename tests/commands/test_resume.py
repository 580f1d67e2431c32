"""Stacks divided among replicas, and runs that did not end and go on: every bit as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from cocodiff_eval.cli.generate import OPTIONS as GENERATE
from cocodiff_eval.cli.inpaint import OPTIONS as INPAINT
from cocodiff_eval.cli.inpaint import prepare
from cocodiff_eval.harness.items import Batch, Cost, ItemSamples, Parts, batches_of
from cocodiff_eval.harness.session import describe
from cocodiff_eval.harness.tasks import describe_inputs
from cocodiff_eval.quality.fusing import Moments
from killed_runs import Killed, results
from warm import forked

from cocodiff.cli.main import main
from cocodiff.comm.loopback import LoopbackTransport, LoopbackWorld, run_ranks
from cocodiff.config.errors import UserError
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.journal import Entry, Journals
from cocodiff.jobs.options import parse, with_settings
from cocodiff.jobs.replicas import JobRecord, Queue, Replica
from cocodiff.jobs.terminal import limit_threads, threads

SLICES = 10
LONGER = 40  # slices, of which some are left to be made after two kills
SLICE = Path(__file__).parents[2] / "cocodiff" / "demo_model" / "samples" / "synthetic_organ_1.tif"


def written(folder: Path, slices: int) -> Path:
    volume = np.random.default_rng(0).integers(0, 60000, (slices, 96, 96), dtype=np.uint16)
    tifffile.imwrite(folder / "scan.tif", volume, photometric="minisblack")
    return folder / "scan.tif"


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("input"), SLICES)


def words(scan: Path, out: Path, *more: Any, presets: tuple[str, ...] = ("cocodiff", "tapa")) -> list[str]:
    fixed = ("--steps", 3, "--batch", 2, "--preset", *presets, "--quiet")
    return [str(word) for word in ("inpaint", "--input", scan, "--out", out, *fixed, *more)]


@pytest.mark.full
@pytest.mark.processes
def test_a_killed_job_goes_on_with_other_replicas_to_the_same_bits(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    scan = written(tmp_path_factory.mktemp("longer"), LONGER)
    done = forked(*words(scan, tmp_path / "whole", "--ranks", 2), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    divided = words(scan, tmp_path / "out", "--ranks", 4, "--replicas", 2, "--resume")
    run = Killed(tmp_path, divided)
    run.ranks[3].kill()
    assert run.end() == 1
    said = f"rank 3 was killed by SIGKILL; 3 of 3 other ranks noticed and stopped, {run.journals.kept()} are kept: go "
    assert said in run.log.read_text()
    run = Killed(tmp_path, divided)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.end()
    kept = run.journals.kept()
    assert kept is not None and 2 <= kept.done < LONGER
    with next(run.journals.folder.glob("*.jsonl")).open("ab") as journal:
        journal.write(b'{"number": 0, "si')  # as a kill in the middle of a write leaves it
    refused = forked(*words(scan, tmp_path / "out", "--ranks", 1, "--resume"), folder=tmp_path)
    assert refused.returncode == 2 and "(ranks of a replica: 2 there, 1 now)" in refused.stderr
    done = forked(*words(scan, tmp_path / "out", "--ranks", 2, "--resume"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"going on: {kept} are there already" in done.stdout
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "out", "whole"]


@pytest.mark.processes
def test_a_run_that_ended_badly_goes_on_only_as_it_began(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def run(*more: Any) -> tuple[int, str]:
        capsys.readouterr()
        sample = () if "--exact_slices" in more else ("--exact_slices", 3)
        code = main(words(scan, out, *sample, *more, presets=("cocodiff",)))
        return code, "".join(capsys.readouterr())

    add, added = Journals.open_journal, []

    def stop(journals: Journals, name: str) -> Any:
        journal = add(journals, name)
        once = journal.add

        def and_end(entry: Entry) -> None:
            once(entry)
            added.append(entry)
            if len(added) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(journal, "add", and_end)
        return journal

    monkeypatch.setattr(Journals, "open_journal", stop)
    code, said = run("--resume")
    assert code == 130 and "nothing to resume: starting afresh" in said
    kept = f"{sum(entry.size for entry in added)} of {SLICES} slices"
    assert f"{kept} are kept: go on with --resume" in said
    code, said = run()
    assert code == 2 and f"finished {kept} there: go on with --resume, or start afresh with --overwrite" in said
    for difference, told in (
        (("--seed", 1), "(seed: 0 there, 1 now)"),
        (("--exact_slices", 4), "(exact_slices: 3 there, 4 now)"),
        (("--range", "0,50000"), "(range: None there, 0,50000 now)"),
    ):
        assert told in run("--resume", *difference)[1]
    code, said = run("--resume")
    assert code == 0 and f"going on: {kept} are there already" in said
    assert len(added) == len({entry.number for entry in added})
    rows = json.loads((out / "metrics.json").read_text())["images"]
    assert sum(row["exact_compared"] for row in rows) == 3 and len(rows) == SLICES
    assert "resume" not in (out / "run.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.full
@pytest.mark.processes
def test_samples_of_a_slice_are_dealt_and_put_together_to_the_same_bits(tmp_path: Path) -> None:
    """One bundled slice, and replicas that make some of its samples each, three for its intervals among them; killed
    between, and gone on with by fewer."""

    def several(out: str, *more: Any, samples: int = 12) -> list[str]:
        fixed = ("--input", SLICE, "--samples", samples, "--steps", 3, "--quiet")
        return [str(word) for word in ("inpaint", *fixed, "--out", tmp_path / out, *more)]

    done = forked(*several("whole", "--ranks", 1), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    run = Killed(tmp_path, several("out", "--ranks", 4, "--replicas", 4))
    os.killpg(run.process.pid, signal.SIGKILL)
    run.end()
    kept = run.journals.kept()
    assert kept is not None and kept.unit == "samples" and 2 <= kept.done < kept.total == 15
    refused = forked(*several("out", "--ranks", 1, "--resume", samples=11), folder=tmp_path)
    assert refused.returncode == 2 and "(samples: 12 there, 11 now)" in refused.stderr
    done = forked(*several("out", "--ranks", 2, "--replicas", 2, "--resume"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert results(tmp_path / "out") == results(tmp_path / "whole")
    images, (row,) = results(tmp_path / "whole")
    assert sorted(images) == [
        f"{SLICE.stem}_block_{end}"
        for end in ("mask.tif", "tapa.png", "tapa.tif", "tapa_high_90.tif", "tapa_low_90.tif", "tapa_std.tif")
    ]
    assert row["samples"] == 12 and row["psnr_db"] > row["psnr_db_single"]
    assert 0 < row["coverage_50"] < row["coverage_90"] <= 1
    endings = ("", "_low_90", "_high_90", "_std")
    original, mean, low, high, spread = (
        tifffile.imread(path)
        for path in (SLICE, *(tmp_path / "whole/images" / f"{SLICE.stem}_block_tapa{end}.tif" for end in endings))
    )
    assert mean.dtype == original.dtype and spread.dtype == np.float32
    known = spread == 0
    assert (low <= mean).all() and (mean <= high).all() and (low[~known] < high[~known]).mean() > 0.99
    assert 0.7 < known.mean() < 0.8 and mean[known].tobytes() == original[known].tobytes()


@pytest.mark.parametrize("set_by_user", [{"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "2"}])
def test_one_rank_alone_has_the_threads_that_a_replica_has(monkeypatch: pytest.MonkeyPatch, set_by_user: Any) -> None:
    """Sums of a library on two threads have other last bits than on one."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    for ranks in (1, 4):
        monkeypatch.setattr(os, "environ", dict(set_by_user))
        limit_threads(ranks)
        assert threads() == dict.fromkeys(threads(), "1") | set_by_user


def test_samples_are_cut_where_slices_are_too_few_for_many_replicas() -> None:
    def cut(slices: int, together: int, samples: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        batches = batches_of(0, [True] * slices, together, 1, samples)
        made = [(index, sample) for batch in batches for index in batch.indices for sample in batch.samples]
        assert sorted(made) == [(index, sample) for index in range(slices) for sample in range(samples)]
        assert all(len(call) <= together for batch in batches for call in batch.calls)
        assert all(
            [pair for call in batch.calls for pair in call]
            == [(place, sample) for place in range(len(batch.indices)) for sample in batch.samples]
            for batch in batches
        )
        return [(batch.indices, batch.samples) for batch in batches]

    assert cut(1, 8, 8) == [((0,), (n, n + 1)) for n in range(0, 8, 2)]
    assert cut(1, 1, 4) == [((0,), (n,)) for n in range(4)]
    assert len(cut(1, 1, 1000)) == 16
    assert cut(20, 8, 8) == [((index,), tuple(range(8))) for index in range(20)]
    assert [indices for indices, _ in cut(3, 8, 1)] == [(0,), (1, 2)]
    assert {samples for _, samples in cut(40, 8, 3)} == {(0, 1, 2)}


def test_costs_of_samples_add_up_and_their_drift_is_the_mean() -> None:
    def cost(seconds: float, *changes: float | None) -> Cost:
        rows = [{"step": n, "change": one, "stable_fraction": 0.5} for n, one in enumerate(changes)]
        return Cost(seconds, {"plane": 3}, rows)

    total = Cost.summed([cost(1.0, None, 0.2), cost(2.5, None, 0.4), cost(1.0, None, None)])
    assert (total.seconds, total.bytes) == (4.5, {"plane": 9})
    one, other = (Cost(2.0 * n, rank_seconds=4.0 * n, replica_seconds={str(n): 2.0 * n}) for n in (1, 2))
    total = Cost.summed([*one.shares(2), other])
    assert (total.seconds, total.wall_seconds, total.rank_seconds) == (6.0, 4.0, 12.0)
    first, second = Cost.summed([cost(1.0, None, 0.2), cost(2.5, None, 0.4), cost(1.0, None, None)]).drift
    assert first == {"step": 0, "change": None, "stable_fraction": 0.5} and second["change"] == pytest.approx(0.3)


def test_batches_depend_on_masks_alone_and_the_sample_has_its_own() -> None:
    masked = [index % 3 > 0 for index in range(60)]
    batches = batches_of(5, masked, together=8, sample=8)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(60))
    for batch in batches:
        assert len({masked[index] for index in batch.indices}) == 1
        assert len(batch.indices) <= 8 or not masked[batch.indices[0]]
    (sample,) = [batch.indices for batch in batches if batch.compared]
    assert len(sample) == 8 and (sample[0], sample[-1]) == (1, 59)
    assert [batch.compared for batch in batches_of(0, [True] * 7, 1, 8)] == [True] * 7
    assert [batch.indices for batch in batches_of(0, [True] * 3, 1, 1)] == [(0,), (1,), (2,)]
    for slices, sizes in ((64, [64]), (65, [32, 33]), (130, [43, 44, 43])):  # without a mask: to be copied
        assert [len(batch.indices) for batch in batches_of(0, [False] * slices, 1, 8)] == sizes


def test_every_batch_is_claimed_once_and_journals_forget_torn_lines(tmp_path: Path) -> None:
    journals = Journals(tmp_path)
    journals.begin({"seed": 0}, 9, "slices", overwrite=False)
    journals.open_claims()
    assert [journals.claim(number) for number in (0, 1, 0, 1, 2)] == [True, True, False, False, True]
    assert journals.kept() is None
    for name, size in (("a", 3), ("b", 2)):
        journals.open_journal(name).add(Entry(size, size, [name]))
    (journals.folder / "c.jsonl").write_text('{"number": 4, "size": 9, "rows": []}')
    assert str(journals.kept()) == "5 of 9 slices" and set(journals.finished()) == {2, 3}
    journals.open_claims()
    assert journals.claim(0)


def test_no_replica_goes_on_before_all_batches_are_done(tmp_path: Path) -> None:
    """The batches of one replica take long; what the job does next needs the results of both."""
    output, done, both = OutputFolder(str(tmp_path / "out"), overwrite=False), [], threading.Barrier(2)
    output.open()

    def work(transport: Any) -> list[int]:
        record = JobRecord(output, dict, [1, 1, 1], "slices", lambda entry: True, shows_bar=False)
        with Queue(Replica(transport, "local", 2), record, 3) as queue:
            for count, number in enumerate(queue.take(range(3))):
                if count == 0:
                    both.wait(60)  # each has one
                time.sleep(0.1 * transport.rank)
                done.append(number)
                queue.add(number, [number])
            assert sorted(done) == [0, 1, 2]
            return queue.rows(range(3))

    assert run_ranks(2, work) == [[0, 1, 2]] * 2


def test_a_folder_that_leaders_do_not_share_is_refused(tmp_path: Path) -> None:
    """Two ranks with folders of their own, as on hosts without a common file system."""
    world, said = LoopbackWorld(2), []

    def rank(number: int) -> None:
        transport = LoopbackTransport(world, number)
        journals = Journals(tmp_path / str(number))
        journals.folder.mkdir(parents=True)
        try:
            Replica(transport, "local", 2).check_shared(journals, "out", patience_s=0.2)
        except UserError as error:
            said.append(str(error))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 2 and all("--out out: rank(s) 1 do not see what rank 0 writes there" in one for one in said)


def test_samples_are_found_by_their_task_item_and_first_sample(tmp_path: Path) -> None:
    parts, batches = Parts(tmp_path), [Batch(task, (4, 5), samples=(n,), of=2) for task in (0, 1) for n in (0, 1)]
    for number, batch in enumerate(batches):
        images = [np.full((2, 3), 10 * number + place, np.float32) for place in range(2)]
        parts.keep(batch, {"tapa": [ItemSamples(Moments.of(image_YX), Cost(number)) for image_YX in images]})
    for number, batch in enumerate(batches):
        found = [parts.read(batch, index)["tapa"] for index in batch.indices]
        assert [float(one.restored01_YX[0, 0]) for one in found] == [10 * number, 10 * number + 1]
        assert [one.cost.seconds for one in found] == [number] * 2
    assert parts.merged(batches[2:], 5)["tapa"].restored01_YX[0, 0] == 26


# Options that change no bit of a result, and those that presets, voxels and a bound's own record tell apart.
UNSEEN = {
    *("input", "mask", "slices", "roi", "truth", "image", "format", "preset", "quality", "quality_slices"),
    *("quality_every", "exact", "out", "overwrite", "resume", "ranks", "parallel", "replicas", "dry_run", "quiet"),
    *("log_level", "follow_links"),
}


@pytest.mark.parametrize("name", sorted({one.name for one in (*INPAINT, *GENERATE)} - UNSEEN))
def test_whatever_results_depend_on_is_compared_when_a_run_goes_on(name: str, tmp_path: Path) -> None:
    given = ["--input", str(SLICE), "--out", str(tmp_path / "out"), "--ranks", "1", "--samples", "2"]
    values = parse("inpaint", "", with_settings(INPAINT), given)
    prepared = prepare(values, 1, 0.0)

    def described(values: dict[str, Any]) -> dict[str, Any]:
        return describe(replace(prepared, values=values, inputs=partial(describe_inputs, (), values)))

    assert described(values | {name: 3}) != described(values) == described(dict(values))
