"""How large the report's pictures may be, so that the page of any stack opens at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cocodiff_eval.report.pictures import shown_slices

PICTURE_BYTES = 19_000_000  # of all pictures; in base64, and with the numbers, the page stays under 30 MB
SIDES = (512, 384, 320, 256, 224, 192, 160)  # pixels on the longer side
USUAL = 0.09  # bytes a pixel of a compressed picture of a noisy slice
SMALLEST = 0.05  # the same of one that still shows its slice
MASKED = 0.3  # share of a slice that is taken to be masked: only that part of a restored slice is stored
WORST = 48  # slices of a stack whose pictures are shown although they are not in the sample


@dataclass(frozen=True)
class PicturePlan:
    """side: of pictures, in pixels. share: bytes of all pictures of a slice with masked voxels. unmasked_share: of one
    without. shown: for each task the slices that have pictures. worst: so many of the slices that were restored worst
    have pictures as well, 0 where all have."""

    side: int
    share: int
    unmasked_share: int
    shown: tuple[frozenset[int], ...]
    worst: int


def plan_pictures(masked: Sequence[Sequence[bool]], modes: int) -> PicturePlan:
    """For tasks whose slices have masked voxels or not, each restored in so many modes (biharmonic and maps of the
    spread included). Depends on nothing but these numbers."""
    frames = 1 + 2 * modes * MASKED  # pictures of a slice, in whole ones: the original, restored ones and their errors
    hidden = sum(map(sum, masked))
    whole = hidden + (sum(map(len, masked)) - hidden) / frames
    smallest = SIDES[-1] ** 2 * frames * SMALLEST
    if whole * smallest <= PICTURE_BYTES:
        share, worst = PICTURE_BYTES / max(1.0, whole), 0
        shown = [frozenset(range(len(of_task))) for of_task in masked]
    else:
        share, worst = smallest, WORST
        limit = max(len(masked), int(PICTURE_BYTES / smallest) - WORST * len(masked))
        shown = [frozenset(shown_slices(of_task, max(1, limit * sum(of_task) // hidden))) for of_task in masked]
    side = next((side for side in SIDES if side**2 * frames * USUAL <= share), SIDES[-1])
    return PicturePlan(side, int(share), int(share / frames), tuple(shown), worst)


def worst_slices(psnr_db: dict[int, list[float]], shown: frozenset[int], count: int) -> list[int]:
    """The slices with the lowest PSNR in any mode that are not among those shown. psnr_db: of slices, in each mode."""
    found = sorted((min(values), index) for index, values in psnr_db.items() if values and index not in shown)
    return sorted(index for _, index in found[:count])
