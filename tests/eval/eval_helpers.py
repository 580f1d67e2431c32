"""A synthetic slice, a stand-in for a model, and the figures of a run in which there is something of everything."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from cocodiff_eval.quality.metrics import Result, metrics_document
from cocodiff_eval.restore.restore import restore_slices
from cocodiff_eval.restore.tiling import RestorationPlan
from torch import Tensor


def phantom(rows: int, columns: int) -> np.ndarray:
    """A disc with an inclusion and a gradient, float64 in [0, 1]."""
    y, x = np.mgrid[0:rows, 0:columns]
    radius = np.hypot((y - rows / 2) / rows, (x - columns / 2) / columns)
    inner = np.hypot((y - rows / 2.5) / rows, (x - columns / 1.8) / columns)
    return np.where(radius < 0.4, 0.6, 0.1) + np.where(inner < 0.1, 0.3, 0.0) + 0.1 * x / columns


def marked(shape: tuple[int, ...], *places: Any) -> np.ndarray:
    """A mask of a shape, True in some places."""
    mask = np.zeros(shape, bool)
    for place in places:
        mask[place] = True
    return mask


def slices_of(part: list[Any]) -> tuple[Any, ...]:
    """Return the part of an array that a case names by a number or the ends of a slice for each axis."""
    return tuple(slice(*one) if isinstance(one, list) else one for one in part)


def restore_slice(image_YX: np.ndarray, mask_YX: np.ndarray, inpainter: Any, **more: Any) -> np.ndarray:
    """A slice by itself."""
    return restore_slices([image_YX], [mask_YX], inpainter, **more)[0]


def calls_of(plan: RestorationPlan) -> int:
    """How often a plan calls the model."""
    return sum(len(one.batches) for level in plan.levels for one in level.passes)


def row_of(
    name: str, mask: str, mode: str, quality: Mapping[str, Any], seconds: float, sent: Mapping[str, int], **more: Any
) -> dict[str, Any]:
    """A row of metrics.json. more: further fields of `Result`."""
    return Result(name, mask, mode, **quality, seconds=seconds, bytes=sent, **more).row()


CASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
QUALITY, NOTHING, BASELINE, SAMPLES = (CASES[name] for name in ("quality", "nothing", "baseline", "samples"))
RICH_SLICES = {"scan": range(20, 26), "stack": range(15)}


def step_of(number: int, sent: float, exposed: float, coded: float, sets: dict[str, float]) -> dict[str, Any]:
    """A step of a lossy run. sets: how many of the calls displaced which tensors."""
    late = sum(len(names) * share for names, share in sets.items()) / 4
    of_calls = {"coded_fraction": coded, "displaced_fraction": late, "displaced_sets": sets}
    return {"step": number, **of_calls, "sent_fraction": sent, "exposed_fraction": exposed}


def rich_run() -> dict[str, Any]:
    """The document of a run on 4 ranks, by whose numbers each row can be told from the others: two slices by themselves
    in two presets; a stack of 13 of 15 slices on replicas, several samples each, coded and displaced, of which every
    tenth was compared with an exact run, and on whose last one two replicas worked; two slices, 21 and 22 of 20 to 25,
    whose original is unknown and of which 24 is masked wholly; and a generated image."""
    rows = []
    for name, rise in (("a", 0.0), ("a very long name of a <scan>, 2024-05-17", 2.0)):
        judged = QUALITY | {"psnr_db": 21.53 + rise}
        rows += [
            row_of(name, "block", "flat", judged, 12.34 + rise, {"plane": 5 * 2**20, "node": 5}, baseline=BASELINE),
            row_of(name, "block", "cocodiff", QUALITY, 7.89, {"node": 77}, psnr_vs_exact_db=39.8, baseline=BASELINE),
        ]
    first = step_of(0, 1.0, 1.0, 0.0, {"": 1.0})
    seconds = (step_of(1, 0.2, 0.2, 1.0, {"": 1.0}), step_of(1, 0.2, 0.1, 1.0, {"": 0.5, "qkvo": 0.5}))
    for n in range(13):
        more: dict[str, Any] = {
            "psnr_vs_exact_db": 40.0 if n == 0 else None,
            "exact_compared": n % 10 == 0,
            "bytes_whole": {"plane": 100},
            "bytes_late": {"plane": 5 * (n % 2)},
            "rank_seconds": 3.0,
            "replica_seconds": {str(n % 3): 1.5} if n < 12 else {"1": 1.0, "2": 2.0},
            "baseline": BASELINE,
            "frc": [1.0, 0.5 + n / 100, None, *[0.0] * 29],
            "resolution": None if n == 12 else 4.0 + n,
            "drift": [first, seconds[n % 2]],
        }
        more |= SAMPLES | {"coverage_90": 0.81 - n / 100}
        rows += [row_of(f"stack[{n}]", "block", "ahead", QUALITY | {"psnr_db": 20.0 + n}, 1.5, {"plane": 60}, **more)]
    for n in (21, 22):
        rows.append(row_of(f"scan[{n}]", "holes", "flat", NOTHING, 2.0, {}, exact_compared=False, rank_seconds=7.25))
    rows.append(row_of("drawn", None, "flat", NOTHING, 3.0, {"sibling": 1536}))
    return metrics_document({"steps": 20}, 4, rows) | CASES["of inputs"]


class SmoothInpainter:
    """A model without weights: smooth surface plus keyed noise where hidden. Remembers what it was shown."""

    frames, thin = 1, False

    def __init__(self, native_size: int = 32, multiple: int = 8) -> None:
        self.native_size = native_size
        self.multiple = multiple
        self.calls: list[tuple[int, float, tuple[int, ...]]] = []
        self.shown: list[bytes] = []

    def __call__(self, images_BHW: Tensor, masks_BHW: Tensor, strength: float, noise_keys: Sequence[int]) -> Tensor:
        assert images_BHW.dtype == masks_BHW.dtype == torch.float32
        assert images_BHW.shape == masks_BHW.shape == (len(noise_keys), self.native_size, self.native_size)
        assert float(images_BHW.min()) >= 0 and float(images_BHW.max()) <= 1
        self.calls.append((len(noise_keys), strength, tuple(noise_keys)))
        self.shown.append(images_BHW.numpy().tobytes() + masks_BHW.numpy().tobytes())
        keyed = [torch.Generator().manual_seed(key + 1) for key in noise_keys]
        noise = torch.stack([torch.rand(images_BHW.shape[1:], generator=one) - 0.5 for one in keyed])
        return (images_BHW + 0.2 * strength * noise * masks_BHW).clamp(0, 1)
