"""Whole jobs that are struck at some moment (`struck_process.py`) and go on to the end: what they leave, say and
make."""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any, NamedTuple

import numpy as np
import tifffile
from campaign.strikes import (
    ABORTS,
    LIMITS,
    MESSAGES,
    OF_DISKS,
    PATIENT,
    SIGNALS,
    Strike,
    judge_line,
    processes_of_session,
)
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
# A signal goes to one rank, to the process that forked them, or to all.
OF_SIGNALS = ("KILL", "KILL job", "KILL all", "STOP", "TERM", "TERM job", "HUP", "HUP all", "INT all", "QUIT all")
OF_ONE = ("KILL", "TERM", "HUP", "INT", *OF_DISKS, "exception", "vanished")  # rank alone
FAULTS = (*OF_SIGNALS, *OF_DISKS, *MESSAGES, "pause", "exception", "exit", "slow", "hang", "vanished")


class Kind(NamedTuple):
    """A command with its options. ranks: of a replica; replicas: of the struck run, while others may have one; input:
    among those of `Jobs`."""

    words: tuple[str, ...]
    ranks: int = 2
    replicas: int = 1
    input: str = "scan.tif"


INPAINT = ("inpaint", "--batch", "1", "--exact_slices", "1")
GENERATE = ("generate", "--height", "32", "--width", "32", "--prompt", "a", "b", "c")
VOLUME = ("inpaint", "--samples", "2", "--mask", "holes.tif", "--truth", "volume.tif", "--hidden_test")
VOLUME += ("--axes", "z", "y")
COMMANDS = {
    "inpaint": Kind(INPAINT, 4),
    "inpaint, one rank": Kind(INPAINT, 1),
    "inpaint, replicas": Kind(INPAINT, 2, 2),
    "inpaint, samples": Kind((*INPAINT, "--samples", "3"), 1, 2),
    "inpaint, quality": Kind((*INPAINT, "--quality", "30dB", "--quality_slices", "1")),
    "inpaint, displaced": Kind((*INPAINT, "--preset", "coded", "--arrival", "displaced", "--fine_steps", "0")),
    "inpaint, overwrite": Kind((*INPAINT, "--preset", "flat", "cocodiff", "--overwrite")),
    "generate": Kind(GENERATE, 4, input="model"),
    "generate, replicas": Kind(GENERATE, 1, 2, "model"),
    "generate, quality": Kind((*GENERATE, "--quality", "30dB", "--guidance", "1"), input="model"),
    "sweep": Kind(("sweep", "--config", "sweep.yaml")),
    "sweep, replicas": Kind(("sweep", "--config", "sweep.yaml"), 2, 2),
}
# On one rank each, which starts quickly.
ALONE = {
    "inpaint, one rank": COMMANDS["inpaint, one rank"],
    "samples": Kind((*INPAINT, "--samples", "3", "--slices", "0:2"), 1),
    "overwrite": Kind((*INPAINT, "--overwrite"), 1),
    "volume": Kind(VOLUME, 1, input="volume.tif"),
    "generate, one rank": Kind(GENERATE, 1, input="model"),
    "sweep, one rank": Kind(("sweep", "--config", "alone.yaml"), 1),
}
FORMATS = ("tiff", "sequence", "zarr", "h5", "npy")
# By a command's name, further options of which one is drawn: ways to part attention, and formats.
PRESETS = ("flat", "tapa --chunks 2", "tapa --ring 2", "v_first", "cocodiff+", "ahead --tau 10", "split --chunks 2")
PARTED = tuple(("--preset", *one.split()) for one in (*PRESETS, "split --ring 2 --chunks 2"))
OF_FORMATS = tuple(("--format", word) for word in FORMATS)
OPTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "inpaint": (*PARTED, *OF_FORMATS),
    "generate": ((), *(("--preset", preset, "--guidance_parallel", "2") for preset in ("split", "cocodiff"))),
    **dict.fromkeys(("samples", "overwrite", *(name for name in COMMANDS if name.startswith("inpaint, "))), OF_FORMATS),
}


def fits(command: str, fault: str, moment: str) -> bool:
    kind = {**COMMANDS, **ALONE}[command]
    alone = kind.ranks * kind.replicas == 1
    if alone and (fault in ("STOP", "hang", "exit", *MESSAGES) or " " in fault):
        return False
    if moment == "put together" and command.split(", ")[-1] not in ("samples", "quality"):
        return False
    if fault in MESSAGES:
        return moment in ("attend", RESUME)
    return fault not in OF_DISKS or moment in (*FILES, RESUME)


def choose_all(commands: dict[str, Kind], faults: tuple[str, ...] = FAULTS) -> list[Any]:
    """Each two of a command, a fault and a moment that make sense, in any order, which is always the same."""
    chosen = covering_set([*commands], faults, (*STAGES, RESUME), fits=fits)
    return random.Random(0).sample(chosen, len(chosen))


