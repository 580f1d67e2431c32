"""`cocodiff papers`: figures of the papers that cocodiff follows, theirs and ours, made again by its own commands.

A file of configs/papers is one paper: `runs`, commands of cocodiff by name; `rows`, each a figure, what the paper says
of it, and where ours is in what a run has written; `curves`; and `notes` on what the numbers mean. No number of ours
stands in a file. Runs that --out holds already are not made again, so a killed command goes on where it was. Rows of
runs `campaign NAME` are of what launch/campaign.pbs has measured in a folder NAME, and stand in a page with --measured.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
import shlex
import statistics
import subprocess
import textwrap
import time
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
from cocodiff.jobs.folder import storage_faults
from cocodiff.jobs.options import LOG_LEVEL, Option, parse
from cocodiff.jobs.terminal import say

RESULTS = ("bench.json", "plan.json", "results.jsonl", "metrics.json")
HOME = Path(cocodiff.__file__).parents[1]
WRITTEN, LOG = "command.txt", "log.txt"
MADE = {"measured": "measured on this host", "emulated": "on emulated links", "planned": "by the plan"}
CAMPAIGN = "campaign"
UNITS = {  # by which a number is multiplied, and how it is shown
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
`cocodiff papers` makes this page: it runs the commands below each table and reads what they write. Figures are
*measured* on one host, *emulated*: measured there on links with a machine's proportions, or *planned*: arithmetic
alone. A row names the command that made it, or several, whose mean it is. Made by {version} on {day}, {cores} cores."""
HEAD = "| figure | what | paper | ours | made by | why they differ |"
OPTIONS = (
    Option("paper", "papers to make; default: all", None, many=True, choices=tuple(sorted(shipped_names("papers")))),
    Option("runs", "of these, commands alone whose name begins so", None, many=True),
    Option("measured", "folder of launch/campaign.pbs, whose figures stand beside"),
    Option("out", "folder of papers.md, its pictures and what every command has written", "papers"),
    LOG_LEVEL,
)


@dataclass(frozen=True)
class Run:
    """A command of cocodiff. made: how it makes figures, a key of MADE. each: what its name and its words are repeated
    for: a key of both, and for each of its values what the words have in its place."""

    made: str
    command: str
    each: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def named(self, name: str) -> Iterator[tuple[str, list[str]]]:
        """Names and words of its commands."""
        for chosen in itertools.product(*(values.items() for values in self.each.values())):
            keys = dict(zip(self.each, (key for key, _ in chosen), strict=True))
            words = dict(zip(self.each, (words for _, words in chosen), strict=True))
            # twice, as what stands for one key may name another
            yield name.format(**keys), shlex.split(self.command.format(**words).format(**words))


@dataclass(frozen=True)
class Paper:
    """A file of configs/papers. setting: theirs, and what stands in its place here; notes: Markdown. A row's `paper` is
    what the paper says; `said`, of rows that are repeated, by their `what`."""

    title: str
    source: str
    setting: str
    runs: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]
    curves: Sequence[Mapping[str, Any]] = ()
    notes: str = ""

    @classmethod
    def load(cls, name: str) -> Paper:
        return cls(**read_yaml(find_shipped("paper", "papers", name)))

    @property
    def commands(self) -> dict[str, Run]:
        return {name: Run(**run) for name, run in self.runs.items()}


