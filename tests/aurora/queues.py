"""What Aurora's queues accept, and a qsub that accepts no more: it runs the first job of a script at once, on a node.

usage: queues.py [options of qsub, without -V, for which some jobs do not start] [SCRIPT]

The campaign's jobs are accepted, and not run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Queue(NamedTuple):
    """What a queue accepts."""

    least: int  # nodes of a job
    most: int
    hours: float
    queued: int | None = None  # jobs of a user; None: as the guide does not say


# ALCF user guides, "Running jobs on Aurora", August 2026.
QUEUES = {
    "debug": Queue(1, 2, 1),
    "debug-scaling": Queue(1, 31, 1),
    "capacity": Queue(1, 16, 168, 5),
    "prod": Queue(256, 10624, 24),
}


class Job(NamedTuple):
    """What is asked of a queue."""

    script: Path | None
    queue: str | None
    nodes: int
    hours: float
    names: list[str]  # of the variables that are handed to it


def job_of(words: Sequence[str]) -> Job:
    """Return the job that qsub's words ask for, and its script's lines with #PBS; what is asked last holds."""
    parser = argparse.ArgumentParser("qsub", allow_abbrev=False)
    for letter in "Aqvj":
        parser.add_argument(f"-{letter}")
    parser.add_argument("-I", action="store_true")
    parser.add_argument("-l", action="append", default=[])
    parser.add_argument("script", nargs="?", type=Path)
    script = parser.parse_args(words).script
    lines = re.findall(r"(?m)^#PBS (.*)", script.read_text()) if script else []
    asked = parser.parse_args([*" ".join(lines).split(), *words])
    if not asked.A:
        parser.error("no project: -A")
    resources = dict(one.partition("=")[::2] for one in asked.l)
    hours, minutes, seconds = map(int, resources["walltime"].split(":"))
    names = sorted(one.partition("=")[0] for one in (asked.v or "").split(","))
    return Job(
        script, asked.q, int(resources["select"].partition(":")[0]), hours + minutes / 60 + seconds / 3600, names
    )


def accepts(job: Job, jobs: int = 1) -> bool:
    """Return True if its queue accepts a job, as one of so many of a user."""
    limits = QUEUES[job.queue or ""]
    fits = limits.least <= job.nodes <= limits.most and job.hours <= limits.hours
    return fits and jobs <= (limits.queued or jobs)


def submit(words: Sequence[str]) -> int:
    job = job_of(words)
    if not accepts(job):
        print(f"qsub: {job.queue} does not accept {job.nodes} node(s) for {job.hours:g} h", file=sys.stderr)
        return 1
    if job.script is None or job.script.name == "campaign.pbs" or (said := Path(f"{job.script.name}.o1")).exists():
        return 0
    home, nodes = Path.home(), Path.home() / "nodes"
    shutil.copy(job.script, home / "1.SC")
    nodes.write_text("x1.host\n")
    own = {name: os.environ[name] for name in ("PATH", "HOME", "BASH_ENV")}
    own["COCODIFF_RANKS"] = "7"  # as something else may have left it
    own |= {"PBS_JOBID": "1.host", "PBS_NODEFILE": str(nodes), "PBS_O_WORKDIR": str(Path.cwd())}
    with said.open("w") as file:
        done = subprocess.run(["bash", home / "1.SC"], env=own, stdout=file, stderr=file, cwd=home, check=False)
    print(said.read_text())
    return done.returncode


if __name__ == "__main__":
    sys.exit(submit(sys.argv[1:]))
