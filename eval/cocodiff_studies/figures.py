"""`cocodiff papers`: figures of the papers that cocodiff follows, theirs and ours, made again by its own commands.

A file of configs/papers is one paper. It has `runs`, commands of cocodiff by name; `rows`, each a figure with the
paper's value and the place of ours in a run's results; `curves`; and `notes` on the meaning of the numbers. It contains
no number of ours. Runs whose results are in --out already are not made again, so a killed command continues. Rows of
runs `campaign NAME` are what launch/campaign.pbs has measured in a folder NAME, and appear with --measured.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import re
import shlex
import statistics
import subprocess
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import cocodiff
from cocodiff import __version__
from cocodiff.comm.launch import Launch
from cocodiff.config.config import find_shipped, read_yaml, shipped_names
from cocodiff.config.errors import UserError
from cocodiff.config.files import replace_text
from cocodiff.jobs.children import dependent_words
from cocodiff.jobs.folder import refusing, storage_faults
from cocodiff.jobs.options import LOG_LEVEL, Option, parse
from cocodiff.jobs.terminal import say

RESULTS = ("bench.json", "plan.json", "results.jsonl", "metrics.json")
HOME = Path(cocodiff.__file__).parents[1]
WRITTEN, LOG = "command.txt", "log.txt"
MADE = {"measured": "measured on this host", "emulated": "on emulated links", "planned": "by the plan"}
CAMPAIGN = "campaign"
UNITS = {  # by unit: the factor for a number, and its format
    "": (1.0, "{:.2f}"),
    "%": (100.0, "{:.0f} %"),
    "ms": (1e3, "{:.4g} ms"),
    "us": (1.0, "{:.0f} us"),
    "MB": (1e-6, "{:.3g} MB"),
    "GiB": (2.0**-30, "{:.1f} GiB"),
    "GB/s": (1.0, "{:.3g} GB/s"),
    "dB": (1.0, "{:.2f} dB"),
    "SSIM": (1.0, "{:.3f}"),
    "MSE": (1.0, "{:.5f}"),
}
LINE = 120
TITLE = "# How do the papers' figures compare with ours?"
ABOUT = """
**For** readers of the five papers. **Afterwards** you know which of their figures hold here, and can make each again.
`cocodiff papers` makes this page: it runs the commands below each table and reads what they write. Figures are
*measured* on one host, *emulated*: measured there on links with a machine's proportions, or *planned*: arithmetic
alone. A name beside a figure is that of its command, or a pattern of several, whose mean it is. "A over B" is how many
times as fast A is, "A / B" A's time over B's. Made by {version} on {day}, {cores} cores."""
HEAD = "| figure | what | paper | ours | why they differ |"
OPTIONS = (
    Option("paper", "papers to make; default: all", None, many=True, choices=tuple(sorted(shipped_names("papers")))),
    Option("runs", "of these, commands alone whose name begins so", None, many=True),
    Option("measured", "folder of launch/campaign.pbs, whose figures stand beside"),
    Option("out", "folder of papers.md, its pictures and what every command has written", "papers"),
    LOG_LEVEL,
)


@dataclass(frozen=True)
class Run:
    """A command of cocodiff whose results a paper's figures are compared with, or several that differ in some words."""

    made: str  # how its figures are made, a key of MADE
    command: str  # the command's words after `cocodiff`, with a {key} where commands differ
    # For each {key} in the name and the command: values for the name, each with the words for the command. There is one
    # command for every combination.
    each: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # by {key}, its values with the words for each

    def named(self, name: str) -> Iterator[tuple[str, list[str]]]:
        """Yield the name and the words of each command.

        Args:
            name: the name of all, in which each {key} is replaced by the values of one command.
        """
        for chosen in itertools.product(*(values.items() for values in self.each.values())):
            keys = dict(zip(self.each, (key for key, _ in chosen), strict=True))
            words = dict(zip(self.each, (words for _, words in chosen), strict=True))
            # Twice, as the words for one key may contain another key.
            yield name.format(**keys), shlex.split(self.command.format(**words).format(**words))


