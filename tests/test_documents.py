"""The documents: how long their lines are, and whether the pages, sections and files that they name exist."""

from __future__ import annotations

import re
import runpy
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted(chain(ROOT.glob("*.md"), (ROOT / "docs").rglob("*.md"), (ROOT / "cocodiff").rglob("*.md")))
CODE = ("cocodiff", "eval", "sycl_kernels", "configs", "launch", "tests")
LONGEST = 120


@cache
def prose(path: Path) -> list[str]:
    """A document's lines; empty ones in place of fenced code."""
    lines, fenced = [], False
    for line in path.read_text().splitlines():
        fence = line.startswith("```")
        lines.append("" if fence or fenced else line)
        fenced ^= fence
    return lines


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them: without punctuation, words joined by hyphens."""
    headings = (line.lstrip("# ") for line in prose(path) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(path: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(path)))


def resolves(path: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = path.parent / name if name else path
    return target.exists() and (not anchor or (target.suffix == ".md" and anchor in anchors(target)))


def test_lines_end_at_120_characters():
    """Without the targets of links; tables may be wider."""
    lines = [(path.name, number, line) for path in DOCUMENTS for number, line in enumerate(prose(path), 1)]
    shown = [(name, number, re.sub(r"\]\([^)]*\)", "]", line)) for name, number, line in lines if line[:1] != "|"]
    assert [(name, number) for name, number, line in shown if len(line) > LONGEST] == []


def test_links_resolve():
    inner = [(path, link) for path in DOCUMENTS for link in links(path) if not re.match(r"\w+:", link)]
    assert [(path.name, link) for path, link in inner if not resolves(path, link)] == []


def test_files_that_documents_name_exist():
    pattern = re.compile(rf"`((?:{'|'.join(CODE)}|docs)/[\w./*+-]+)`")
    named = [(path.name, name) for path in DOCUMENTS for name in pattern.findall(path.read_text())]
    assert [(page, name) for page, name in named if not list(ROOT.glob(name))] == []


def test_documents_that_the_code_names_exist():
    kinds = {".py", ".yaml", ".sh", ".pbs", ".sbatch", ".cpp", ".hpp", ""}
    files = [path for top in CODE for path in (ROOT / top).rglob("*") if path.is_file() and path.suffix in kinds]
    named = {
        name for path in files for name in re.findall(r"docs/[\w/-]+\.(?:md|png)", path.read_text(errors="replace"))
    }
    assert {name for name in named if not (ROOT / name).exists()} == set()


def test_every_page_is_linked_from_another():
    linked = {(path.parent / link.partition("#")[0]).resolve() for path in DOCUMENTS for link in links(path)}
    named = "".join(path.read_text() for path in DOCUMENTS)
    assert [path for path in (ROOT / "docs").rglob("*.md") if path not in linked and path.name not in named] == []


def test_the_picture_of_the_axes_is_drawn_from_the_axes():
    script = runpy.run_path(str(ROOT / "docs" / "axes.py"))
    drawn = (ROOT / "docs" / "axes.svg").read_text()
    assert drawn == script["picture"]() + "\n", "python docs/axes.py > docs/axes.svg draws it again"