def start(words: Sequence[str], launch: Launch) -> int:
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
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {values['out']}: {error.strerror}: choose another folder") from error
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
    """One command of a paper's. folder: of what it writes."""

    name: str
    paper: str
    words: Sequence[str]
    folder: Path

    @property
    def shown(self) -> str:
        return shlex.join(["cocodiff", *self.words])

    @property
    def is_made(self) -> bool:
        written = self.folder / WRITTEN
        return written.is_file() and written.read_text() == self.shown

    def make(self) -> None:
        """Runs it, in the folder that its files' names are of, unless it has been. Raises UserError where it fails."""
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
    """The document that a command of ours leaves; lines of a sweep as its rows."""
    path = next((folder / name for name in RESULTS if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"{folder} holds none of {', '.join(RESULTS)}: remove it and run that again")
    text, lines = path.read_text(), path.suffix == ".jsonl"
    try:
        return {"rows": [json.loads(one) for one in text.splitlines()]} if lines else json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is no result: remove its folder and run that again") from error


def read_campaign(folder: Path) -> dict[str, Any]:
    """What launch/campaign.pbs has measured, by the names that rows have for it."""
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
    """The numbers at a place: `run`, a pattern of commands' names; `rows`, what the rows have that are meant, of the
    document's `list` ("rows"); `take`, a number there, dotted. Without `rows` the number is the document's."""
    found = []
    for name, document in results.items():
        if not re.fullmatch(of["run"], name):
            continue
        wanted: Mapping[str, Any] = of.get("rows", {})
        rows = (at(document, of.get("list", "rows")) or []) if wanted else [document]
        chosen = [row for row in rows if all(at(row, key) == value for key, value in wanted.items())]
        found += [value for row in chosen if isinstance(value := at(row, of["take"]), int | float)]
    return found


def at(document: Any, path: str) -> Any:
    """What a document has at a dotted path; None where it has nothing."""
    if isinstance(document, dict) and path in document:
        return document[path]
    first, _, rest = path.partition(".")
    inner = document.get(first) if isinstance(document, dict) else None
    return at(inner, rest) if rest else inner


def repeated(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for every value of its `each`, {key} standing for it; one that is nothing but {key} is the value itself. A
    value with keys of its own stands for these, and for what the row says of `paper`."""
    for values in itertools.product(*row.get("each", {}).values()):
        pairs = zip(row.get("each", {}), values, strict=True)
        keys = {a: b for key, value in pairs for a, b in (value if isinstance(value, dict) else {key: value}).items()}
        own = {"paper": keys["paper"]} if "paper" in keys else {}
        yield filled({key: value for key, value in row.items() if key != "each"}, keys) | own


def filled(part: Any, keys: Mapping[str, Any]) -> Any:
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
    """The mean of what `of` means, or of its ratios to what `over` means (or differences: `minus`), which has what it
    lacks of `of`."""
    numbers = numbers_of(results, row["of"])
    for name, operation in (("over", operator.truediv), ("minus", operator.sub)):
        if name in row:
            others = numbers_of(results, {**row["of"], **row[name]})
            numbers = [*map(operation, numbers, others)] if len(numbers) == len(others) else []
    return statistics.fmean(numbers) if numbers else None


def shown(value: float | None, unit: str) -> str:
    factor, words = UNITS[unit]
    return "-" if value is None else words.format(value * factor)


# Page -----------------------------------------------------------------------------------------------------------------


def section(paper: Paper, results: Mapping[str, Any], folder: Path, name: str, asked: Sequence[str]) -> str:
    """A paper's part of the page. asked: runs that were to be made; what was neither asked for nor made is left out."""
    lines = [f"## {paper.title}", textwrap.fill(f"{paper.source}. {paper.setting}", LINE), ""]
    every = {one: run.made for name_of, run in paper.commands.items() for one, _ in run.named(name_of)}
    every |= {one: "measured" for one in results if one.startswith(CAMPAIGN)}
    lines += [HEAD, "| --- " * 6 + "|"]
    told = ""
    for row in (one for several in paper.rows for one in repeated(several)):
        value, name_of = value_of(results, row), row["of"]["run"]
        if value is None and not any(re.fullmatch(name_of, one) for one in asked):
            continue
        why = "" if row.get("why") == told else row.get("why", "")  # once for rows that follow one another
        told = row.get("why", "")
        how = next(made for one, made in every.items() if re.fullmatch(name_of, one))
        said = row.get("said", {}).get(row["what"], row.get("paper", ""))
        cells = [row["figure"], row["what"], said, shown(value, row.get("unit", "")), f"{how}, `{name_of}`", why]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "```sh"]
    for one, run in paper.commands.items():
        lines += [f"# {one}: {MADE[run.made]}", f"cocodiff {run.command}"]
        for key, words in run.each.items():
            told_words = [name if name == of else f"{name}: {of}" for name, of in words.items()]
            lines.append(f"#   {key}: {'; '.join(told_words)}")
    lines.append("```")
    for number, curve in enumerate(paper.curves, 1):
        picture = f"{name}-{number}.png"
        if draw(folder / picture, curve, results):
            lines += ["", f"![{curve['title']}]({picture})"]
    return "\n".join([*lines, "", paper.notes]).strip()


def draw(path: Path, curve: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """A picture of lines of points, of which each coordinate is a value as rows have it; False where there is none."""
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