@dataclass(frozen=True)
class Paper:
    """A paper whose figures are made again: a file of configs/papers.

    A row of its table has in `paper` the paper's value. Rows that are repeated have it in `said`, by their `what`.
    """

    title: str  # the paper's title, the heading of its part of the page
    source: str  # where the paper was published
    setting: str  # the paper's machine and models, and what replaces them here
    runs: Mapping[str, Any]  # by name, the arguments of a `Run`
    rows: Sequence[Mapping[str, Any]]  # rows of the table: a figure, the paper's value, and the place of ours
    curves: Sequence[Mapping[str, Any]] = ()  # pictures: title, labels of axes, lines of points
    notes: str = ""  # text in Markdown that ends the paper's part of the page

    @classmethod
    def load(cls, name: str) -> Paper:
        """Return the paper that configs/papers has under a name."""
        return cls(**read_yaml(find_shipped("paper", "papers", name)))

    @property
    def commands(self) -> dict[str, Run]:
        """The paper's commands, by name. A {key} in a name stands for the values in the command's `each`."""
        return {name: Run(**run) for name, run in self.runs.items()}


def start(words: Sequence[str], launch: Launch) -> int:
    """Run `cocodiff papers`: run the papers' commands, and write the page that compares their results with the papers'.

    Return the exit code, 1 if a command failed.

    Args:
        words: the command line after `cocodiff papers`.
        launch: how this process was started. Only the first rank works.
    """
    values = parse("papers", "Makes the papers' figures again.", OPTIONS, words)
    if not launch.speaks:
        return 0
    folder, failed = Path(values["out"]).absolute(), list[str]()
    papers = {name: Paper.load(name) for name in values["paper"] or sorted(shipped_names("papers"))}
    commands = [
        Command(one, name, words, folder / name / one)
        for name, paper in papers.items()
        for template, run in paper.commands.items()
        for one, words in run.named(template)
    ]
    wanted = [one for one in commands if one.name.startswith(tuple(values["runs"] or [""]))]
    if not wanted:
        raise UserError(f"--runs {' '.join(values['runs'])}: no command's name begins so; see configs/papers")
    campaign = read_campaign(Path(values["measured"])) if values["measured"] else {}
    results: dict[str, dict[str, Any]] = {name: {**campaign} for name in papers}
    with refusing(values["out"]):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    for number, command in enumerate(wanted, 1):
        say(f"{number} of {len(wanted)}: {command.shown}")
        try:
            with storage_faults(f"{command.folder}"):
                command.make()
        except UserError as error:
            say(f"  {error}")
            failed.append(command.name)
    for command in commands:
        if command.is_made:
            results[command.paper][command.name] = read_result(command.folder / "out")
    about = ABOUT.format(version=f"cocodiff {__version__}", day=f"{date.today():%d %B %Y}", cores=os.cpu_count())
    if refused := sorted(path.parent.name for path in Path(values["measured"] or folder).glob("*/refused")):
        about += f" Did not fit into a tile's memory: {', '.join(refused)}."
    top = f"{TITLE}\n{textwrap.fill(about.strip(), LINE)}"
    asked = [command.name for command in wanted]
    page = "\n\n".join([top, *(section(paper, results[name], folder, name, asked) for name, paper in papers.items())])
    with storage_faults(f"{folder / 'papers.md'}"):
        replace_text(folder / "papers.md", page + "\n")
    say(f"{page}\n\nresults: {folder / 'papers.md'}")
    if failed:
        say(f"not made: {', '.join(failed)}")
    return int(bool(failed))


class Command(NamedTuple):
    """One command that `cocodiff papers` runs for a paper."""

    name: str  # name of the command, unique in the paper
    paper: str  # name of the paper
    words: Sequence[str]  # words after `cocodiff`
    folder: Path  # folder of its results and its log

    @property
    def shown(self) -> str:
        """The command as a user would type it."""
        return shlex.join(["cocodiff", *self.words])

    @property
    def is_made(self) -> bool:
        """True if the folder holds the results of this command, with the same words."""
        written = self.folder / WRITTEN
        return written.is_file() and written.read_text() == self.shown

    def make(self) -> None:
        """Run the command, unless `folder` holds its results. Raise UserError if it fails.

        It runs in the folder that has the package `cocodiff`, and writes its results and its log to `folder`.
        """
        if self.is_made:
            return
        started, folder = time.monotonic(), self.folder
        folder.mkdir(parents=True, exist_ok=True)
        words = [*dependent_words("main()"), *self.words, "--out", str(folder / "out"), "--overwrite"]
        with (folder / LOG).open("w") as log:
            code = subprocess.run(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=HOME).returncode
        if code:
            lines = (folder / LOG).read_text().strip().splitlines()
            last = next((line for line in reversed(lines) if line.startswith("cocodiff: ")), " ".join(lines[-1:]))
            raise UserError(f"exit code {code}: {last.removeprefix('cocodiff: ')} ({folder / LOG})")
        replace_text(folder / WRITTEN, self.shown)
        say(f"  {time.monotonic() - started:.0f} s")


