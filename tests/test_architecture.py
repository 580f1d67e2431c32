"""The house rules: who imports whom, how long files and functions are, and what no file of ours may name."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import assert_succeeded
from tiny_models import sd3_inputs, sd3_transformer
from warm import forked

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "design.md").read_text()
OF_ENGINE = re.findall(r"(?m)^\| `(\w+)/` \|", PAGE)
OF_HARNESS = re.findall(r"`(\w+)/`", PAGE.partition("`eval/cocodiff_eval/` is")[2].partition("`eval/")[0])
# Packages, in the order of that page: each may import those before it and itself. A name covers what is below it.
PACKAGES = [
    *("cocodiff_sycl", *(f"cocodiff.{package}" for package in OF_ENGINE[:-1])),
    *("cocodiff.__init__", f"cocodiff.{OF_ENGINE[-1]}", "cocodiff.__main__"),
    *(*(f"cocodiff_eval.{package}" for package in OF_HARNESS), "cocodiff_eval.__init__"),
    *("cocodiff_bench", "cocodiff_studies"),
]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TOPS = {
    "cocodiff": ROOT,
    "cocodiff_bench": ROOT / "eval",
    "cocodiff_studies": ROOT / "eval",
    "cocodiff_eval": ROOT / "eval",
    "cocodiff_sycl": ROOT / "sycl_kernels",
}
SOURCES = sorted(path for name, top in TOPS.items() for path in (top / name).rglob("*.py"))


def top_of(path: Path) -> Path:
    """The folder that a file's package lies in."""
    return next((top for top in TOPS.values() if top != ROOT and path.is_relative_to(top)), ROOT)


def module_name(path: Path) -> str:
    parts = path.relative_to(top_of(path)).with_suffix("").parts
    return ".".join(parts) if len(parts) == 2 else ".".join(parts).removesuffix(".__init__")


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of_ours(path: Path) -> set[str]:
    """The modules of ours that a file imports, anywhere in it; of a package the names that are modules of it."""
    found: set[str] = set()
    for node in ast.walk(syntax(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package(path, node.level), *filter(None, [node.module])])
            below = {f"{base}.{alias.name}" for alias in node.names}
            inner = {name for name in below if is_module(name)}
            found |= inner if len(inner) == len(below) else inner | {base}
    ours = {name for name in found if name.split(".")[0] in TOPS}
    return {"cocodiff.__init__" if name == "cocodiff" else name for name in ours}


def package(path: Path, level: int) -> list[str]:
    """What a relative import of this file starts from; nothing for an absolute one."""
    return list(path.relative_to(top_of(path)).parts[:-level]) if level else []


def is_module(name: str) -> bool:
    path = TOPS.get(name.split(".")[0], ROOT).joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def covers(rule: str, name: str) -> bool:
    return name == rule or name.startswith(rule + ".")


def package_of(module: str) -> int:
    """The number of a module's package."""
    return next((number for number, package in enumerate(PACKAGES) if covers(package, module)), -1)


def test_packages_import_what_stands_above_them():
    unfit = {}
    for path in SOURCES:
        name = module_name(path)
        unfit[name] = {one for one in imports_of_ours(path) if not 0 <= package_of(one) <= package_of(name)}
    assert {module: names for module, names in unfit.items() if names} == {}


@pytest.mark.parametrize(
    ("inner", "users"),
    [
        ("cocodiff.cli", ("cocodiff.cli", "cocodiff.__main__", "cocodiff_studies.emulate")),
        ("cocodiff_eval", ("cocodiff_eval", "cocodiff_bench", "cocodiff_studies.emulate")),
        ("cocodiff_bench", ("cocodiff_bench",)),
        ("cocodiff_studies", ("cocodiff_studies",)),
    ],
)
def test_outer_packages_are_used_by_few(inner, users):
    """The command line finds the harness, benchmarks and studies by name."""
    importers = {module_name(path) for path in SOURCES if any(covers(inner, name) for name in imports_of_ours(path))}
    assert {name for name in importers if not any(covers(user, name) for user in users)} == set()


def test_packages_are_few_and_every_file_is_in_one_that_the_design_names():
    """Whoever reads the list of folders has read the architecture."""
    assert len(OF_ENGINE) <= 12 and len(OF_HARNESS) <= 6 and OF_ENGINE[-1] == "cli"
    assert [str(path) for path in SOURCES if package_of(module_name(path)) < 0] == []
    assert len(SOURCES) <= 220


