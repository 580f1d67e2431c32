"""Every command of the pages is one that cocodiff takes, and those that can run here in a moment do what a reader would
have them do, from a folder with the files that they name."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from cocodiff_studies.figures import Paper
from launching import assert_succeeded
from PIL import Image
from scipy import ndimage
from warm_ranks import warm_mpiexec

from cocodiff.cli import main as cli
from cocodiff.config.config import shipped_names
from cocodiff.jobs import options

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# What a page leaves open, by the option before it: `--nodes N`.
OPEN = {"nodes": "2", "threads": "1", "repeats": "3", "link_efficiency": "0.143", "guidance_parallel": "2"}
NAMED = {"machine": "aurora", "model": "flux"}
AXES = [{"name": name, "type": "space"} for name in "zyx"]


def commands(page: Path) -> Iterator[list[str]]:
    """The words behind `cocodiff` of each command in a page's blocks."""
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.sub(r"\\\n", " ", block).splitlines() if not kind else ():
            with contextlib.suppress(ValueError):  # no command
                yield from parts(shlex.split(line, comments=True))


def settled(words: list[str]) -> list[str]:
    """With a value for each that a page leaves open."""
    before = [word.removeprefix("--") for word in ["", *words]]
    return [
        (OPEN | NAMED).get(option, word) if len(word) == 1 and word.isupper() else word
        for option, word in zip(before, words, strict=False)
    ]


def parts(words: list[str]) -> Iterator[list[str]]:
    """An emulation's own words, and those of the command that it runs."""
    while words:
        word, *words = words
        if Path(word).name == "cocodiff" and words and words[0] in cli.COMMANDS:
            end = words.index("--") if "--" in words else len(words)
            yield settled(words[:end])
            words = words[end:]


COMMANDS = [(page.name, words) for page in PAGES for words in commands(page)]
OF_PAPERS = [
    (f"{name}: {one}", part)
    for name in sorted(shipped_names("papers"))
    for template, run in Paper.load(name).commands.items()
    for one, words in run.named(template)
    for part in parts(["cocodiff", *words])
]


class Taken(Exception):
    """A command's options were all that it takes."""