def read_result(folder: Path) -> Any:
    """Return the document of results that a command has written. Lines of a sweep become its "rows".

    Raise UserError if there is none.

    Args:
        folder: the folder of its results.
    """
    path = next((folder / name for name in RESULTS if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} holds none of {', '.join(RESULTS)}: remove it and run that again")
    text, lines = path.read_text(), path.suffix == ".jsonl"
    try:
        return {"rows": [json.loads(one) for one in text.splitlines()]} if lines else json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is no result: remove its folder and run that again") from error


def read_campaign(folder: Path) -> dict[str, Any]:
    """Return the results of launch/campaign.pbs: the content of each bench.json, by "campaign" and its folder's name.

    Rows in configs/papers name results so. Raise UserError if there are none, or for a file that is no such result.

    Args:
        folder: has one folder for each measurement, with its bench.json.
    """
    found = {path: read_result(path.parent) for path in sorted(folder.glob("*/bench.json"))}
    if not found:
        raise UserError(f"--measured {folder} holds no */bench.json: run launch/campaign.pbs into it")
    for path, document in found.items():
        rows = at(document, "rows")
        if not rows or not all(at(row, name) is not None for row in rows for name in ("variant", "median_s", "nodes")):
            raise UserError(f"{path} is no bench.json of launch/campaign.pbs: remove its folder and run that again")
    return {f"{CAMPAIGN} {path.parent.name}": document for path, document in found.items()}


# Figures --------------------------------------------------------------------------------------------------------------


def numbers_of(results: Mapping[str, Any], of: Mapping[str, Any]) -> list[float]:
    """Return the numbers at a place in the results of commands.

    If the pattern of names has groups, only the least number of the runs that have the same text in them is taken.

    Args:
        results: documents by name of their command
        of: the place. `run`: a pattern of names; `rows`: values that select rows; `list`: the rows' name in the
            document (default "rows"); `take`: the number's dotted path in a row, or in the document if `rows` is absent
    """
    found, least = list[float](), dict[tuple[str, ...], float]()
    for name, document in results.items():
        match = re.fullmatch(of["run"], name)
        if not match:
            continue
        wanted: Mapping[str, Any] = of.get("rows", {})
        rows = (at(document, of.get("list", "rows")) or []) if wanted else [document]
        chosen = [row for row in rows if all(at(row, key) == value for key, value in wanted.items())]
        numbers = [value for row in chosen if isinstance(value := at(row, of["take"]), int | float)]
        if not match.groups():
            found += numbers
        elif numbers:
            least[match.groups()] = min([*numbers, least.get(match.groups(), math.inf)])
    return found or [*least.values()]


def at(document: Any, path: str) -> Any:
    """Return the value at a dotted path, such as "a.b", in nested mappings; None if it is absent."""
    if isinstance(document, dict) and path in document:
        return document[path]
    first, _, rest = path.partition(".")
    inner = document.get(first) if isinstance(document, dict) else None
    return at(inner, rest) if rest else inner


def repeated(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a paper's table that one entry stands for: one for every combination of values in its `each`.

    Each {key} is replaced by the value, and a text that is only {key} becomes the value itself. A value that is a
    mapping replaces each of its keys, and its `paper` replaces the row's.

    Args:
        row: the entry in the paper's file.
    """
    for values in itertools.product(*row.get("each", {}).values()):
        pairs = zip(row.get("each", {}), values, strict=True)
        keys = {a: b for key, value in pairs for a, b in (value if isinstance(value, dict) else {key: value}).items()}
        own = {"paper": keys["paper"]} if "paper" in keys else {}
        yield filled({key: value for key, value in row.items() if key != "each"}, keys) | own


def filled(part: Any, keys: Mapping[str, Any]) -> Any:
    """Return a part of a table's row with each {key} in its texts replaced.

    Args:
        part: a text, a mapping of such parts, or another value, which is returned as it is.
        keys: by key, what replaces it.
    """
    if isinstance(part, dict):
        return {filled(key, keys): filled(value, keys) for key, value in part.items()}
    if not isinstance(part, str):
        return part
    for key, value in keys.items():
        if part == f"{{{key}}}":
            return value
        part = part.replace(f"{{{key}}}", str(value))
    return part


def value_of(results: Mapping[str, Any], row: Mapping[str, Any]) -> float | None:
    """Return the number that cocodiff's results have for a row of the table; None if there are none.

    It is the mean of the numbers at the row's `of`. With `over` (or `minus`) it is the mean of their ratios to (or
    differences from) the numbers at that place, which has the missing keys from `of`.

    Args:
        results: documents by name of their command.
        row: the row.
    """
    numbers = numbers_of(results, row["of"])
    for name, operation in (("over", operator.truediv), ("minus", operator.sub)):
        if name in row:
            others = numbers_of(results, {**row["of"], **row[name]})
            numbers = [*map(operation, numbers, others)] if len(numbers) == len(others) else []
    return statistics.fmean(numbers) if numbers else None


def shown(value: float | None, unit: str) -> str:
    """Return a number as text with its unit; "-" for None.

    Args:
        value: the number in base units, such as seconds, bytes or a fraction of 1.
        unit: the unit to show it in, a key of UNITS.
    """
    factor, words = UNITS[unit]
    return "-" if value is None else words.format(value * factor)


# Page -----------------------------------------------------------------------------------------------------------------


def section(paper: Paper, results: Mapping[str, Any], folder: Path, name: str, asked: Sequence[str]) -> str:
    """Return a paper's part of the page, in Markdown: its table, the commands, its pictures and notes.

    Rows of runs that were neither requested nor made are left out.

    Args:
        paper: the paper.
        results: documents by name of their command.
        folder: where pictures are written.
        name: the paper's name, with which the pictures' names begin.
        asked: names of the requested runs.
    """
    rows = [(row, value_of(results, row)) for several in paper.rows for row in repeated(several)]
    wanted = [
        (row, value)
        for row, value in rows
        if value is not None or any(re.fullmatch(row["of"]["run"], one) for one in asked)
    ]
    about, usual = f"{paper.source}. {paper.setting}", usual_command([row for row, _ in wanted])
    if usual:
        made = next(run.made for key, run in paper.commands.items() for one, _ in run.named(key) if one == usual)
        about += f" Figures without a name: {made}, `{usual}`."
    lines = [f"## {paper.title}", textwrap.fill(about, LINE), "", HEAD, "| --- " * 5 + "|"]
    told = ""
    for row, value in wanted:
        name_of = row["of"]["run"]
        why = "" if row.get("why") == told else row.get("why", "")  # only once for consecutive rows
        told = row.get("why", "")
        said = row.get("said", {}).get(row["what"], row.get("paper", ""))
        ours = shown(value, row.get("unit", "")) + ("" if name_of == usual else f", `{name_of}`")
        cells = [row["figure"], row["what"], said, ours, why]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "```sh", *command_lines(paper), "```"]
    for number, curve in enumerate(paper.curves, 1):
        picture = f"{name}-{number}.png"
        if draw(folder / picture, curve, results):
            lines += ["", f"![{curve['title']}]({picture})"]
    return "\n".join([*lines, "", paper.notes]).strip()


def usual_command(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the name of the command that most rows have their figures of; "" if it has no more than half of them.

    Args:
        rows: the table's rows, of which those of a campaign do not count.
    """
    found = Counter(row["of"]["run"] for row in rows if not row["of"]["run"].startswith(CAMPAIGN))
    return next((name for name, number in found.items() if number > found.total() / 2), "")


def command_lines(paper: Paper) -> list[str]:
    """Return the lines that list a paper's commands. What a command has in common with the one before is left out.

    Args:
        paper: the paper.
    """
    lines, before = list[str](), dict[str, str]()
    for name, run in paper.commands.items():
        lines.append(f"# {name}: {MADE[run.made]}")
        own = {"": f"cocodiff {run.command}"}
        for key, words in run.each.items():
            values = [one if one == of else f"{one}: {of}" for one, of in words.items()]
            own[key] = f"#   {key}: {'; '.join(values)}"
        lines += [line for key, line in own.items() if before.get(key) != line]
        before |= own
    return lines


def draw(path: Path, curve: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """Draw lines of points into a PNG file. Return False, without a file, if there are no points.

    Args:
        path: the file.
        curve: the title, labels of axes, and lines by label, from the paper's file. A point has the places of its x and
            y.
        results: documents by name of their command.
    """
    from matplotlib.figure import Figure

    lines = dict[str, list[tuple[float, float]]]()
    for label, line in curve["lines"].items():
        pairs = [(value_of(results, point["x"]), value_of(results, point["y"])) for point in repeated(line)]
        lines[label] = [(x, y) for x, y in pairs if x is not None and y is not None]
    if not any(lines.values()):
        return False
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for label, points in lines.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set(title=curve["title"], xlabel=curve["x_label"], ylabel=curve["y_label"])
    if curve.get("log"):
        axes.set(xscale="log", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return True