def test_imports_have_no_circles():
    """Imports for annotations alone count as well."""
    files = {module_name(path): path for path in SOURCES}
    left = {name: imports_of_ours(path) & files.keys() - {name} for name, path in files.items()}
    while leaves := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in leaves:
            del left[name]
    assert sorted(left) == []


def main() -> None:
    """Make an exact run in a process that has forgotten our modules, and print those that it imports."""
    for name in [name for name in sys.modules if name.startswith("cocodiff")]:
        del sys.modules[name]
    cocodiff = import_module("cocodiff")
    with torch.no_grad(), cocodiff.parallelize(sd3_transformer(4), preset="tapa", steps=1) as engine:
        engine.model(**sd3_inputs(1, 8, 8, 5))
    print(*(name for name in sys.modules if name.startswith("cocodiff")))


def test_an_exact_run_imports_the_library_alone(tmp_path):
    """No planner, command, benchmark or evaluation, and few lines."""
    assert_succeeded(run := forked(folder=tmp_path, module="test_architecture"))
    files = {module_name(path).removesuffix(".__init__"): path for path in SOURCES}
    imported = [name for name in run.stdout.split() if name in files]
    outer = ("planner", "jobs", "cli")
    packages = (*(f"cocodiff.{package}" for package in outer), "cocodiff_eval", "cocodiff_bench", "cocodiff_studies")
    assert [name for name in imported if any(covers(package, name) for package in packages)] == []
    assert "cocodiff.engine.engine" in imported
    assert sum(len(code_lines(files[name])) for name in imported) <= 5600


def test_no_two_classes_have_one_name():
    names = [node.name for _, node in nodes(ast.ClassDef)]
    assert {name for name in names if names.count(name) > 1} == set()


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name == "__init__.py"], ids=module_name)
def test_packages_say_what_they_are_for_and_name_modules_that_are_there(path):
    """Lower-case names in a package's docstring are modules of its own, or begin a path from the top."""
    told = ast.get_docstring(syntax(path)) or ""
    assert told
    for module, inner in re.findall(r"`([a-z_]+)(?:\.py|\.(?!html)(\w+))?`", told):
        below = [path.with_name(f"{module}.py"), path.with_name(module) / "__init__.py"]
        there = next((one for one in below if one in SOURCES), None)
        assert there or module in TOPS, f"{path}: no module {module}"
        if there and inner:
            assert re.search(rf"\b{inner}\b", there.read_text()), f"{there} has no {inner}"


def test_no_name_of_a_tensor_is_compared_below_the_strategies():
    for file, node in nodes(ast.Compare):
        if file.startswith(("cocodiff/exchange/", "cocodiff/attention/displaced")):
            values = [one.value for one in (node.left, *node.comparators) if isinstance(one, ast.Constant)]
            assert not {*values} & {"q", "k", "v", "o"}, (file, node.lineno)


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """Every node of these kinds in our sources, with the file that it stands in."""
    for path in SOURCES:
        yield from ((str(path.relative_to(ROOT)), node) for node in ast.walk(syntax(path)) if isinstance(node, kinds))


