"""What an unfinished run has lost is done again: purged and damaged results, samples and journals; and runs that are
finished already."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tifffile
import tiny_pipelines
from cocodiff_eval.harness import tasks
from killed_runs import results

from cocodiff.cli.main import main
from cocodiff.jobs.journal import PARTIAL, Entry, Journal, Journals
from cocodiff.jobs.replicas import Queue

SLICES = 4


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "scan.tif"
    volume = np.random.default_rng(0).integers(0, 60000, (SLICES, 64, 64), dtype=np.uint16)
    tifffile.imwrite(path, volume, photometric="minisblack")
    return path


class Runs:
    """Runs of one job in this process, the first of which is interrupted once some batches are finished."""

    def __init__(self, words: Sequence[object], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out, self.partial = folder / "out", folder / "out" / PARTIAL
        self._words, self._capsys = [*map(str, words), "--quiet"], capsys
        self.whole = folder / "whole"
        assert self("--out", self.whole)[0] == 0
        with pytest.MonkeyPatch.context() as patch:
            add, added = Queue.add, []

            def and_end(queue: Queue, *of_batch: Any) -> None:
                add(queue, *of_batch)
                added.append(of_batch)
                if len(added) == 3:
                    raise KeyboardInterrupt

            patch.setattr(Queue, "add", and_end)
            assert self("--out", self.out)[0] == 130
        shutil.copytree(self.partial, folder / "saved")
        self._saved = folder / "saved"

    def __call__(self, *more: Any) -> tuple[int, str]:
        self._capsys.readouterr()
        code = main([*self._words, *map(str, more)])
        return code, "".join(self._capsys.readouterr())

    def restore(self) -> None:
        """To where the run was interrupted."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self._saved, self.partial)

    def go_on_after(self, damage: Callable[[Path], object]) -> str:
        """Ends the interrupted run after its folder was damaged: to the same results as ever."""
        self.restore()
        damage(self.partial)
        code, said = self("--out", self.out, "--resume")
        assert code == 0, said
        assert results(self.out) == results(self.whole)
        return said


