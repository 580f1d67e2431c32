"""A campaign of generated inputs of `cocodiff inpaint`, and of generated settings of inpaint, generate and sweep.

    python tests/campaign/inputs.py --cases 1000 --seed 0 --workers 2
    python tests/campaign/inputs.py --seed 0 --first 437 --cases 1 --keep case

A case is right where it ends with exit 0 and a result that has the input's voxels outside the mask, shape, type, voxel
size and attributes; or with exit 2 and one line, with nothing written. Of most it is known which of both it must be.
Prints each case that went wrong with the command that repeats it, and a table; --refusals FILE takes the lines of all
refusals, --keep FOLDER the files of the cases. The suite of tests runs a sample.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from inputs_cases import Case, make_case
from inputs_checks import check_result
from warm import forked

HANGS_S = 240.0


def contents(folder: Path) -> dict[str, str]:
    """What lies in a folder, by name: the checksum of files."""
    found = {}
    for path in sorted(folder.rglob("*")):
        regular = path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest() if regular else "no file"
    return found


def run_case(seed: int, keep: str | None, number: int) -> dict[str, Any]:
    """A case from its files to its verdict, in plain data."""
    began, here = time.monotonic(), Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(keep).resolve() / str(number) if keep else Path(name) / "case"
        case = make_case(seed, number, folder)
        before, code, output, error = contents(folder), None, "", ""
        os.chdir(folder)
        try:
            done = forked(*case.words, folder=Path(name), timeout_s=HANGS_S)
            code, output, error = done.returncode, done.stdout, done.stderr
            wrong = judge(case, before, code, output, error)
        except (ValueError, LookupError, TypeError, OSError) as failed:
            wrong = f"the result cannot be looked at: {failed!r}"
        except subprocess.TimeoutExpired:
            wrong = f"has not ended after {HANGS_S:g} s"
        finally:
            os.chdir(here)
    found = {"number": number, "kind": case.kind, "twist": case.twist, "code": code, "wrong": wrong}
    return found | {"words": case.words, "error": error[-3000:], "seconds": time.monotonic() - began}


def judge(case: Case, before: dict[str, str], code: int, output: str, error: str) -> str:
    """What is wrong with how a case ended; "" where nothing is."""
    if "Traceback" in output + error or code not in (0, 2):
        return f"exit {code}"
    after = {name: one for name, one in contents(case.folder).items() if not name.startswith("out/")}
    made = after.pop("out", None) is not None
    if case.kind == "settings" and code == 0:  # which may have another `out`
        after = {name: one for name, one in after.items() if name in before}
    if after != before:
        return f"changed or left behind: {sorted(set(after.items()) ^ set(before.items()))[:3]}"
    if case.ends is not None and code != case.ends:
        return f"exit {code}, but {case.ends} is right"
    if code == 0:
        return check_result(case) if case.kind != "settings" and made else ""
    lines = error.splitlines()
    if len(lines) != 1 or not lines[0].startswith("cocodiff: "):
        return f"{len(lines)} lines of refusal"
    if made:
        return "refused, and yet something was written"
    names = [*case.files, repr(case.path.stem)[1:-1]]
    named = case.kind == "settings" or any(name and name in lines[0] for name in names)
    return "" if named else "the refusal names neither file nor option"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("cases", 1000), ("seed", 0), ("first", 0), ("workers", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--keep")
    parser.add_argument("--refusals")
    given = parser.parse_args()
    began, found = time.monotonic(), []
    numbers = range(given.first, given.first + given.cases)
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(partial(run_case, given.seed, given.keep), numbers):
            found.append(one)
            if one["wrong"] or given.cases == 1:
                print(f"{one['kind']}, {one['twist']}: {one['wrong']}")
                again = f"--seed {given.seed} --first {one['number']} --cases 1 --keep case"
                print(f"  python tests/campaign/inputs.py {again}")
                print(f"  {one['words']}\n{one['error']}", flush=True)
    if given.refusals:
        refused = [one for one in found if one["code"] == 2]
        lines = [f"{one['number']} {one['kind']}, {one['twist']}: {one['error']}" for one in refused]
        Path(given.refusals).write_text("".join(lines))
    print_table(found, (time.monotonic() - began) / 60)
    return any(one["wrong"] for one in found)


def print_table(found: list[dict[str, Any]], minutes: float) -> None:
    print(f"{'':14}{'tried':>7}{'results':>9}{'refusals':>10}{'wrong':>7}")
    for of in ("kind", "twist"):
        for name in dict.fromkeys(one[of] for one in found):
            print_row(name, [one for one in found if one[of] == name])
    print_row("all", found)
    print(f"{minutes:.1f} minutes; the longest case {max(one['seconds'] for one in found):.1f} s")


def print_row(name: str, found: list[dict[str, Any]]) -> None:
    ends = Counter("wrong" if one["wrong"] else one["code"] for one in found)
    print(f"{name:14}{len(found):7}{ends[0]:9}{ends[2]:10}{ends['wrong']:7}")


if __name__ == "__main__":
    sys.exit(main())