@cache
def code_lines(path: Path) -> set[int]:
    """The numbers of a file's lines of code. Docstrings, comments and blank lines are none: words may take room."""
    lines = {number for number, line in enumerate(path.read_text().splitlines(), 1) if not re.match(r"\s*(#|$)", line)}
    for node in ast.walk(syntax(path)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return lines


def test_files_and_functions_are_short():
    assert [str(path) for path in SOURCES if len(code_lines(path)) > 500] == []
    for path in SOURCES:
        for node in ast.walk(syntax(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own = code_lines(path) & {*range(node.lineno, node.end_lineno + 1)}
                assert len(own) <= 60, f"{path}: {node.name} has {len(own)} lines"


WITHOUT_SUBJECT = {
    *("what", "of", "how", "whether", "where", "by", "as", "which", "who"),
    *("that", "from", "those", "none", "so", "with", "in"),
}
FIELD = re.compile(r"(?:^|[.;] )[a-z_0-9]+: ")


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_docstrings_have_a_subject_short_sentences_and_no_fields(path):
    """A function's begins with a verb, by a rule of ruff's; all others with an article and a noun. A class explains
    each field on its own line. A sentence has 36 words at most."""
    for node in ast.walk(syntax(path)):
        if isinstance(node, DOCUMENTED):
            text, name = " ".join((ast.get_docstring(node) or "").split()), getattr(node, "name", "the module")
            assert re.split(r"\W", text.lstrip("`"), maxsplit=1)[0].lower() not in WITHOUT_SUBJECT, name
            assert not isinstance(node, ast.ClassDef) or len(FIELD.findall(text)) < 2, name
            assert max(len(sentence.split()) for sentence in re.split(r"(?<=[.;:])\s", text)) <= 36, name


def test_no_module_globals_that_change():
    assert [(file, node.names) for file, node in nodes(ast.Global)] == []


def test_no_peers_name_but_in_their_benchmark():
    peers = re.compile("x" + r"dit\b|cache_" + r"dit|x" + "fuser", re.IGNORECASE)
    named = [str(path) for path in SOURCES if peers.search(path.read_text())]
    assert named == [str(ROOT / "eval" / "cocodiff_bench" / "peers.py")]


def tracked_texts() -> dict[str, str]:
    """Every text file that git keeps; none where there is no git."""
    texts = {}
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines():
        data = (ROOT / name).read_bytes() if (ROOT / name).is_file() else b""
        if b"\0" not in data:
            texts[name] = data.decode(errors="replace")
    return texts


def test_no_paths_of_one_machine():
    absolute = re.compile("/" + r"work/|/" + r"root/|/" + r"tmp/w\b|/" + r"home/\w")
    assert {name: absolute.findall(text) for name, text in tracked_texts().items() if absolute.search(text)} == {}


def test_what_commands_write_by_default_is_ignored_by_git():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    names = {name for path in SOURCES for name in re.findall(r'Option\("out", "[^"]*", "(\w+)"\)', path.read_text())}
    assert "restored" in names and [one for one in names if not {f"/{one}/", f"/{one}*/"} & {*ignored}] == []


def test_no_memory_is_given_back_to_a_device():
    """Messages in memory that is given back and taken anew leak in oneCCL (torch-xpu-ops 3744)."""
    assert [path for path in SOURCES if "empty_cache(" in path.read_text()] == []


def parameters(node: ast.FunctionDef) -> tuple[list[str], set[str]]:
    """All in their order, and those that may be left away."""
    named, by_word = [*node.args.posonlyargs, *node.args.args], node.args.kwonlyargs
    names = [one.arg for one in named if one.arg not in ("self", "cls")]
    may = {one.arg for one, default in zip(by_word, node.args.kw_defaults, strict=True) if default is not None}
    return names + [one.arg for one in by_word], may | {*names[len(names) - len(node.args.defaults) :]}


@cache
def parameters_by_name() -> dict[str, list[tuple[list[str], set[str]]]]:
    """Of all functions, methods and classes of ours that have a name."""
    found: dict[str, list[tuple[list[str], set[str]]]] = {}
    for node in (node for path in SOURCES for node in ast.walk(syntax(path))):
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(parameters(node))
        elif isinstance(node, ast.ClassDef):
            inits = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            found.setdefault(node.name, []).extend(map(parameters, inits))
    return found


def left_away(node: ast.AST, there: set[str], inside: str) -> Iterator[str]:
    """What a call leaves to its default that the function around it has been given by the same name."""
    if isinstance(node, ast.FunctionDef):
        there, inside = there | {*parameters(node)[0]}, node.name
    if isinstance(node, ast.Call) and not any(isinstance(one, ast.Starred) for one in node.args):
        called = getattr(node.func, "id", getattr(node.func, "attr", ""))
        given = {one.arg for one in node.keywords}
        if len(of_name := parameters_by_name().get(called, [])) == 1 and None not in given:
            names, may = of_name[0]
            yield from (f"{inside} > {called}: {name}" for name in (may & there) - given - {*names[: len(node.args)]})
    for child in ast.iter_child_nodes(node):
        yield from left_away(child, there, inside)


def test_functions_pass_on_what_they_are_told():
    """But for a codec of one rank, the launcher of an emulation's ranks, and a mesh that has no ring."""
    meant = {"__init__ > Codec: exchange", "_rank > detect: environment", "mesh_without_ring > meshes: kind"}
    assert {one for path in SOURCES for one in left_away(syntax(path), set(), "")} == meant
