"""Whole jobs that are struck at some moment (`struck_process.py`) and go on to the end: what they leave, say and
make."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

import numpy as np
import tifffile
import yaml
from campaign.strikes import FAULTS, OF_DISKS, SIGNALS, Strike, judge_line, processes_of_session
from campaign.struck_process import NOTED, STAGES
from commands.killed_runs import results
from covering import covering_set
from launching import end_group, with_options
from warm import Started

from cocodiff.jobs.folder import NOTHING_LEFT, Manifest
from cocodiff.jobs.store import PARTIAL, Store

LIMIT_S = 240.0  # a run that has not ended by then hangs
FILES = ("create", "write", "put together", "hand over", "publish")
RESUME = "resume"  # the job is killed, and struck when it goes on
OF_ONE = ("KILL", "TERM", "HUP", "INT", *OF_DISKS, "exception", "vanished")  # rank alone
PATIENT = {"timeout_s": 60, "stall_timeout_s": 60, "start_timeout_s": 20}


class Kind(NamedTuple):
    """A command with its options. ranks: of a replica; replicas: of the struck run, while others may have one; input:
    among those of `Jobs`; options: further ones, of which one is drawn."""

    words: tuple[str, ...]
    ranks: int = 2
    replicas: int = 1
    input: str = "scan.tif"
    options: tuple[str, ...] = ("",)


def read_kinds(of_names: dict[str, Any]) -> dict[str, Kind]:
    return {name: Kind(**about | {"words": tuple(about["words"].split())}) for name, about in of_names.items()}


JOBS = yaml.safe_load(Path(__file__).with_name("jobs.yaml").read_text())
FORMATS, COMMANDS, ALONE = JOBS["formats"], read_kinds(JOBS["commands"]), read_kinds(JOBS["alone"])
KINDS: dict[str, Kind] = COMMANDS | ALONE
INPAINT = COMMANDS["inpaint"].words


def fits(command: str, fault: str, moment: str) -> bool:
    alone = KINDS[command].ranks * KINDS[command].replicas == 1
    if alone and (fault in ("STOP", "hang", "exit") or whom_of(fault)[1] != "one"):
        return False
    if moment == "put together" and command.split(", ")[-1] not in ("samples", "quality"):
        return False
    return fault not in OF_DISKS or moment in (*FILES, RESUME)


def whom_of(fault: str) -> tuple[str, str]:
    """Return the name of a fault, and whom it strikes: "one" rank, or what is told behind the name of a signal."""
    name, _, who = fault.partition(" ")
    return (name, who or "one") if name in SIGNALS else (fault, "one")


def choose_all(commands: dict[str, Kind], faults: Iterable[str] = FAULTS) -> list[Any]:
    """Each two of a command, a fault and a moment that make sense, in any order, which is always the same."""
    chosen = covering_set([*commands], [*faults], (*STAGES, RESUME), fits=fits)
    return random.Random(0).sample(chosen, len(chosen))


class Jobs:
    """Jobs in a folder, with their inputs; runs that nothing happens to are made once for each choice of options."""

    def __init__(self, folder: Path) -> None:
        from tiny_pipelines import clip_text, sd3_pipeline

        self.folder, self.inputs, chance = folder, folder / "inputs", np.random.default_rng(0)
        self.inputs.mkdir()
        holes = np.zeros((20, 32, 32), np.uint8)
        holes[4:9, 5:13, 6:15] = 255
        for name, voxels in {
            "scan": chance.integers(0, 60000, (4, 64, 80), dtype=np.uint16),
            "volume": chance.integers(20000, 40000, holes.shape, dtype=np.uint16),
            "holes": holes,
        }.items():
            tifffile.imwrite(self.inputs / f"{name}.tif", voxels, photometric="minisblack")
        sd3_pipeline(**clip_text()).save_pretrained(self.inputs / "model")
        (self.inputs / "sweep.yaml").write_text("points: [{preset: flat}, {name: coded, preset: coded}]\n")
        (self.inputs / "alone.yaml").write_text("points: [{preset: flat}, {name: other, preset: tapa}]\n")

    def job(self, name: object, command: str, *options: str) -> Job:
        return Job(self, name, command, options)

    def drawn(self, name: object, command: str, chance: random.Random) -> Job:
        job = self.job(name, command, *chance.choice(KINDS[command].options).split())
        if "--overwrite" in job.kind.words:
            shutil.copytree(job.whole(), job.out)
        return job

    def struck(self, number: int, chance: random.Random, chosen: tuple[str, ...]) -> tuple[str, Job]:
        """A job to which something has happened: what that was, and the job."""
        command, fault, moment = chosen
        job = self.drawn(number, command, chance)
        told = [*chosen, *job.options]
        strikes = [job.strike(fault, moment, chance)]
        if moment == RESUME:
            kill = job.strike("KILL all", "write", chance)
            kill["number"] = chance.randint(2, 12)
            strikes = [kill, job.strike(fault, chance.choice(("attend", *FILES)), chance)]
        for once, given in enumerate(strikes):
            more = ["--resume"] if once else []
            done = job.run(*more, given=given, replicas=job.kind.replicas, fault=fault)
            told.append(f"{given['stage']} {given['number']} {given['strike']['fault']}: {job.struck()}, {done.code}")
            job.judge(given["strike"], job.struck(), done)
            job.mark.unlink(missing_ok=True)
            job.restore_input()
        return ", ".join(told), job


class Done(NamedTuple):
    """The end of a run."""

    code: int  # 124 for one that hangs
    out: str
    said: str


class Job:
    """A job in a folder of its own, from its first start to its end. wrong: what was not as it should be."""

    def __init__(self, jobs: Jobs, name: object, command: str, options: tuple[str, ...] = ()) -> None:
        self.jobs, self.command, self.kind = jobs, command, KINDS[command]
        self.options, self.folder, self.wrong = options, jobs.folder / f"job {name}", list[str]()
        self.disk, self.temporary = self.folder / "disk", self.folder / "temporary"
        for folder in (self.disk, self.temporary):
            folder.mkdir(parents=True)
        self.out, self.input, self.notes = self.disk / "out", self.folder / self.kind.input, self.folder / "notes"
        self.partial, self.store = self.out / PARTIAL, Store(self.out / PARTIAL)
        self.mark = self.folder / "struck"
        self.restore_input()

    def struck(self) -> int | None:
        """The rank that was struck; None if none was."""
        return int(self.mark.read_text() or 0) if self.mark.exists() else None

    def restore_input(self) -> None:
        source = self.jobs.inputs / self.input.name
        if not self.input.exists():
            shutil.copytree(source, self.input) if source.is_dir() else shutil.copy(source, self.input)

    def whole(self) -> Path:
        """The results of the same job when nothing happens to it."""
        name = " ".join(["whole", self.command, *self.options]).replace("-", "")
        folder = self.jobs.folder / f"job {name}"
        if not folder.exists():
            job = self.jobs.job(name, self.command, *self.options)
            done = job.run()
            assert done.code == 0, done.said
            assert not job.wrong and job.noted(), job.wrong
        return folder / "disk" / "out"

    def noted(self) -> list[int]:
        """The batches that were saved, in all starts."""
        return [*map(int, self.notes.read_text().split())] if self.notes.exists() else []

    def strike(self, fault: str, moment: str, chance: random.Random) -> dict[str, Any]:
        """Choose what a run is to do. Early operations are struck more often than late ones, which may not come."""
        name, who = whom_of(fault)
        most = {"start": 1, "load": 2, "attend": 60, "create": 12, "write": 30, "publish": 12}.get(moment, 30)
        delay_ms, amount = chance.choice((0, 0, 1, 3, 10)), chance.choice((4096, 9000, 30000))
        strike = Strike(name, who, str(self.mark), delay_ms, amount, str(self.input))
        return {"stage": moment, "number": int(most * chance.random() ** 2), "strike": asdict(strike)}

    def kill_when_noted(self, count: int) -> None:
        """Have a run killed as soon as so many batches are finished."""
        strike = Strike("KILL", "all", str(self.mark))
        self.run(given={"stage": NOTED, "number": 2 * count - 1, "strike": asdict(strike)})
        assert len(self.store.finished()) == count

    def run(self, *more: object, given: Any = None, replicas: int = 1, fault: str = "", ignored: Any = ()) -> Done:
        """Run the command to its end. more: options, each in the place of the one of its name if there is one; given:
        what is done to it, and fault, whose limits it has; ignored: signals."""
        first, *fixed = self.kind.words
        words = [first, *(str(self.jobs.inputs / word) if "." in word else word for word in fixed), *self.options]
        words += ["--model" if self.kind.input == "model" else "--input", str(self.input), "--quiet"]
        words += ["--steps", "3" if first == "sweep" else "2", "--out", str(self.out)]
        words += ["--replicas", str(replicas), "--ranks", str(self.kind.ranks * replicas)]
        for name, value in (PATIENT | FAULTS.get(fault, {}).get("settings", {})).items():
            words += [f"--{name}", str(value)]
        if "--resume" in more:
            words = [word for word in words if word != "--overwrite"]
        words = with_options(words, *map(str, more))
        given = {"temporary": str(self.temporary), "notes": str(self.notes), "ignored": bool(ignored), **(given or {})}
        out, said = (self.folder / name for name in ("stdout", "stderr"))
        process = Started([json.dumps(given), *words], out, said, module="campaign.struck_process", ignored=ignored)
        code = 124
        with suppress(TimeoutExpired):
            code = process.wait(LIMIT_S)
            alive = processes_of_session(process.pid)
            self.wrong += [f"still there: {alive}"] if alive else []
        end_group(process.pid)
        return Done(code, out.read_text(), said.read_text())

    def go_on(self, replicas: int = 1, harmed: bool = False) -> str:
        """End the job, and note what is wrong then. harmed: some of what was finished may be gone. Returns what the
        run said."""
        kept, finished, before = self.store.kept(), self.store.finished(), len(self.noted())
        manifest = Manifest.read(self.partial)
        if manifest is None and self.store.header() is None:
            manifest = Manifest.read(self.out)
        ended = manifest is not None and bool(manifest.settings)
        done = self.run("--resume", replicas=replicas)
        if done.code or "Traceback" in done.said:
            self.wrong.append(f"went on and ended with {done.code}: {done.said}")
            return done.said
        self.compare()
        told = f"going on: {kept} are there already" if kept else "nothing to resume: starting afresh"
        again = [number for number in self.noted()[before:] if ended or number in finished]
        if ended:
            told = "nothing is left to do"
        if not harmed and (told not in done.out or again):
            self.wrong.append(f"made {again} again, and said {done.out!r}, not {told!r}")
        # what ranks of a killed run met in goes when ranks are forked again
        forks = self.kind.ranks * replicas > 1 and "nothing is left to do" not in done.out
        left = [path.name for path in (*self.disk.iterdir(), *(self.temporary.iterdir() if forks else ()))]
        left = [name for name in left if name != "out"] + [path.name for path in self.out.glob(".cocodiff.*")]
        self.wrong += [f"left {left}"] if left else []
        return done.out

    def judge(self, strike: dict[str, Any], rank: int | None, done: Done) -> None:
        """Note what is wrong with the end of a run that was to be struck. rank: which one was; None if none was."""
        fault, who, ranks = strike["fault"], strike["who"], self.kind.ranks * self.kind.replicas
        code, out, said = done
        killed, before = fault == "KILL" and (who != "one" or ranks == 1), len(self.wrong)
        right = True
        if code == 0:
            self.compare()
        elif rank is None:
            right = False  # nothing was done to it
        elif killed:
            right = code == -9
        else:
            of_all = fault if who == "one" else f"{fault} {who}"
            self.wrong += judge_line(of_all, rank, ranks, str(self.input), code, said)
        if code and not killed:
            self.judge_folder(out, said)
        if len(self.wrong) > before or not right:
            self.wrong.append(f"{strike} of {rank}: ended with {code}: {out} {said}")

    def judge_folder(self, out: str, said: str) -> None:
        """Note what is wrong with what a run that ended badly, and could clean up, has left."""
        kept, manifest = self.store.kept(), Manifest.read(self.partial)
        self.wrong += [f"left {path.name}" for path in self.temporary.iterdir()]
        places = {*self.disk.iterdir(), *self.out.glob(".cocodiff.*")}
        self.wrong += [f"left {path.name}" for path in places - {self.out, self.partial}]
        tells = "noticed and stopped, " in said or "interrupted; " in said
        told = f"{kept} are kept: go on with --resume" if kept is not None else ""
        if manifest is not None:  # some may have moved up already; the next start puts the others beside them
            told = f"the results are finished, in {self.out if manifest == Manifest.read(self.out) else self.partial}"
        elif kept is None and self.partial.exists():
            self.wrong.append("left a hidden folder, and nothing is kept there")
        elif kept is None and not self.out.exists() and tells:
            told = NOTHING_LEFT
        elif Manifest.read(self.out) is not None and "--overwrite" not in self.kind.words:
            # A signal may come when the last line of the output has told where they are.
            told = "" if f"report: {self.out}" in out else f"the results are finished, in {self.out}"
        if told not in said:
            self.wrong.append(f"did not say that {told}")
        if manifest is None and (self.out / "metrics.json").exists():
            self.compare()
        elif manifest is None and self.out.exists() and not {path.name for path in self.out.iterdir()} <= {PARTIAL}:
            self.wrong.append(f"half a result: {sorted(path.name for path in self.out.iterdir())}")

    def compare(self) -> None:
        """Note where the results are not those of a run that nothing happened to."""
        whole = self.whole()
        if results(self.out) != results(whole):
            self.wrong.append(f"other results than {whole}")
        files, expected = ({path.name for path in folder.glob("[!.]*")} for folder in (self.out, whole))
        if files != expected:
            self.wrong.append(f"files {files}, not {expected}")
