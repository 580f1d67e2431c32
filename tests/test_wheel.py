"""The wheel alone is the product: configs and the embedded model travel in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import setuptools
import tifffile
from packaging.requirements import Requirement

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, **more: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copy_project(folder: Path) -> Path:
    """Copies the parts that a wheel is built of: a build leaves files where it is made."""
    for name in ("cocodiff", "configs", "eval", "sycl_kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.full
def test_a_wheel_in_a_bare_environment_restores_an_image(tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    source = copy_project(tmp_path / "source")
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path / "wheel", source, cwd=tmp_path)
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    python = bare / "bin" / "python"
    run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    packages = next((bare / "lib").glob("python*")) / "site-packages"
    # What cocodiff needs comes from here; cocodiff itself does not: path files of a path file's folder are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = run(python, "-c", "import cocodiff, cocodiff_eval; print(cocodiff.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(bare)
    run(python, "-c", "from cocodiff_sycl.build import kernel_source; kernel_source(1)", cwd=tmp_path)

    tifffile.imwrite(tmp_path / "scan.tif", np.random.default_rng(0).integers(0, 255, (96, 96), dtype=np.uint8))
    printed = run(bare / "bin" / "cocodiff", "inpaint", "--input", "scan.tif", "--steps", 2, "--quiet", cwd=tmp_path)
    assert "report.html" in printed
    assert tifffile.imread(tmp_path / "restored" / "images" / "scan_block_tapa.tif").shape == (96, 96)


def stand_in(folder: Path, name: str, version: str, needs: tuple[str, ...] = ()) -> None:
    """A wheel of nothing, for pip to choose."""
    records = f"{name}-{version}.dist-info"
    facts = "".join(f"Requires-Dist: {need}\n" for need in needs)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{records}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{facts}")
        wheel.writestr(f"{records}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{records}/RECORD", "")


AURORA_TORCH = "2.10.0a0+git449b176"


@pytest.mark.full
@pytest.mark.parametrize("way", ["constraints", "list"])
def test_the_lines_for_aurora_leave_the_modules_torch_in_place(tmp_path: Path, way: str) -> None:
    """A stand-in index has newer versions of all that the module has; the page's own lines are run."""
    source, module, index = (tmp_path / name for name in ("cocodiff", "module", "index"))
    copy_project(source)
    module.mkdir()
    index.mkdir()
    for name, version in (("torch", AURORA_TORCH), ("mpi4py", "4.1.0"), ("numpy", "2.2.0")):
        stand_in(module, name, version)
        zipfile.ZipFile(module / f"{name}-{version}-py3-none-any.whl").extractall(module)
    for name in ("torch", "numpy", "mpi4py"):
        stand_in(index, name, "99.0")
    for need in map(Requirement, metadata.requires("cocodiff") or []):
        if need.marker is None and need.name not in ("torch", "numpy"):
            stand_in(index, need.name.replace("-", "_"), "99.0", ("torch>=2.0.0", "numpy>=1.17"))

    environment = source / ".venv-aurora"
    venv.create(environment, with_pip=True)
    packages = next((environment / "lib").glob("python*")) / "site-packages"
    for path in packages.glob("setuptools*"):  # some Pythons bring an old one
        shutil.rmtree(path)
    for path in Path(setuptools.__file__).parents[1].glob("setuptools*"):  # it builds, and is not looked for
        (module / path.name).symlink_to(path)
    (packages / "module.pth").write_text(f"{module}\n")

    guide = (ROOT / "docs/aurora.md").read_text()
    constraints = next(line for line in guide.splitlines() if "pip list" in line)
    lines = [line for line in guide.replace("\\\n", "").splitlines() if "pip install" in line and "-e ." in line]
    rest = next(line for line in guide.replace("\\\n", "").splitlines() if "tomllib" in line)
    script = [constraints, *({"constraints": lines[:1], "list": [rest, lines[1]]}[way])]
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_NO_BUILD_ISOLATION": "0"}
    run("bash", "-euo", "pipefail", "-c", "\n".join(script), cwd=source, **pip)
    there = run(environment / "bin" / "python", "-m", "pip", "list", "--format=freeze", cwd=tmp_path).splitlines()
    assert {f"torch=={AURORA_TORCH}", "mpi4py==4.1.0", "numpy==2.2.0", "diffusers==99.0", "zarr==99.0"} <= set(there)
