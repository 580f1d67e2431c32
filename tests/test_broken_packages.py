"""Packages that are there and do not import: what needs none of them works, what does ends with one line, and doctor
tells which fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import mrcfile
import numpy as np
import pytest
import tifffile
import zarr
from launching import run
from PIL import Image
from value_tables import beside

from cocodiff.cli.doctor.facts import OPTIONAL, REQUIRED, unimported
from cocodiff.config.packages import REMEDIES, TAKEN_UP, failed_import, remedy_of

ROOT = Path(__file__).parents[1]
MISSING = "libhdf5.so.310: cannot open shared object file"
ERRORS = ("ImportError", "OSError", "RuntimeError")
# All that a run may do without, IPEX and oneCCL's bindings with it, which are imported on XPU alone.
ALL_OPTIONAL = (
    *(name.partition(".")[0] for name in (*TAKEN_UP, *OPTIONAL)),
    *("xarray", "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"),
)


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts packages first on the path of programs that are started, which are installed and raise an error."""

    def put(error: str, *names: str, body: str = "") -> None:
        site = tmp_path / "site"
        for name in names:
            about = site / f"{name}-9.9.9.dist-info"
            for folder in (site / name, about):
                folder.mkdir(parents=True, exist_ok=True)
            (site / name / "__init__.py").write_text(body or f"raise {error}({MISSING!r})\n")
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))

    return put


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same slice in every format."""
    monkeypatch.chdir(tmp_path)
    image_YX = np.random.default_rng(0).integers(0, 255, (32, 32)).astype(np.uint8)
    tifffile.imwrite("x.tif", image_YX)
    tifffile.imwrite("lzw.tif", image_YX, compression="lzw")
    with h5py.File("x.h5", "w") as file:
        file["exchange/data"] = image_YX
    zarr.create_array("x.zarr", data=image_YX)
    mrcfile.new("x.mrc", image_YX.astype(np.uint16)).close()
    np.save("x.npy", image_YX)
    Image.fromarray(image_YX).save("x.png")
    return tmp_path


def cocodiff(*words: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, "-m", "cocodiff", *words])


def inpaint(file: str, *more: str) -> subprocess.CompletedProcess[str]:
    words = ("--mask", "center", "--steps", "1", "--out", f"out-{file}", "--kernels", "torch")
    return cocodiff("inpaint", "--input", file, *words, *more)


@pytest.mark.sample(1)
@pytest.mark.parametrize("error", ERRORS)
def test_a_run_on_tiff_works_where_no_other_package_does(error, broken, files):
    """Its report as well, though what is done without is told where a library would have taken it up."""
    broken(error, *ALL_OPTIONAL)
    done = inpaint("x.tif", "--ranks", "2")
    assert done.returncode == 0, done.stderr
    assert (files / "out-x.tif" / "report.html").is_file() and "Traceback" not in done.stderr
    assert "peft" in done.stdout + done.stderr and MISSING in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "needs"),
    [("x.h5", "h5py"), ("x.zarr", "zarr numcodecs"), ("x.npy", ""), ("x.png", ""), ("x.mrc", "mrcfile")],
)
def test_a_format_works_where_all_that_it_does_not_need_is_broken(file, needs, broken, files):
    broken(ERRORS[len(needs) % 3], *(name for name in ALL_OPTIONAL if name not in needs.split()))
    done = inpaint(file)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("package", "file", "more"), beside(__file__))
@pytest.mark.sample(5)
@pytest.mark.parametrize("error", ERRORS)
def test_a_format_whose_package_is_broken_is_refused_in_one_line(package, file, more, error, broken, files):
    broken(error, package)
    done = inpaint(file, *more)
    *before, line = done.stderr.splitlines()
    assert done.returncode == 2 and before == [], done.stderr
    assert all(text in line for text in (package, MISSING, error, remedy_of(package)))
    assert not (files / f"out-{file}").exists()


def test_without_imagecodecs_only_what_it_would_decode_is_refused(broken, files):
    broken("OSError", "imagecodecs")
    done = inpaint("lzw.tif")
    assert done.returncode == 2 and "imagecodecs" in done.stderr and MISSING in done.stderr, done.stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("package", ["scipy", "accelerate", "skimage", "transformers"])
@pytest.mark.parametrize("error", ERRORS)
def test_what_every_run_needs_and_does_not_import_is_one_line(package, error, broken, files):
    """Also where a rank imports it, as one alone does for the figures of a run that is through."""
    broken(error, package)
    done = inpaint("x.tif", "--quiet")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert package in done.stderr and MISSING in done.stderr and remedy_of(package) in done.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "words",
    [
        "plan --model sd3.5 --size 512 --nodes 1 --out p --memory",
        "bench step --ranks 1 --steps 1 --out b",
        "doctor --kernels torch --out d",
        "kernels --help",
    ],
)
def test_commands_that_need_no_optional_package_work_without(words, broken, files):
    broken("OSError", *ALL_OPTIONAL)
    done = cocodiff(*words.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("command", [f"sweep --config {ROOT}/configs/sweeps/codec.yaml --ranks 2", "train"])
def test_pictures_that_cannot_be_drawn_are_told_of_before_the_run(command, broken, files):
    broken("ImportError", "matplotlib")
    done = cocodiff(*command.split(), "--input", "x.tif", "--mask", "center", "--out", "s")
    assert done.returncode == 2 and remedy_of("matplotlib") in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


LATE = {"hdf5.py": {"h5py"}, "labels.py": {"zarr"}, "sweep.py": {"matplotlib"}, "training.py": {"matplotlib"}}


def test_no_optional_package_is_imported_at_the_top_of_a_file_that_others_need() -> None:
    """LATE: files that are imported when one of the format is read, or when a picture will be drawn."""
    found: dict[str, set[str]] = {}
    for folder in ("cocodiff", "eval", "sycl_kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            if tops := {*re.findall(r"(?m)^(?:import|from) (\w+)", path.read_text())} & {*ALL_OPTIONAL}:
                found.setdefault(path.name, set()).update(tops)
    assert found == LATE


def raised(program: str) -> Exception:
    with pytest.raises(Exception) as caught:
        exec(compile(program, "program", "exec"), {"__name__": "a_package.part"})
    return caught.value


def test_only_errors_of_an_import_are_taken_for_one():
    assert "a_package" in failed_import(raised("raise OSError('no')"))
    assert "absent_package" in failed_import(raised("import absent_package.part"))
    for ours in (ValueError("no"), OSError("disk full"), KeyError("x")):
        assert failed_import(ours) == ""
    outer = RuntimeError("outer")
    outer.__cause__ = raised("raise OSError('inner')")
    assert "inner" in failed_import(outer)


def test_the_remedy_of_a_module_s_h5py_stands_in_the_guide() -> None:
    page = (ROOT / "docs" / "aurora.md").read_text()
    for line in ("pip install --ignore-installed --no-deps h5py", "module load hdf5/1.14.6"):
        assert line in REMEDIES["h5py"] and line in page
    assert "pillow" in remedy_of("PIL") and "scikit-image" in remedy_of("skimage")


def test_doctor_tries_all_that_the_project_depends_on() -> None:
    """By the names under which packages are imported."""
    listed = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("]\n")[0]
    names = {"scikit-image": "skimage", "pillow": "PIL", "pyyaml": "yaml"}
    wanted = {line.strip(' ",').partition(">")[0] for line in listed.splitlines()} - {""}
    assert {names.get(one, one) for one in wanted} <= {*REQUIRED, *OPTIONAL}


def test_each_package_is_tried_until_one_ends_the_process_or_does_not_end(broken, tmp_path, monkeypatch):
    broken("OSError", "fails")
    broken("", "exits", body="raise SystemExit(4)")
    broken("", "dies", body="import os; print('half a line', end=''); os._exit(3)")
    broken("", "works", body="print('some advice')")
    broken("", "waits", body="import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path / "site")
    found = unimported(("fails", "works", "exits", "absent", "json", "dies", "waits"))
    assert list(found) == ["fails", "exits", "dies"]
    assert MISSING in found["fails"] and "4" in found["exits"]
    late = unimported(("fails", "works", "waits", "dies"), limit_s=3.0)
    assert list(late) == ["fails", "waits"] and "3 s" in late["waits"]


def test_mpi_is_not_started_where_it_is_tried(broken, tmp_path, monkeypatch):
    """A process that a rank starts has its variables, and MPI would take it for the rank."""
    broken("", "looks", body="from mpi4py import MPI\nif MPI.Is_initialized(): raise OSError('started')\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert unimported(("mpi4py.MPI", "looks")) == {}
    broken("OSError", "mpi4py")
    assert MISSING in unimported(("mpi4py.MPI",))["mpi4py.MPI"]


@pytest.mark.alone
def test_doctor_tells_of_what_does_not_import(broken, files):
    """And finds fault where it is a package that all runs need."""
    broken("OSError", "accelerate", "h5py")
    done = cocodiff("doctor", "--kernels", "torch", "--out", "e")
    assert done.returncode == 1 and MISSING in done.stdout
    assert all(name in done.stdout and remedy_of(name) in done.stdout for name in ("accelerate", "h5py"))
