"""Names of inputs, and previews of slices."""

from pathlib import Path

import numpy as np
from cocodiff_eval.data.slices import open_stacks, safe_stem, save_preview_png, to_grey8
from file_kinds import voxels, write_png
from PIL import Image


def test_names_are_unique_and_safe(tmp_path: Path) -> None:
    paths = []
    for name in ("a/scan 1.png", "b/scan 1.png", "c/Scan 1.png", "c/..x;rm.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        paths.append(write_png(tmp_path, voxels((16, 16), "uint8"), name=name))
    assert [stack.name for stack in open_stacks(paths)] == ["scan_1", "scan_1-2", "Scan_1-3", "x_rm"]
    assert [safe_stem(name) for name in ("///", "Schädel-7")] == ["slice", "Schädel-7"]


def test_preview(tmp_path: Path) -> None:
    image_YX = np.linspace(-5, 5, 256).reshape(16, 16)
    image_YX[0, :3] = np.nan, np.inf, -np.inf
    save_preview_png(tmp_path / "p.png", image_YX, -5, 5)
    preview_YX = np.asarray(Image.open(tmp_path / "p.png"))
    assert preview_YX[0, :3].tolist() == [0, 255, 0] and preview_YX[-1, -1] == 255
    assert not to_grey8(np.full((4, 4), 7), 7, 7).any()