def test_every_command_of_the_pages_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) > 40 < len(OF_PAPERS)
    parse = options.parse

    def parse_alone(*given: Any, **more: Any) -> Any:
        parse(*given, **more)
        raise Taken

    names = [cli.MODULES.get(name, f"cocodiff.cli.{name}") for name in cli.COMMANDS]
    for module in map(import_module, [*names, "cocodiff_bench.command"]):
        if getattr(module, "parse", None) is parse:
            monkeypatch.setattr(module, "parse", parse_alone)
    monkeypatch.chdir(ROOT)
    for page, words in COMMANDS + OF_PAPERS:
        with pytest.raises(Taken):
            pytest.fail(f"{page}: cocodiff {shlex.join(words)} ended with {cli.run_command(words)}")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands name: a volume in each format, masks, a machine file."""
    folder, random = tmp_path_factory.mktemp("pages"), np.random.default_rng(0)
    volume, holes = random.random((20, 64, 64), np.float32), np.zeros((20, 64, 64), np.uint8)
    holes[4, 10:20, 10:20] = 1
    for name in ("scan.tif", "organ20.tif"):
        tifffile.imwrite(folder / name, volume, photometric="minisblack")
    tifffile.imwrite(folder / "slice.tif", volume[0])
    tifffile.imwrite(folder / "holes.tif", holes, photometric="minisblack")
    Image.fromarray(holes[4]).save(folder / "holes.png")
    for name in ("volume.h5", "scan.h5"):
        with h5py.File(folder / name, "w") as file:
            file["exchange/data"] = volume
    for name, array in (("", volume), ("labels/holes", holes)):
        group = zarr.open_group(folder / "scan.zarr", path=name, mode="a", zarr_format=2)
        group.create_array("0", data=array)
        group.attrs["multiscales"] = [{"version": "0.4", "axes": AXES, "datasets": [{"path": "0"}]}]
    zarr.open_group(folder / "scan.zarr", path="labels", mode="a", zarr_format=2).attrs["labels"] = ["holes"]
    (folder / "doctor").mkdir()
    shutil.copy(ROOT / "configs/machines/aurora.yaml", folder / "doctor/machine.yaml")
    return folder


def runs(words: Sequence[str]) -> bool:
    """Whether it can run here in a moment: what plans, and what restores with the embedded model, as a dry run."""
    # Models' weights, a GPU, what an earlier run has left.
    elsewhere = {"inpaint": {"--model", "xpu"}, "plan": set()}
    return words[0] in elsewhere and elsewhere[words[0]].isdisjoint(words)


@pytest.mark.full
@pytest.mark.parametrize("words", [words for _, words in COMMANDS if runs(words)], ids=shlex.join)
def test_it_runs(files: Path, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    dry = ["--dry_run"] if words[0] == "inpaint" else []
    assert cli.run_command([*words, *dry]) == 0, capsys.readouterr().err
    assert sorted(files.rglob("*")) == before  # no plan writes without --out


@pytest.mark.full
def test_the_first_pipeline_sends_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its image is one process's up to rounding."""
    page = (ROOT / "docs" / "first-pipeline.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "parallel.py").write_text(script)
    shutil.copy(ROOT / "cocodiff/demo_model/samples/tooth.tif", tmp_path / "slice.tif")
    monkeypatch.chdir(tmp_path)
    done = warm_mpiexec(2, tmp_path / "parallel.py")
    assert_succeeded(done)
    ((difference, sent),) = re.findall(r"one process: (\S+); (bytes sent: .*)", done.stdout)
    assert float(difference) < 1e-5 and sent in page


def spoilt_scan() -> dict[str, np.ndarray]:
    """Make masks of what spoils a scan, by the names of the recipes' headings."""
    random, shape = np.random.default_rng(0), (24, 80, 80)
    z, y, x = np.indices(shape)
    radius = np.hypot(y - 39.5, x - 39.5).astype(int)
    ball = (z - 12) ** 2 + (y - 30) ** 2 + (x - 44) ** 2 < 25
    zingers = (random.random(shape) < 2e-4) & ~ball
    return {
        "Metal": ball,
        "Zingers": zingers,
        "Rings": np.isin(radius, (14, 15, 27)),
        "Lost slices": np.isin(z, (9, 10)),
        "Gaps": np.isin(x, (33, 34, 35)),
        "Dust": np.hypot(y - 20, x - 55) < 3,
    }


@pytest.mark.parametrize("heading", [*spoilt_scan(), "By hand"])
def test_recipes_mask_what_they_are_for(heading: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each marks all of it, and of the rest no more than a rim."""
    monkeypatch.chdir(tmp_path)
    random, wrong = np.random.default_rng(1), spoilt_scan().get(heading, spoilt_scan()["Metal"])
    scan = 20000 + 1000 * ndimage.gaussian_filter(random.normal(size=wrong.shape), 2) / 0.05
    scan += random.normal(scale=300, size=wrong.shape)
    scan[wrong] = {"Metal": 65000, "Lost slices": 0, "Gaps": 0, "Dust": 2000}.get(heading, 60000)
    tifffile.imwrite("scan.tif", scan.clip(0, 65535).astype(np.uint16), photometric="minisblack")
    beginning, *sections = (ROOT / "docs" / "masks.md").read_text().split("\n## ")
    (section,) = [one for one in sections if one.splitlines()[0] == heading]
    layers = {"Labels": SimpleNamespace(data=wrong.astype(int))}
    known: dict[str, Any] = {"viewer": SimpleNamespace(layers=layers)}
    for block in re.findall(r"^```python\n(.*?)^```", beginning + section, re.DOTALL | re.MULTILINE):
        exec(block, known)
    found = np.broadcast_to(tifffile.imread("holes.tif"), wrong.shape)
    assert {*np.unique(found).tolist()} == {0, 255} and found[wrong].all()
    away = ndimage.distance_transform_edt(~wrong) > 4
    assert np.mean(found[away] > 0) < 0.002


@pytest.mark.full
def test_the_attention_call_runs_the_functions_that_the_page_shows() -> None:
    shown = (ROOT / "docs" / "design.md").read_text()
    done = warm_mpiexec(4, ROOT / "docs" / "attention_call.py")
    assert_succeeded(done)
    assert done.stdout.startswith("MainThread\n") and f"```text\n{done.stdout}```\n" in shown
