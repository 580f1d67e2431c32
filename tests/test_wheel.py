"""The wheel alone is the product: configs and the embedded model travel in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest
import tifffile

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
