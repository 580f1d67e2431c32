"""Mistakes in words, files and models: one line with the values, exit 2, nothing forked and nothing left."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import tiny_pipelines
import yaml
from PIL import Image
from planned_models import PLANNED

from cocodiff.cli.main import main
from cocodiff.config.errors import UserError
from cocodiff.jobs import children

pytestmark = pytest.mark.usefixtures("promptly")


def volumes() -> dict[str, np.ndarray]:
    chance, most = np.random.default_rng(0), np.ones((20, 100, 110), np.uint8)
    holes, slab = (np.zeros((20, 32, 40), np.uint8) for _ in range(2))
    holes[4:10, 5:13, 6:15], slab[8:11] = 255, 255
    most[:, :, :20] = 0
    return {
        "good": chance.integers(0, 60000, (96, 96), dtype=np.uint16),
        "small": np.eye(64, dtype=np.uint8),
        "hole": np.eye(96, dtype=np.uint8),
        "nan": np.where(np.arange(96) == np.arange(96)[:, None] + 1, np.nan, np.float32(1)),
        "two": chance.random((2, 40, 48), dtype=np.float32),
        "volume": chance.integers(0, 60000, holes.shape, dtype=np.uint16),
        "large": chance.integers(0, 60000, most.shape, dtype=np.uint16),
        "holes": holes,
        "slab": slab,
        "most": most,
        "empty": most * 0,
        "wide": most[0].astype(np.uint32),
    }


def without_image_encoder(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"image_encoder": [None, None]}))


def renamed(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FluxFillPipeline", "FluxPipeline"))


# What makes a model, and what is done to its folder.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Path], object]]] = {
    "sd3": (tiny_pipelines.sd3_pipeline, str),
    "encoders": (lambda: tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()), str),
    "z_image": (tiny_pipelines.z_image_pipeline, str),
    "cogvideox": (tiny_pipelines.cogvideox_pipeline, str),
    "animate": (lambda: tiny_pipelines.wan_pipeline(image=True), str),
    "fill": (lambda: tiny_pipelines.flux_pipeline(fill=True), str),
    "renamed": (lambda: tiny_pipelines.flux_pipeline(fill=True), renamed),
    "experts": (tiny_pipelines.wan_pipeline, str),
    "one_expert": (
        tiny_pipelines.wan_pipeline,
        lambda folder: next((folder / "transformer_2").glob("*.safetensors")).unlink(),
    ),
    "clip": (lambda: tiny_pipelines.wan_pipeline(experts=1, image=True, clip=True), str),
    "blind": (lambda: tiny_pipelines.wan_pipeline(experts=1, image=True, clip=True), without_image_encoder),
    "tokens": (lambda: tiny_pipelines.wan_pipeline(experts=1, tokens=True), str),
    "wan": (PLANNED["wan"].model, str),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good inputs, and of what there is to be refused; models are added when a case names them."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(Path(__file__).with_name("mistaken"), folder, dirs_exist_ok=True)
    for name, voxels in volumes().items():
        tifffile.imwrite(folder / f"{name}.tif", voxels, photometric="minisblack")
    for name in ("pipe.tif", "pipe.yaml"):
        os.mkfifo(folder / name)
    with h5py.File(folder / "linked.h5", "w") as file:
        file["data"] = h5py.ExternalLink("other.h5", "/data")
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(folder / "first.png")
    Image.fromarray(np.zeros((16, 16), np.uint16)).save(folder / "deep.png")
    return folder


COUNTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("counts.yaml").read_text())
ODD_NAMES = [
    (f"inpaint {option} '{name}{suffix}'", said)
    for name in ("x" * 5000, "nul\0", "a\nb")
    for option, suffix, said in (
        ("--mask", "", name[0]),
        ("--input", ".tif", name[0]),
        ("--model", "", "no such folder"),
    )
]


def cases() -> Iterator[tuple[str, str]]:
    """Yield each command with a mistake, and what the line of its refusal has."""
    for line, names in COUNTS.items():
        yield from ((f"{line} --{name} 0", f"--{name} 0") for name in names.split())
    yield from ODD_NAMES
    for line in Path(__file__).with_name("mistakes.txt").read_text().splitlines():
        command, arrow, values = line.partition(" -> ")
        if arrow:
            yield command, values


CASES = [*cases()]


@pytest.mark.parametrize(("line", "values"), CASES, ids=[line[:40].replace("\0", " ") for line, _ in CASES])
def test_a_mistake_is_one_line_and_leaves_nothing(
    line: str, values: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    named = MODELS.keys() & {*line.split()}  # of whose parts libraries may say something
    for name in named:
        if not (files / name).exists():
            make, change = MODELS[name]
            make().save_pretrained(files / name)
            change(files / name)
    capsys.readouterr()
    monkeypatch.setattr("os.fork", lambda: pytest.fail("forked"))
    words, before = shlex.split(line), sorted(files.rglob("*"))
    words += ["--input", "good.tif"] if words[0] == "inpaint" and "--input" not in words else []
    words += ["--out", "out"] if not {"--out", "verify", "doctor", "emulate"} & {*words} else []
    assert main(words) == 2
    captured = capsys.readouterr()
    assert sorted(files.rglob("*")) == before
    if words[0] not in ("inpaint", "generate", "train", "sweep"):  # which say first what they read
        assert captured.out == ""
    (said,) = [line for line in captured.err.splitlines() if named == set() or line.startswith("cocodiff: ")]
    assert said.startswith("cocodiff: ") and [value for value in values.split("; ") if value not in said] == [], said


def test_limits_are_those_of_memory_processes_and_files(monkeypatch):
    monkeypatch.setattr(children, "available_memory", lambda: 100 << 20)
    children.check_room(3)
    with pytest.raises(UserError, match=r"--ranks 4: each takes 26 MiB .* 100 MiB .* 3 "):
        children.check_room(4)
    monkeypatch.setattr(children, "available_memory", lambda: None)
    limits = {resource.RLIMIT_NPROC: (50, 50), resource.RLIMIT_NOFILE: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    children.check_room(49)
    with pytest.raises(UserError, match="--ranks 50: this host lets you have 50 processes"):
        children.check_room(50)
    limits[resource.RLIMIT_NOFILE] = (64, 1024)
    children.check_room(12)
    with pytest.raises(UserError, match=r"--ranks 13: .* 68 .* 64.*ulimit -n 136"):
        children.check_room(13)
    limits[resource.RLIMIT_NOFILE] = (8, 8)
    children.check_room(1)
