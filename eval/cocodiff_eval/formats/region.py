"""Regions of a volume: what `--slices` and `--roi` say, and what belongs to a region in other files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cocodiff.errors import UserError
from cocodiff_eval.formats.volume import RawVolume, Region, format_shape

_RANGE = re.compile(r"^\s*(\d{0,9})\s*:\s*(\d{0,9})\s*$")


@dataclass(frozen=True)
class Part:
    """A part of every input, as the user wrote it. slices: `100:200`; roi: `y0:y1,x0:x1`. Ends are not included, and
    may be left away; "" is all."""

    slices: str = ""
    roi: str = ""

    def of(self, volume: RawVolume) -> RawVolume:
        """That part of a volume. Raises UserError for words that name none, and for a part outside it."""
        if not self.slices and not self.roi:
            return volume
        rows, comma, columns = (self.roi or ":,:").partition(",")
        if not comma:
            raise UserError(f"--roi {self.roi!r}: give rows and columns as y0:y1,x0:x1, such as 0:512,128:640")
        words = (("slices", self.slices or ":"), ("roi", rows), ("roi", columns))
        ends = [_ends(option, word, side, volume) for (option, word), side in zip(words, volume.shape, strict=True)]
        start, stop = zip(*ends, strict=True)
        return volume.cropped(Region((start[0], start[1], start[2]), (stop[0], stop[1], stop[2])))


def _ends(option: str, word: str, side: int, volume: RawVolume) -> tuple[int, int]:
    match = _RANGE.match(word)
    if match is None:
        form = "100:200" if option == "slices" else "y0:y1,x0:x1"
        raise UserError(f"--{option} {word!r}: not a range; give {form}, from the first to before the second")
    start, stop = int(match[1] or 0), int(match[2] or side)
    if not start < stop <= side:
        raise UserError(
            f"--{option} {word}: not within {volume.path}, which has {format_shape(volume.shape)} voxels; give a start "
            f"below the end, and an end of at most {side}"
        )
    return start, stop


def matched(volume: RawVolume, of: RawVolume) -> RawVolume:
    """What of a mask or a truth belongs to a region: of one with the shape of the whole volume that part, of any other
    all. of: the input, or a region of it."""
    if of.region is None or of.whole is None:
        return volume
    fits = volume.shape[1:] == of.whole[1:] and (volume.ndim == 2 or volume.shape == of.whole)
    if not fits:
        return volume
    region = of.region
    if volume.ndim == 2:
        region = Region((0, *region.start[1:]), (1, *region.stop[1:]))
    return volume.cropped(region)
