"""`cocodiff inpaint` as a user runs it, with a random model in diffusers' layout and with the embedded one."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import yaml
import zarr
from cocodiff_eval.data.masks import block_mask
from cocodiff_eval.harness.tasks import file_names
from launching import assert_succeeded
from PIL import Image
from skimage.restoration import inpaint_biharmonic
from tiny_models import sd3_inpaint_pipeline
from warm import forked

from cocodiff.cli.main import main

LINKS = ["sibling", "plane", "node", "cross_plane"]
Restore = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sd3_inpaint_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def restore(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Restore:
    """Runs `cocodiff inpaint` here, with the random model and 2 steps, and returns the folder of results."""
    runs = 0

    def run(*words: Any) -> Path:
        nonlocal runs
        runs += 1
        out = tmp_path / f"out{runs}"
        fixed = ["--model", str(model), "--steps", "2", "--quiet", "--out", str(out)]
        code = main(["inpaint", *map(str, words), *fixed])
        assert code == 0, capsys.readouterr().err
        return out

    return run


def noise(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).random(shape)
    return (values * (1 if np.dtype(dtype).kind == "f" else np.iinfo(dtype).max)).astype(dtype)


def hole_of(shape: tuple[int, int]) -> np.ndarray:
    """A mask file's voxels."""
    hole_YX = np.zeros(shape, np.uint8)
    hole_YX[8:24, 8:24] = 1
    return hole_YX


def test_results_have_the_promised_names_and_the_run_can_be_repeated(restore: Restore, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "scan.tif", noise((64, 64), np.uint16))
    out = restore("--input", tmp_path / "scan.tif", "--mask", "block", "center", "--preset", "flat,tapa", "--seed", 5)
    names = {".cocodiff-files.json", "images", "metrics.json", "report.html", "run.yaml", "trace.json"}
    assert {path.name for path in out.iterdir()} == names
    cases = [(mask, preset) for mask in ("block", "center") for preset in ("flat", "tapa")]
    names = {f"scan_{mask}_{preset}.{suffix}" for mask, preset in cases for suffix in ("png", "tif")}
    assert {path.name for path in (out / "images").iterdir()} == names | {"scan_block_mask.tif", "scan_center_mask.tif"}
    mask_YX = tifffile.imread(out / "images" / "scan_block_mask.tif")
    given_YX = tifffile.imread(tmp_path / "scan.tif")
    restored_YX = tifffile.imread(out / "images" / "scan_block_flat.tif")
    assert mask_YX.dtype == np.uint8 and np.array_equal(mask_YX, block_mask((64, 64), 5) * 255)
    page = (out / "report.html").read_text()
    facts = {"ranks": 1, "presets": "flat, tapa", "steps": 2, "seed": 5}
    assert all(f"<dt>{name}</dt><dd>{told}</dd>" in page for name, told in facts.items())
    assert np.array_equal(restored_YX[mask_YX == 0], given_YX[mask_YX == 0])
    assert (restored_YX != given_YX)[mask_YX == 255].mean() > 0.9
    metrics = json.loads((out / "metrics.json").read_text())
    assert (metrics["schema"], metrics["ranks"]) == (1, 1)
    assert [(row["name"], row["mask"], row["mode"]) for row in metrics["images"]] == [("scan", *case) for case in cases]
    for row in metrics["images"]:
        assert list(row["bytes"]) == LINKS and row["seconds"] > 0
        assert row["psnr_vs_exact_db"] is None and math.isfinite(row["psnr_db"])
        assert -1 <= row["ssim"] <= 1 and math.isclose(row["psnr_db"], -10 * math.log10(row["mse"]))
    json.loads((out / "trace.json").read_text())
    again = yaml.safe_load((out / "run.yaml").read_text()) | {"out": str(tmp_path / "again")}
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(again))
    assert main(["inpaint", "--config", str(tmp_path / "again.yaml")]) == 0
    for mask, preset in cases:
        name = f"images/scan_{mask}_{preset}.tif"
        assert np.array_equal(tifffile.imread(out / name), tifffile.imread(tmp_path / "again" / name))


