#!/usr/bin/env python3
"""Follows docs/aurora.md as a user of Aurora does, and tells of each command whether it works.

usage: .venv/bin/python tests/aurora/first_hour.py [TREE [PAGE]]    (this tree, unless told, and the tree's page)

Stand-ins for what is not here: a module with its variables, whose torch has the module's version and whose h5py does
not import; an index of packages; queues with the guide's limits; an mpiexec whose ranks see the variables of PALS alone
and are RANKS instead of twelve, on the CPU; a small model in place of a download. A job goes on where one of its
commands fails. Exit code 1 where any has failed.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from launching import fake, find_mpiexec, run  # noqa: E402

PACKAGES, BASE = Path(sysconfig.get_path("purelib")), f"{sys.base_prefix}/bin/python3"
RANKS, LIMIT_S, VENV = 2, 600, ".venv-aurora"
TORCH = "2.10.0a0+git449b176"
LEFT_OUT = ("sudo LAUNCHER=emulate", "bash launch/aurora.pbs")  # emulations have tests; qsub starts that script
MENDS_H5PY = re.compile("module load hdf5|pip install .*h5py")  # they come last: all others are tried without
# The page's second way to install begins with an environment that has nothing yet.
ANEW = f"mv {VENV}/module.txt . && rm -r {VENV} && python -m venv --system-site-packages {VENV} && mv module.txt {VENV}"
CHECKS = {  # what shall be so after commands that have these words
    "pip install -c": f"{VENV}/bin/pip freeze --all | grep -E '^(torch|mpi4py|numpy)==' | diff - {VENV}/module.txt",
    "qsub launch/aurora.pbs": f"grep 'healthy: {RANKS} rank' aurora.pbs.o1 && ls restored/aurora/report.html",
    "--device xpu": f"grep '\"rank\": {RANKS - 1}' doctor/doctor.json",
    "--no-deps h5py": f"{VENV}/bin/python -c 'import h5py.h5'",
}


def link(paths: Iterable[Path], folder: Path) -> None:
    folder.mkdir(parents=True)
    for path in paths:
        (folder / path.name).symlink_to(path)


def make_module(folder: Path) -> None:
    """Make what the module's Python has: what is installed here, but for the version of torch, and for h5py."""
    link([path for path in PACKAGES.iterdir() if re.match("numpy|mpi4py|h5py-|setuptools", path.name)], folder)
    link([path for path in (PACKAGES / "torch").iterdir() if path.name != "version.py"], folder / "torch")
    version = (PACKAGES / "torch/version.py").read_text()
    error = "libhdf5.so.310: cannot open shared object file: No such file or directory"
    for name, text in {
        "torch/version.py": re.sub(r"(?m)^__version__ = .*", f"__version__ = {TORCH!r}", version),
        f"torch-{TORCH}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {TORCH}\n",
        "h5py/__init__.py": f"raise ImportError({error!r})\n",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def make_index(folder: Path, rest: Path) -> None:
    """Make wheels of all that cocodiff needs, newer than the module's. They lead to `rest`: what is installed here and
    is not the module's. h5py's has the package."""
    hidden = re.compile(r"numpy|mpi4py|h5py|setuptools|torch$|torch-|impi_rt|cocodiff|__editable__|.*\.pth$")
    link([path for path in PACKAGES.iterdir() if not hidden.match(path.name)], rest)
    folder.mkdir()
    for need in map(Requirement, metadata.requires("cocodiff") or []):
        name, about = need.name.replace("-", "_"), f"{need.name.replace('-', '_')}-99.0.dist-info"
        needs = "" if name in ("torch", "numpy") else "Requires-Dist: torch>=2.0.0\nRequires-Dist: numpy>=1.17\n"
        files = {
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {need.name}\nVersion: 99.0\n{needs}",
            f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{about}/RECORD": "",
            f"{name}.pth": f"{rest}\n",
        }
        if name == "h5py":
            files["h5py/__init__.py"] = f"__path__ = [{str(PACKAGES / name)!r}]\n"
        with zipfile.ZipFile(folder / f"{name}-99.0-py3-none-any.whl", "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)


def commands(page: str) -> Iterator[str]:
    """Yield each command of the page's blocks, each job that its sentences start, and checks. What a job's script shall
    have in place of its last line is one."""
    pattern = r"^```\n(.*?)^```|`((?:\w+=\S+ )*(?:qsub|bash|.venv-aurora/bin/\w+)\s[^`]*)`"
    found = []
    for block, span in re.findall(pattern, page, re.DOTALL | re.MULTILINE):
        lines = " ".join(span.split()) or re.sub(r" *\\\n *", " ", re.sub("  +#.*", "", block))
        found += [lines] if "start_ranks" in block else lines.splitlines()
    wanted = [line for line in found if line and not line.startswith(("#", *LEFT_OUT))]
    for line in sorted(wanted, key=lambda line: bool(MENDS_H5PY.search(line))):
        yield from [ANEW] * ("tomllib" in line)
        yield line
        yield from (check for words, check in CHECKS.items() if words in line)


def follow(command: str, top: Path, tree: Path) -> Iterator[tuple[str, int, str]]:
    """Yield, of a command and of each that its job runs, the name, the exit code and what it said last. Where it goes
    and what it exports stays for the next one."""
    name, here = command, {"/flare/YOUR_PROJECT": f"{top}/flare", "--ranks 12": f"--ranks {RANKS}"}
    for theirs, ours in here.items():
        command = command.replace(theirs, ours)
    if "start_ranks" in command:
        name, own = "qsub launch/other.pbs", f"s|^OUT=.*|OUT=other|; s|^WEIGHTS=|&{top}/flare/sd3.5|; $d"
        command = f"(sed '{own}' launch/aurora.pbs; cat <<'END'\n{command}END\n) >launch/other.pbs && {name}"
    own = {"PATH": f"{top}/bin:{os.defpath}", "HOME": f"{top}/home", "BASH_ENV": f"{top}/bin/shell", "TREE": str(tree)}
    pip = {"NO_INDEX": "1", "FIND_LINKS": f"{top}/index", "NO_BUILD_ISOLATION": "0", "DISABLE_PIP_VERSION_CHECK": "1"}
    given = [f"{key}={value}" for key, value in (own | {f"PIP_{key}": value for key, value in pip.items()}).items()]
    shell = 'exec 2>&1; [ ! -e {0} ] || . {0}; cd "$PWD"; trap "export -p >{0}" EXIT; set -o pipefail; eval "$1"'
    words = ["env", "-i", *given, "timeout", str(LIMIT_S), "bash", "-c", shell.format(top / "state"), "bash", command]
    done = run(words, LIMIT_S + 60)
    yield name, done.returncode, ["", *filter(str.strip, done.stdout.splitlines())][-1]
    if (started := top / "started").exists():
        for code, what, said in (line.split(" ", 2) for line in started.read_text().splitlines()):
            yield f"    {what[:-1]}", int(code), said
        started.unlink()


def main(tree: Path, page: Path) -> int:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="first-hour-") as folder:
        top, began = Path(folder), time.monotonic()
        make_module(top / "module")
        make_index(top / "index", top / "rest")
        own = {"TOP": folder, "TESTS": TESTS, "PYTHON": sys.executable, "BASE": BASE, "PREFIX": sys.prefix}
        own |= {"RANKS": RANKS, "MPIEXEC": find_mpiexec()}
        names = "".join(f"{name}={value}\n" for name, value in own.items())
        for script in (TESTS / "aurora/stand_ins").glob("*.sh"):
            fake(top / "bin" / script.stem, names + script.read_text())
        fake(top / "bin" / "qsub", f'exec {sys.executable} {TESTS}/aurora/queues.py "$@"')
        for name in ("flare", "home"):
            (top / name).mkdir()
        for command in commands(page.read_text()):
            for name, code, said in follow(command, top, tree):
                failed += code != 0
                told = f"failed ({code}): {said}" if code else "ok"
                print(f"{time.monotonic() - began:4.0f} s  {name}: {told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    given = [Path(word).resolve() for word in sys.argv[1:]]
    tree = given[0] if given else TESTS.parent
    sys.exit(main(tree, given[1] if given[1:] else tree / "docs/aurora.md"))
