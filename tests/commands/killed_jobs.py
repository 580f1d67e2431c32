"""Jobs that are killed at random moments, lose files, and go on: cases for a storm, each from a seed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import tifffile
from killed_runs import results
from launching import end_group
from warm import Started

from cocodiff.commands.journal import Journals
from cocodiff.commands.manifest import Manifest

LIMIT_S = 240.0  # a run that has not ended by then hangs
# Stages, and file operations in each: results are created or published in some, `some time` is any moment.
RESULTS = {"create": 8, "hand over": 30, "publish": 8}
OTHERS = {"write": 30, "put together": 30, "some time": 4}
FORMATS = ("tiff", "sequence", "zarr", "h5")


class Storm:
    """Cases in a folder; runs that nothing happens to are made once for each choice of options."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.scan = folder / "scan.tif"
        volume = np.random.default_rng(0).integers(0, 60000, (4, 64, 80), dtype=np.uint16)
        tifffile.imwrite(self.scan, volume, photometric="minisblack")

    def case(self, number: int) -> tuple[str, list[str]]:
        """A job, from its first start to its end. Returns what it was, and what went wrong."""
        chance = random.Random(self.seed * 1000 + number)
        options, size = self._options(number, chance)
        whole = self.folder / "-".join(["whole", str(size), *options]).replace("--", "")
        if not whole.exists():
            self._run(["--out", str(whole), *options, *_ranks(size, 1)], None)
        out = self.folder / f"case{number}"
        told, wrong, goes_on = [" ".join(options)], [], "--resume"
        if chance.random() < 0.3:  # into a folder of older results, which are replaced
            shutil.copytree(whole, out)
            goes_on = "--overwrite"
            told.append("over older results")
        for _ in range(chance.randint(1, 2)):
            strike = self._strike(number, chance)
            replicas = chance.choice((1, 2))
            code, text = self._run(["--out", str(out), *options, *_ranks(size, replicas), goes_on], strike, chance)
            goes_on = "--resume"
            told.append(f"{size * replicas} ranks in {replicas}: {' '.join(strike)}: {code}")
            if code not in (0, 1, -signal.SIGKILL) or "Traceback" in text:
                wrong.append(f"ended with {code}: {text}")
            told += self._damage(out, chance) if code else []
        code, text = self._run(["--out", str(out), *options, *_ranks(size, chance.choice((1, 2))), "--resume"], None)
        if code or "Traceback" in text:
            wrong.append(f"went on and ended with {code}: {text}")
        elif results(out) != results(whole):
            wrong.append(f"other results than {whole}")
        left = [path.name for path in (*self.folder.glob(f".{out.name}.*"), *out.glob(".cocodiff.[!f]*"))]
        if not wrong:
            wrong += [f"left {left}"] if left else []
            shutil.rmtree(out)
        return ", ".join(told), wrong

    @staticmethod
    def _options(number: int, chance: random.Random) -> tuple[list[str], int]:
        """Of a job, and the ranks of a replica."""
        options = ["--format", FORMATS[number % len(FORMATS)], "--samples", str(chance.choice((1, 3)))]
        quality = chance.random() < 0.35
        options += ["--quality", "30dB", "--quality_slices", "1"] if quality else []
        return [*options, "--exact_slices", str(chance.choice((1, 4)))], 2 if quality else chance.choice((1, 2))

    @staticmethod
    def _strike(number: int, chance: random.Random) -> list[str]:
        """A stage, file operations before the kill (batches for `some time`), milliseconds after them, and who."""
        stages = RESULTS if number % 3 == 0 else OTHERS
        stage = chance.choice([*stages])
        delay_ms, who = chance.choice((0, 0, 1, 3, 10)), chance.choice(("all", "one"))
        return [stage, str(chance.randrange(stages[stage])), str(delay_ms), who]

    def _run(self, words: list[str], strike: list[str] | None, chance: random.Random | None = None) -> tuple[int, str]:
        """A run to its end: its exit code, and all that it said. Raises TimeoutExpired where it hangs."""
        log = self.folder / "log"
        fixed = ["inpaint", "--input", str(self.scan), "--steps", "2", "--batch", "1", "--quiet"]
        if strike is None or strike[0] == "some time":
            process = Started([*fixed, *words], log)
        else:
            process = Started([*strike, *fixed, *words], log, module="struck_run")
        ranks: list[psutil.Process] = []
        try:
            if strike is not None and strike[0] == "some time" and chance is not None:
                ranks = _kill_in_time(process, Path(words[words.index("--out") + 1]), strike, chance)
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return 124, f"hangs: {log.read_text()}"
        finally:
            end_group(process.pid)
            psutil.wait_procs(ranks, timeout=10)
        return code, log.read_text()

    @staticmethod
    def _damage(out: Path, chance: random.Random) -> list[str]:
        """What a purge of old files or a faulty disk may do to an unfinished job. Returns what was done."""
        partial = _partial(out)
        manifest = Manifest.read(partial)
        if manifest is None or manifest.ready:
            return []
        images = sorted(path for path in partial.glob("images/**/*") if path.is_file())
        kept = sorted(partial.glob(".progress/*/*.npz")) + sorted(partial.glob(".progress/*.jsonl"))
        kind = chance.choice(("nothing", "nothing", "nothing", "purge", "remove", "truncate", "overwrite"))
        if kind == "purge" and images:
            shutil.rmtree(partial / "images")
            return ["images purged"]
        if kind in ("nothing", "purge") or not [*images, *kept]:
            return []
        path = chance.choice([*images, *kept])
        if kind == "remove":
            path.unlink()
        elif kind == "truncate":
            os.truncate(path, path.stat().st_size * chance.randrange(100) // 100)
        else:
            path.write_bytes(chance.randbytes(path.stat().st_size) + b"\n")
        return [f"{kind} {path.relative_to(partial)}"]


def _ranks(size: int, replicas: int) -> list[str]:
    return ["--ranks", str(size * replicas), "--replicas", str(replicas)]


def _partial(out: Path) -> Path:
    return out / ".cocodiff.partial" if out.exists() else out.parent / f".{out.name}.partial"


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children()
    except psutil.NoSuchProcess:
        return []


def _kill_in_time(process: Started, out: Path, strike: list[str], chance: random.Random) -> list[psutil.Process]:
    """Kills a run, or one of its ranks, some time after as many more batches are finished as the strike says. Returns
    its ranks."""
    journals, deadline = Journals(_partial(out)), time.monotonic() + LIMIT_S
    batches = len(journals.finished()) + int(strike[1]) % 4
    while process.poll() is None and len(journals.finished()) < batches and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 0.3))
    ranks = sorted(_children(process.pid), key=lambda rank: rank.pid)
    if process.poll() is not None:
        return ranks
    if strike[3] == "all" or not ranks:
        process.kill()  # its ranks die with it
    else:
        chance.choice(ranks).kill()
    return ranks