def test_a_store_is_restored_in_a_region_under_its_own_labels(restore: Restore, tmp_path: Path, capsys: Any) -> None:
    volume, labels = noise((4, 48, 64), np.uint16), np.zeros((4, 48, 64), np.uint8)
    labels[1:3, 4:20, 6:30], labels[2, 30:35, 8:20] = 4, 9
    axes = [{"name": name, "type": "space", "unit": "micrometer"} for name in "zyx"]
    scale = [{"type": "scale", "scale": [2.0, 0.5, 0.5]}]
    datasets = [{"path": "0", "coordinateTransformations": scale}]
    image = {"version": "0.4", "axes": axes, "datasets": datasets}
    store = zarr.create_group(tmp_path / "scan.zarr", zarr_format=2, attributes={"multiscales": [image]})
    store.create_array("0", data=volume, chunks=(2, 32, 32))
    store.create_group("labels").create_array("holes", data=labels, chunks=(2, 32, 32))
    store.create_array("labels/half", data=labels[:, ::2], chunks=(2, 32, 32))
    words = ("--input", tmp_path / "scan.zarr", "--mask", "labels/holes", "--slices", "1:4", "--roi", "0:40,4:")
    out = restore(*words, "--no-exact", "--seed", 3)
    kept, hidden = volume[1:4, :40, 4:], labels[1:4, :40, 4:] > 0
    result = zarr.open_group(out / "images" / "scan_holes_tapa.ome.zarr", mode="r")
    restored = result["0"][:]
    assert np.array_equal(restored[~hidden], kept[~hidden]) and not np.array_equal(restored[hidden], kept[hidden])
    about = result.attrs["multiscales"][0]["datasets"][0]["coordinateTransformations"]
    assert about == [*scale, {"type": "translation", "translation": [2.0, 0.0, 2.0]}]
    made = result.attrs["cocodiff"]
    assert list(result["labels"]) == ["holes"] and "labels/half of " in capsys.readouterr().out
    label = result["labels/holes"]
    assert np.array_equal(label["0"][:], labels[1:4, :40, 4:])
    assert label.attrs["multiscales"][0]["datasets"][0]["coordinateTransformations"] == about
    assert (made["preset"], made["seed"], made["steps"], made["region"]["start"]) == ("tapa", 3, 2, [1, 0, 4])
    # A sequence, from the settings of that run, into a folder that is there; a result is no input of its own run.
    again = restore("--format", "sequence", "--config", out / "run.yaml", "--overwrite")
    files = sorted((again / "images" / "scan_holes_tapa").iterdir())
    assert [file.name for file in files] == ["slice_00001.tif", "slice_00002.tif", "slice_00003.tif"]
    assert np.array_equal(np.stack([tifffile.imread(file) for file in files]), restored)
    for file in files:
        with tifffile.TiffFile(file) as tiff:
            told = html.unescape(str(tiff.ome_metadata)).split('"cocodiff">')[1].split("<")[0]
        assert json.loads(told) == made


def test_a_constant_slice_is_told_and_comes_back(restore: Restore, tmp_path: Path, capsys: Any) -> None:
    slice_YX, hole_YX = np.full((48, 48), 777, np.uint16), hole_of((48, 48))
    for name, array in (("flat", slice_YX), ("hole", hole_YX)):
        tifffile.imwrite(tmp_path / f"{name}.tif", array)
    out = restore("--input", tmp_path / "flat.tif", "--mask", tmp_path / "hole.tif")
    said = "flat, mask hole: all known voxels are 777: so is the result, without a PSNR"
    assert said in capsys.readouterr().out
    assert np.array_equal(tifffile.imread(out / "images" / "flat_hole_tapa.tif"), slice_YX)