@pytest.fixture
def runs_of(scan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Runs]:
    """Runs of `inpaint` with some more words."""
    words = ("inpaint", "--input", scan, "--steps", 1, "--batch", 1, "--exact_slices", 1)
    return lambda *more: Runs([*words, *more], tmp_path, capsys)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def overwritten(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def purged(partial: Path) -> None:
    shutil.rmtree(partial / "images")
    shutil.rmtree(partial / ".progress" / "results", ignore_errors=True)


def result(partial: Path) -> Path:
    (found,) = (partial / ".progress" / "results").iterdir()
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("word", ["tiff", "h5", "sequence", "zarr", "npy"])
def test_results_that_are_gone_are_made_again(runs_of: Callable[..., Runs], word: str) -> None:
    runs = runs_of("--format", word)
    assert "going on: 3 of 4 slices are there already" in runs.go_on_after(lambda partial: None)
    damages: list[Callable[[Path], object]] = [
        purged,
        lambda partial: cut(result(partial)),
        lambda partial: overwritten(result(partial)),
        lambda partial: result(partial).unlink(),
    ]
    for damage in damages:
        said = runs.go_on_after(damage)
        assert "finished batch(es) are damaged or gone: these are done again" in said
        assert "going on: 3 of" not in said


@pytest.mark.sample(1)
@pytest.mark.parametrize("word", ["tiff", "h5", "sequence", "zarr", "npy"])
def test_what_was_half_written_in_the_results_format_is_written_again(
    runs_of: Callable[..., Runs], monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """A full disk when all slices are there; none is made again."""
    runs = runs_of("--format", word)
    runs.restore()
    with monkeypatch.context() as patch:
        write = tasks.write_volume

        def full(*given: Any) -> Any:
            def failing(index: int) -> np.ndarray:
                if index == 2:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return given[5](index)

            return write(*given[:5], failing, *given[6:])

        patch.setattr(tasks, "write_volume", full)
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
        code, said = runs("--out", runs.out, "--resume")
    assert code == 1 and "could not be written: No space left on device" in said
    assert "results take 0.0 GiB while they are made, and then as much in their own format; the disk of" in said
    assert "4 of 4 slices are kept: go on with --resume" in said and not (runs.out / "images").exists()
    code, said = runs("--out", runs.out, "--resume")
    assert code == 0 and "going on: 4 of 4 slices are there already" in said
    assert results(runs.out) == results(runs.whole)


def test_images_that_are_gone_are_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()).save_pretrained(model)
    words = ("generate", "--model", model, "--height", 32, "--width", 32, "--steps", 1, "--no-exact")
    runs = Runs([*words, "--prompt", "a", "b", "c", "d"], tmp_path, capsys)
    assert "going on: 3 of 4 images are there already" in runs.go_on_after(lambda partial: None)
    for damage, kept in ((purged, None), (lambda partial: cut(partial / "images" / "b_tapa.png"), 2)):
        assert ("nothing to resume" if kept is None else f"going on: {kept} of 4") in runs.go_on_after(damage)
    assert runs("--out", runs.whole, "--resume")[0] == 0
    code, said = runs("--out", runs.whole, "--resume", "--seed", 1)
    assert code == 2 and "with other settings (seed: 0 there, 1 now)" in said


def test_damaged_samples_and_journals_count_as_not_done(runs_of: Callable[..., Runs]) -> None:
    """Of three samples, and one in which more is hidden."""
    runs = runs_of("--samples", 3, "--slices", "0:1")

    def sample(partial: Path) -> Path:
        return sorted(partial.glob(".progress/samples/*.npz"))[1]

    def journal(partial: Path) -> Path:
        (found,) = partial.glob(".progress/*.jsonl")
        return found

    def by_hand(partial: Path) -> None:
        added = Journals(partial).open_journal("9")
        for number, size in ((99, 1), (-1, 1), (0, 2), (10**9, 10**9)):
            added.add(Entry(number, size, [[0, 0, {"psnr_db": 1}]]))

    for damage, kept in (
        (lambda partial: None, 3),
        (lambda partial: cut(sample(partial)), 2),
        (lambda partial: sample(partial).write_bytes(b"garbage"), 2),
        (lambda partial: sample(partial).unlink(), 2),
        (by_hand, 2),
        (lambda partial: journal(partial).open("ab").write(b'{"number": 2, "size": "x", "rows": 3}\n\xff[[[\n'), 3),
        (lambda partial: journal(partial).write_bytes(journal(partial).read_bytes().replace(b"size", b"sice", 1)), 2),
    ):
        assert f"going on: {kept} of 4 samples are there already" in runs.go_on_after(damage)
    runs.restore()
    cut(runs.partial / ".progress" / "job.json")
    code, said = runs("--out", runs.out, "--resume")
    assert code == 2 and "the record of its settings is damaged, so that it cannot go on" in said


def test_a_run_that_is_finished_has_nothing_left_to_do(scan: Path, runs_of: Callable[..., Runs]) -> None:
    runs = runs_of()
    before = (runs.whole / "report.html").stat()
    code, said = runs("--out", runs.whole, "--resume")
    assert code == 0 and f"nothing is left to do: the results in {runs.whole} are finished" in said
    assert (runs.whole / "report.html").stat() == before
    watched = ("--timeout_s", 9, "--check_messages")  # which change no result
    code, said = runs("--out", runs.whole, "--resume", *watched)
    assert code == 0 and "nothing is left to do" in said
    code, said = runs("--out", runs.whole, "--resume", "--seed", 1)
    assert code == 2 and "are finished, with other settings (seed: 0 there, 1 now): choose another folder" in said
    tifffile.imwrite(scan, 1 + tifffile.imread(scan), photometric="minisblack")
    code, said = runs("--out", runs.whole, "--resume")
    assert code == 2 and "with other settings (inputs: voxels" in said
    tifffile.imwrite(scan, tifffile.imread(scan) - 1, photometric="minisblack")
    next((runs.whole / "images").glob("*.tif")).unlink()
    code, said = runs("--out", runs.whole, "--resume")
    assert (
        code == 2 and "1 of its files are gone (images/scan_block_tapa.tif): make them again with --overwrite" in said
    )
    assert runs("--out", runs.whole)[0] == 2


def test_a_run_that_was_to_replace_results_and_was_killed_names_what_it_has_kept(runs_of: Callable[..., Runs]) -> None:
    runs = runs_of()
    shutil.copytree(runs.whole, runs.out, dirs_exist_ok=True)
    job = runs.partial / ".progress" / "job.json"
    job.write_text(job.read_text().replace('"overwrite": false', '"overwrite": true'))
    code, said = runs("--out", runs.out)
    assert code == 2 and "has finished 3 of 4 slices there: go on with --resume, or start afresh with --over" in said
    code, said = runs("--out", runs.out, "--resume")
    assert code == 0 and "going on: 3 of 4 slices are there already" in said
    assert results(runs.out) == results(runs.whole)


def test_what_a_journal_tells_of_is_on_the_disk_before_it(
    scan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsynced: Callable[[Path], list[str]]
) -> None:
    add, behind = Journal.add, []

    def look_and_add(journal: Journal, entry: Entry) -> None:
        behind.append(unsynced(tmp_path / "out" / PARTIAL / ".progress" / "results"))
        add(journal, entry)

    monkeypatch.setattr(Journal, "add", look_and_add)
    words = ("inpaint", "--input", scan, "--steps", 1, "--batch", 1, "--slices", "0:2", "--no_exact", "--quiet")
    assert main([*map(str, words), "--out", str(tmp_path / "out")]) == 0
    assert behind == [[], []]