class Jobs:
    """Jobs in a folder, with their inputs; runs that nothing happens to are made once for each choice of options."""

    def __init__(self, folder: Path) -> None:
        from tiny_pipelines import clip_text, sd3_pipeline

        self.folder, self.inputs, made = folder, folder / "inputs", folder / f"inputs.{os.getpid()}"
        if self.inputs.exists():
            return
        made.mkdir()
        chance = np.random.default_rng(0)
        holes = np.zeros((20, 32, 32), np.uint8)
        holes[4:9, 5:13, 6:15] = 255
        for name, voxels in {
            "scan": chance.integers(0, 60000, (4, 64, 80), dtype=np.uint16),
            "volume": chance.integers(20000, 40000, holes.shape, dtype=np.uint16),
            "holes": holes,
        }.items():
            tifffile.imwrite(made / f"{name}.tif", voxels, photometric="minisblack")
        sd3_pipeline(**clip_text()).save_pretrained(made / "model")
        (made / "sweep.yaml").write_text("points: [{preset: flat}, {name: coded, preset: coded}]\n")
        (made / "alone.yaml").write_text("points: [{preset: flat}, {name: other, preset: tapa}]\n")
        moved(made, self.inputs)

    def job(self, name: object, command: str, *options: str) -> Job:
        return Job(self, name, command, options)

    def drawn(self, name: object, command: str, chance: random.Random) -> Job:
        job = self.job(name, command, *chance.choice(OPTIONS.get(command, ((),))))
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
        self.jobs, self.name, self.command, self.kind = jobs, name, command, {**COMMANDS, **ALONE}[command]
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
        kept = self.jobs.folder / name
        if not kept.exists():
            job = Job(self.jobs, f"{name} {os.getpid()}", self.command, self.options)
            done = job.run()
            assert done.code == 0, done.said
            assert not job.wrong and job.noted(), job.wrong
            moved(job.folder, kept)
        return kept / "disk" / "out"

    def noted(self) -> list[int]:
        """The batches that were saved, in all starts; one whose file was not on the disk by then is wrong."""
        notes = [json.loads(line) for line in self.notes.read_text().splitlines()] if self.notes.exists() else []
        self.wrong += [f"not on the disk when its batch was noted: {names}" for _, names in notes if names]
        return [number for number, _ in notes]

    def strike(self, fault: str, moment: str, chance: random.Random) -> dict[str, Any]:
        """Choose what a run is to do. Early operations are struck more often than late ones, which may not come."""
        name, _, who = fault.partition(" ") if fault.split()[0] in SIGNALS else (fault, "", "")
        most = {"start": 1, "load": 2, "attend": 60, "create": 12, "write": 30, "publish": 12}.get(moment, 30)
        short = fault == "short write"
        strike = Strike(
            name,
            who or "one",
            str(self.mark),
            delay_ms=chance.choice((0, 0, 1, 3, 10)),
            amount=chance.choice((4096, 9000, 30000)) if short else chance.randint(1, 60),
            inputs=str(self.input),
        )
        victim = chance.randrange(self.kind.ranks * self.kind.replicas)
        return {"stage": moment, "number": int(most * chance.random() ** 2), "victim": victim, "strike": asdict(strike)}

    def kill_when_noted(self, count: int) -> None:
        """Have a run killed as soon as so many batches are finished."""
        strike = Strike("KILL", "all", str(self.mark))
        self.run(given={"stage": NOTED, "number": 2 * count - 1, "strike": asdict(strike)})
        assert len(self.store.finished()) == count

    def run(
        self,
        *more: object,
        given: dict[str, Any] | None = None,
        replicas: int = 1,
        fault: str = "",
        ignored: tuple[int, ...] = (),
    ) -> Done:
        """Run the command to its end. more: options, each in the place of the one of its name if there is one; given:
        what is done to it, and fault, whose limits it has; ignored: signals."""
        first, *fixed = self.kind.words
        words = [first, *(str(self.jobs.inputs / word) if "." in word else word for word in fixed), *self.options]
        words += ["--model" if self.kind.input == "model" else "--input", str(self.input), "--quiet"]
        words += ["--steps", "3" if first == "sweep" else "2", "--out", str(self.out)]
        words += ["--replicas", str(replicas), "--ranks", str(self.kind.ranks * replicas)]
        for name, value in (PATIENT | LIMITS.get(fault, {})).items():
            words += [f"--{name}", str(value)]
        words += ["--check_messages"] if fault in MESSAGES else []
        if "--resume" in more:
            words = [word for word in words if word != "--overwrite"]
        words = with_options(words, *map(str, more))
        given = {"temporary": str(self.temporary), "notes": str(self.notes), **(given or {})}
        given |= {"replicas": replicas, "ignored": bool(ignored)}
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
        elif fault == "lost" and ABORTS.search(said):
            right = code in (1, -6)
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


def moved(made: Path, place: Path) -> None:
    """Put a folder in its place, unless another process was quicker."""
    try:
        made.rename(place)
    except OSError:
        shutil.rmtree(made)