def test_a_part_is_called_by_the_numbers_of_the_input_and_slices_masked_wholly_are_left(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slices 2 to 6 of 8: of them 3 and 5 are restored, 6 is masked wholly, 2 and 4 are not masked."""
    volume, labels = noise((8, 48, 48), np.uint16) // 4, np.zeros((8, 48, 48), np.uint8)
    labels[[3, 5], 10:20, 10:20], labels[6] = 1, 1
    volume[3, 8, 8], volume[3, 0, 0], volume[6] = 65535, 0, 60000
    for name, array in (("scan", volume), ("holes", labels)):
        tifffile.imwrite(tmp_path / f"{name}.tif", array, photometric="miniswhite", metadata={"axes": "ZYX"})
    inputs = ("--input", tmp_path / "scan.tif", "--mask", tmp_path / "holes.tif", "--truth", tmp_path / "scan.tif")
    words = (*inputs, "--slices", "2:7", "--model", model, "--steps", 2, "--batch", 1, "--out", tmp_path / "out")
    assert main(["inpaint", *map(str, words)]) == 0
    said = capsys.readouterr()
    assert "scan, mask holes: 1 slice(s) masked wholly, " in said.out
    assert "1 known voxel(s) lie beyond: --range 0,65535 takes them in" in said.out
    assert said.out.count("scan.tif: results of its own format alone keep that 0 is white") == 1
    assert "2 of 2 slices" in said.err and "of 5" not in said.err  # the others are no work
    images = tmp_path / "out" / "images"
    assert sorted(path.name for path in images.glob("*.png")) == ["scan[3]_holes_tapa.png", "scan[5]_holes_tapa.png"]
    restored = tifffile.imread(images / "scan_holes_tapa.tif")
    hidden = (labels[2:7] > 0) & (np.arange(2, 7) != 6)[:, None, None]
    assert np.array_equal(restored[~hidden], volume[2:7][~hidden])
    assert not np.array_equal(restored[hidden], volume[2:7][hidden])
    assert np.asarray(Image.open(images / "scan[3]_holes_tapa.png")).mean() > 100  # the hot voxel leaves the window
    document = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert [row["name"] for row in document["images"]] == ["scan[3]", "scan[5]"]
    (told,) = document["inputs"]
    assert (told["slices"], told["wholly_masked"], told["beyond"]) == ([2, 7], [6], 1)
    assert told["range"][1] <= 16383 and told["extremes"][1] == 65535
    for row in document["images"]:
        assert row["rank_seconds"] == row["seconds"] == row["replica_seconds"]["0"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "2 slices without masked voxels" in page and "masked wholly and was left as in the input" in page
    explicit = ("--config", tmp_path / "out" / "run.yaml", "--range=-10,70000")
    assert main(["inpaint", *map(str, explicit)]) == 0 and "lie beyond" not in capsys.readouterr().out
    again = tmp_path / "out-2"
    assert json.loads((again / "metrics.json").read_text())["inputs"][0]["range"] == [-10, 70000]
    assert yaml.safe_load((again / "run.yaml").read_text())["range"] == "-10,70000"


@pytest.mark.parametrize(("name", "shape"), [("scan.h5:/a/b", (2, 50, 64)), ("scan.png", (30, 41))])
def test_the_truth_under_a_mask_file_cannot_reach_the_output(
    restore: Restore, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    """Of stacks and slices of other sizes than the model's; voxels outside keep their bits, dtype and shape."""
    known = noise(shape, np.float32 if ".h5" in name else np.uint16)
    hidden = np.zeros(shape[-2:], bool)
    hidden[3:19, 5:30] = True
    tifffile.imwrite(tmp_path / "hole.tif", hidden.astype(np.uint8))
    results = []
    for under in (noise(shape, np.uint16, 1), known * 0 + (np.nan if ".h5" in name else 0)):
        given = np.where(hidden, under, known).astype(known.dtype)
        if ".h5" in name:
            with h5py.File(tmp_path / "scan.h5", "w") as file:
                file["a/b"] = given
        else:
            Image.fromarray(given).save(tmp_path / name)
        out = restore("--input", tmp_path / name, "--mask", tmp_path / "hole.tif", "--format", "npy")
        (result,) = (out / "images").glob("*_hole_tapa.npy")
        results.append(np.load(result))
        assert results[-1].dtype == known.dtype and results[-1].shape == shape
        assert np.array_equal(results[-1][..., ~hidden], known[..., ~hidden])
        rows = json.loads((out / "metrics.json").read_text())["images"]
        assert len(rows) == (shape[0] if len(shape) == 3 else 1)
        assert all(row["psnr_db"] is row["ssim"] is row["mse"] is None for row in rows)  # the truth is not known
    assert np.isfinite(results[0]).all() and results[0].tobytes() == results[1].tobytes()


def test_a_mask_file_with_its_truth_is_judged(restore: Restore, tmp_path: Path) -> None:
    """The figures are those of the file's own voxels and of a biharmonic continuation, in units of the range."""
    image, hole = noise((64, 64), np.uint8), hole_of((64, 64))
    for name, array in (("scan", image), ("truth", image), ("hole", hole)):
        tifffile.imwrite(tmp_path / f"{name}.tif", array)
    out = restore("--input", tmp_path / "scan.tif", "--mask", tmp_path / "hole.tif", "--truth", tmp_path / "truth.tif")
    document = json.loads((out / "metrics.json").read_text())
    (row,), (low, high) = document["images"], document["inputs"][0]["range"]
    restored = tifffile.imread(out / "images" / "scan_hole_tapa.tif").astype(float)
    smooth = inpaint_biharmonic(image.astype(float), hole)
    for judged, made in ((row, restored), (row["baseline"], smooth)):
        error = np.square((made - image)[hole > 0] / (high - low)).mean()
        assert judged["mse"] == pytest.approx(error, rel=0.02)
        assert judged["psnr_db"] == pytest.approx(-10 * math.log10(judged["mse"]))
    assert row["psnr_db"] != row["baseline"]["psnr_db"]


def test_a_lossy_run_reports_what_it_left_behind(tmp_path: Path) -> None:
    """Of two samples, which share calls: their mean against the exact run's mean."""
    tifffile.imwrite(tmp_path / "scan.tif", noise((48, 96), np.float32))
    presets = ("--preset", "tapa", "cocodiff", "ahead", "--tau", 2, "--samples", 2, "--no_hidden_test")
    words = ("--input", tmp_path / "scan.tif", "--steps", 6, "--ranks", 2, "--quiet", "--out", tmp_path / "out")
    assert_succeeded(forked("inpaint", *words, *presets, folder=tmp_path))
    document = json.loads((tmp_path / "out" / "metrics.json").read_text())
    exact, lossy, ahead = document["images"]
    assert "drift" not in exact and exact["samples"] == 2 and exact["psnr_vs_exact_db"] is None
    assert ahead["drift"][0]["exposed_fraction"] == 1
    images, span = tmp_path / "out" / "images", np.ptp(document["inputs"][0]["range"])
    mean, mask_YX = tifffile.imread(images / "scan_block_tapa.tif"), tifffile.imread(images / "scan_block_mask.tif") > 0
    for row in (lossy, ahead):
        errors = (tifffile.imread(images / f"scan_block_{row['mode']}.tif") - mean)[mask_YX] / span
        assert row["psnr_vs_exact_db"] == pytest.approx(-10 * math.log10(np.square(errors).mean()), abs=0.05)
    assert (tmp_path / "out" / "run.yaml").read_text().startswith("# ahead: codec auto: none")
    assert [step["step"] for step in lossy["drift"]] == list(range(6))
    assert lossy["drift"][0] == {"step": 0, "change": None, "stable_fraction": 0.0}
    assert max(step["stable_fraction"] for step in lossy["drift"]) > 0
    assert sum(lossy["bytes"].values()) < sum(lossy["bytes_exact"].values())


def test_every_input_and_mask_has_files_of_its_own(restore: Restore, tmp_path: Path) -> None:
    """`scan` under `left_block` and `scan_left` under `block` would both be scan_left_block."""
    for seed, name in enumerate(("scan", "scan_left")):
        tifffile.imwrite(tmp_path / f"{name}.tif", noise((2, 64, 64), np.uint16, seed), photometric="minisblack")
    tifffile.imwrite(tmp_path / "left_block.tif", hole_of((64, 64)))
    inputs = ("--input", tmp_path / "scan.tif", "--input", tmp_path / "scan_left.tif")
    out = restore(*inputs, "--mask", tmp_path / "left_block.tif", "block", "--no-exact")
    found = {path.name: path for path in (out / "images").iterdir()}
    stems = ["scan_block", "scan_left_block", "scan_left_block-2", "scan_left_left_block"]
    made = ["scan_block_mask.tif", "scan_left_block-2_mask.tif"]
    assert sorted(name for name in found if name.endswith(".tif")) == sorted([*(f"{s}_tapa.tif" for s in stems), *made])
    assert sum(name.endswith(".png") for name in found) == 8
    for stem, name in (("scan_left_block", "scan"), ("scan_left_block-2", "scan_left")):
        restored, given = tifffile.imread(found[f"{stem}_tapa.tif"]), tifffile.imread(tmp_path / f"{name}.tif")
        outside = restored == given
        assert outside.mean() > 0.7 and not outside.all()
    assert len(json.loads((out / "metrics.json").read_text())["images"]) == 8


def test_names_of_files_stay_and_fit() -> None:
    plain = [("scan", "block"), ("scan", "center"), ("a" * 100, "b" * 100)]
    assert [(files.stack, files.mask) for files in file_names(plain)] == plain
    long = "Schädel" * 14, "Größe" * 20
    names = file_names([long, (long[0], f"{long[1]}2"), ("A", "b_c"), ("a_B", "C")])
    results = [files.result("cocodiff+") for files in names]
    assert len({name.lower() for name in results}) == 4 and results[2] == "A_b_c_cocodiff+.tif"
    assert max(len(files.preview("[99999]", "cocodiff+").encode()) for files in names) <= 255
