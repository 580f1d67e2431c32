"""Faults of whole jobs: something happens to a command at some stage, and what it has kept goes on to the end."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import tifffile
from commands.killed_runs import results
from covering import covering_set
from faulty_calls import ABORTS, judge_line
from launching import end_group
from strikes import LIMITS, ON_FIRE, SIGNALS, Strike
from struck_run import STAGES
from warm import Started

from cocodiff.jobs.folder import Manifest
from cocodiff.jobs.journal import PARTIAL, Journals

LIMIT_S = 240.0  # a run that has not ended by then hangs


class Kind(NamedTuple):
    """A command with its options. ranks: of a replica; replicas: of the struck run, while others may have one."""

    words: tuple[str, ...]
    ranks: int = 2
    replicas: int = 1


INPAINT = ("inpaint", "--batch", "1", "--exact_slices", "1")
GENERATE = ("generate", "--height", "32", "--width", "32", "--prompt", "a", "b", "c")
COMMANDS = {
    "inpaint": Kind(INPAINT),
    "inpaint, one rank": Kind(INPAINT, 1),
    "inpaint, replicas": Kind(INPAINT, 2, 2),
    "inpaint, samples": Kind((*INPAINT, "--samples", "3"), 1, 2),
    "inpaint, quality": Kind((*INPAINT, "--quality", "30dB", "--quality_slices", "1")),
    "inpaint, displaced": Kind((*INPAINT, "--preset", "coded", "--arrival", "displaced", "--fine_steps", "0")),
    "inpaint, overwrite": Kind((*INPAINT, "--preset", "flat", "cocodiff", "--overwrite")),
    "generate": Kind(GENERATE),
    "generate, replicas": Kind(GENERATE, 1, 2),
    "generate, quality": Kind((*GENERATE, "--quality", "30dB", "--guidance", "1")),
    "sweep": Kind(("sweep",)),
    "sweep, replicas": Kind(("sweep",), 2, 2),
}
FORMATS = ("tiff", "sequence", "zarr", "h5")
# A signal goes to one rank, to the process that forked them, or to all.
OF_SIGNALS = ("KILL", "KILL job", "KILL all", "STOP", "TERM", "TERM job", "HUP", "HUP all", "INT all")
OF_DISKS = ("no space", "short write", "full disk")
MESSAGES = ("flipped", "lost")
FAULTS = (*OF_SIGNALS, *OF_DISKS, *MESSAGES, "pause", "exception", "exit", "slow", "hang", "vanished", "damaged")
RESUME = "resume"
FILES = ("create", "write", "put together", "hand over", "publish")


def fits(command: str, fault: str, moment: str) -> bool:
    alone = COMMANDS[command].ranks * COMMANDS[command].replicas == 1
    if alone and (fault in ("STOP", "hang", "exit", *MESSAGES) or " all" in fault or " job" in fault):
        return False
    if moment == "put together" and command.split(", ")[-1] not in ("samples", "quality"):
        return False
    if fault in MESSAGES or fault == "full disk":
        return moment in ("attend" if fault in MESSAGES else "write", RESUME)
    if fault == "damaged":
        return moment == "write" and not command.startswith("sweep")
    return fault not in OF_DISKS or moment in (*FILES, RESUME)


def choose_all() -> list[tuple[str, str, str]]:
    """Each two of a command, a fault and a moment that make sense, in any order, which is always the same."""
    chosen = covering_set([*COMMANDS], FAULTS, (*STAGES, RESUME), fits=fits)
    return random.Random(0).sample(chosen, len(chosen))


class Jobs:
    """Cases in a folder; runs that nothing happens to are made once for each choice of options."""

    def __init__(self, folder: Path) -> None:
        from tiny_pipelines import clip_text, sd3_pipeline

        self.folder, self.chosen = folder, choose_all()
        self.inputs = folder / "inputs"
        made = folder / f"inputs.{os.getpid()}"
        if not self.inputs.exists():
            made.mkdir()
            volume = np.random.default_rng(0).integers(0, 60000, (4, 64, 80), dtype=np.uint16)
            tifffile.imwrite(made / "scan.tif", volume, photometric="minisblack")
            sd3_pipeline(**clip_text()).save_pretrained(made / "model")
            (made / "sweep.yaml").write_text("points: [{preset: flat}, {name: coded, preset: coded}]\n")
            try:
                made.rename(self.inputs)
            except OSError:  # another worker was quicker
                shutil.rmtree(made)

    def case(self, number: int, chance: random.Random) -> tuple[str, str, str, list[str]]:
        """Its fault, its command, what it was, and what went wrong."""
        command, fault, moment = self.chosen[number % len(self.chosen)]
        kind, job = COMMANDS[command], Job(self, number, command, chance)
        told = [moment, *job.told]
        whole = self.whole(command, job.options)
        if "--overwrite" in kind.words:
            shutil.copytree(whole, job.out)
        strikes = [job.strike(fault, moment, chance)]
        if moment == RESUME:
            kill = job.strike("KILL all", "write", chance)
            kill["number"] = chance.randint(2, 12)
            strikes = [kill, job.strike(fault, chance.choice(("attend", *FILES)), chance)]
        for once, given in enumerate(strikes):
            done = job.run(given, kind.replicas, "--resume" if once else "", fault)
            rank = (job.folder / "struck").read_text() if (job.folder / "struck").exists() else None
            strike = given["strike"]
            told.append(f"{given['stage']} {given['number']} {strike['fault']} {strike['who']}: {rank}, {done[0]}")
            job.judge(given, None if rank is None else int(rank or 0), whole, *done)
            (job.folder / "struck").unlink(missing_ok=True)
            job.restore_inputs()
        if fault == "damaged":
            told += damage(job.out, chance)
        replicas = chance.choice((1, kind.replicas))
        code, out, said = job.run({}, replicas, "--resume")
        if code or "Traceback" in said:
            job.wrong.append(f"went on and ended with {code}: {said}")
        else:
            job.compare(whole)
            # what ranks of a killed run met in goes when ranks are forked again
            forks = kind.ranks * replicas > 1 and "nothing is left to do" not in out
            met = [*job.temporary.iterdir()] if forks else []
            left = sorted(path.name for path in (*job.disk.iterdir(), *met) if path != job.out)
            left += [path.name for path in job.out.iterdir() if path.name.startswith((".cocodiff.", ".progress"))]
            job.wrong += [f"left {left}"] if left else []
        if not job.wrong:
            shutil.rmtree(job.folder)
        return fault, command, ", ".join(told), job.wrong

    def whole(self, command: str, options: list[str]) -> Path:
        """What the command gives that nothing happens to."""
        name = " ".join(["whole", command, *options]).replace("-", "")
        kept = self.folder / name / "disk" / "out"
        if not kept.exists():
            job = Job(self, f"{name} {os.getpid()}", command, None, options)
            code, _, said = job.run({}, 1)
            assert code == 0, said
            try:
                job.folder.rename(self.folder / name)
            except OSError:  # another worker was quicker
                shutil.rmtree(job.folder)
        return kept


class Job:
    """A job in a folder of its own, from its first start to its end."""

    def __init__(
        self, jobs: Jobs, name: object, command: str, chance: random.Random | None, options: list[str] | None = None
    ) -> None:
        self.kind, self.command = COMMANDS[command], command.partition(", ")[0]
        self.folder = jobs.folder / f"job {name}"
        self.disk, self.temporary = self.folder / "disk", self.folder / "temporary"
        for folder in (self.disk, self.temporary):
            folder.mkdir(parents=True)
        self.out = self.disk / "out"
        self.source = jobs.inputs
        self.input = self.folder / ("model" if self.command == "generate" else "scan.tif")
        self.restore_inputs()
        drawn = ["--format", chance.choice(FORMATS)] if chance is not None and self.command == "inpaint" else []
        self.options = drawn if options is None else options
        self.told = [" ".join(self.options)] if self.options else []
        self.wrong: list[str] = []

    def restore_inputs(self) -> None:
        if self.input.exists():
            return
        source = self.source / self.input.name
        shutil.copytree(source, self.input) if source.is_dir() else shutil.copy(source, self.input)

    def strike(self, fault: str, moment: str, chance: random.Random) -> dict[str, Any]:
        """What `struck_run` is to do. Early operations are struck more often than late ones, which may not come."""
        if fault == "damaged":
            fault = "KILL all"
        name, _, who = fault.partition(" ") if fault.split()[0] in SIGNALS else (fault, "", "")
        most = {"start": 1, "load": 2, "attend": 60, "create": 12, "write": 30, "publish": 12}.get(moment, 30)
        amount = {"short write": chance.choice((4096, 9000, 30000)), "full disk": chance.choice((60, 120, 200, 300))}
        strike = Strike(
            name,
            who or "one",
            str(self.folder / "struck"),
            delay_ms=chance.choice((0, 0, 1, 3, 10)),
            amount=amount.get(fault, chance.randint(1, 60)),
            inputs=str(self.input),
        )
        victim = chance.randrange(self.kind.ranks * self.kind.replicas)
        number = int(most * chance.random() ** 2)
        return {"stage": moment, "number": number, "victim": victim, "strike": asdict(strike)}

    def run(self, given: dict[str, Any], replicas: int, *more: str) -> tuple[int, str, str]:
        """A run to its end: its exit code, and what it said. more: --resume, and the fault whose limits it has."""
        words = [*self.kind.words, "--quiet", "--out", str(self.out), *self.options]
        words += ["--steps", "3"] if self.command == "sweep" else ["--steps", "2"]
        words += ["--model" if self.command == "generate" else "--input", str(self.input)]
        words += ["--config", str(self.source / "sweep.yaml")] if self.command == "sweep" else []
        words += ["--ranks", str(self.kind.ranks * replicas), "--replicas", str(replicas)]
        fault = more[1] if len(more) > 1 else ""
        limits = {"timeout_s": 60, "stall_timeout_s": 60, "start_timeout_s": 20} | LIMITS.get(fault, {})
        for name, value in limits.items():
            words += [f"--{name}", str(value)]
        words += ["--check_messages"] if fault in MESSAGES else []
        if "--resume" in more:
            words = [word for word in words if word != "--overwrite"]
            words += ["--resume"]
        given = given | {"temporary": str(self.temporary)}
        out, err = self.folder / "stdout", self.folder / "stderr"
        process = Started([json.dumps(given), *words], out, err, module="struck_run")
        try:
            code = process.wait(LIMIT_S)
            alive = wait_for_session(process.pid)
            self.wrong += [f"still there: {alive}"] if alive else []
        except subprocess.TimeoutExpired:
            return 124, out.read_text(), f"hangs: {err.read_text()}"
        finally:
            end_group(process.pid)
        return code, out.read_text(), err.read_text()

    def judge(self, given: dict[str, Any], rank: int | None, whole: Path, code: int, out: str, said: str) -> None:
        """Notes what is wrong with the end of a run that was to be struck. rank: which one was; None if none was."""
        strike = given["strike"]
        fault, who, ranks = strike["fault"], strike["who"], self.kind.ranks * self.kind.replicas
        wrong: list[str] = []
        reached = rank is not None or fault == "full disk"
        if code == 0:
            self.compare(whole)
        elif not reached:
            wrong.append(f"nothing was done to it, and it ended with {code}")
        elif fault == "KILL" and (who != "one" or ranks == 1):
            wrong += [] if code == -9 else [f"ended with {code}"]
        elif fault == "lost" and ABORTS.search(said):
            wrong += [] if code == 1 else [f"ended with {code}"]
        elif fault in OF_DISKS or fault == "vanished":
            lines = [line for line in said.splitlines() if not line.startswith("cocodiff: [rank ")]
            fits = all(line.startswith("cocodiff: ") for line in lines) and len(lines) in (1, 2)
            asked = "written" if fault in OF_DISKS else str(self.input)
            wrong += [] if fits and code in (1, 2) and asked in lines[0] else [f"ended with {code}"]
        elif fault == "exception" and f"cannot be written ({ON_FIRE})" in said:  # what a library raises at a new file
            wrong += [] if code == 2 else [f"ended with {code}"]
        elif ranks == 1 and fault == "exception":
            wrong += [] if code == 1 and f"cocodiff: RuntimeError: {ON_FIRE}" in said else [f"ended with {code}"]
        elif ranks == 1:
            wrong += [] if code == 130 and "cocodiff: interrupted" in said else [f"ended with {code}"]
        else:
            wrong += judge_line(fault if who == "one" else f"{fault} {who}", rank or 0, ranks, code, said)
        if code and not (fault == "KILL" and (who != "one" or ranks == 1)):
            wrong += self.judge_folder(whole, said)
        self.wrong += [*wrong, f"{strike}: {out} {said}"] if wrong else []

    def judge_folder(self, whole: Path, said: str) -> list[str]:
        """What is wrong with what a run that ended badly, and could clean up, has left."""
        partial = self.out / PARTIAL
        kept = Journals(partial).kept()
        finished = (self.out / "metrics.json").exists()
        wrong = [f"left {path.name}" for path in self.temporary.iterdir()]
        places = {*self.disk.iterdir(), *self.out.glob(".cocodiff.*")}
        wrong += [f"left {path.name}" for path in places - {self.out, partial}]
        manifest = Manifest.read(partial)
        if manifest is not None:
            told = f"the results are finished, in {partial}"
        else:
            told = f"{kept} are kept: go on with --resume" if kept is not None else ""
            wrong += ["left a hidden folder, and nothing is kept there"] if kept is None and partial.exists() else []
        wrong += [f"did not say that {told}"] if told not in said else []
        if manifest is not None:
            pass  # some may have moved up already; the next start puts the others beside them
        elif finished:
            self.compare(whole)
        elif self.out.exists() and not {path.name for path in self.out.iterdir()} <= {PARTIAL}:
            wrong.append(f"half a result: {sorted(path.name for path in self.out.iterdir())}")
        return wrong

    def compare(self, whole: Path) -> None:
        """Notes where the results are not those of a run that nothing happened to."""
        if results(self.out) != results(whole):
            self.wrong.append(f"other results than {whole}")
        files, expected = ({path.name for path in folder.glob("[!.]*")} for folder in (self.out, whole))
        if files != expected:
            self.wrong.append(f"files {files}, not {expected}")


def wait_for_session(leader: int) -> list[str]:
    """The processes of a session that are there ten seconds after its leader has ended."""
    deadline = time.monotonic() + 10
    while True:
        found = []
        for process in psutil.process_iter(["name", "status"]):
            try:
                if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {process.info['name']}")
            except ProcessLookupError:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def damage(out: Path, chance: random.Random) -> list[str]:
    """What a purge of old files or a faulty disk may do to an unfinished job. Returns what was done."""
    partial = out / PARTIAL
    if Manifest.read(partial) is not None or not partial.exists():
        return []
    folders = ("images/**/*", ".progress/results/*")
    images = sorted(path for folder in folders for path in partial.glob(folder) if path.is_file())
    kept = sorted(partial.glob(".progress/*/*.npz")) + sorted(partial.glob(".progress/*.jsonl"))
    kind = chance.choice(("purge", "remove", "truncate", "overwrite"))
    if kind == "purge" and images:
        shutil.rmtree(partial / "images")
        shutil.rmtree(partial / ".progress" / "results", ignore_errors=True)
        return ["images purged"]
    if kind == "purge" or not [*images, *kept]:
        return []
    path = chance.choice([*images, *kept])
    if kind == "remove":
        path.unlink()
    elif kind == "truncate":
        os.truncate(path, path.stat().st_size * chance.randrange(100) // 100)
    else:
        path.write_bytes(chance.randbytes(path.stat().st_size) + b"\n")
    return [f"{kind} {path.relative_to(partial)}"]
