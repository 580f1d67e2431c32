"""What a run takes of each rank's memory before and after its denoising steps, by text encoders and VAE.

Rank 0 of the run alone loads the text encoders, all at once, before the transformer is on its device; they are gone
before the first step (`jobs/pipelines.py`). Every rank holds the VAE's weights, and encodes the image that is to
be restored. Latents are decoded as the setting `vae` says, meanwhile the codec keeps its caches. Encoding and
decoding are estimates (`models.family.VaeSize`): attention in the VAE is taken to be fused, and activations of the
text encoders are left out as small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cocodiff.config.machine import Topology
from cocodiff.models.family import VaeSize, Video
from cocodiff.planner.memory import ModelShape, RankMemory
from cocodiff.topology.axes import cut

VAE_SETTINGS = ("one", "all", "tiled", "sharded")
CHANNELS = 3  # of an image
STRIDE = 0.75  # from where a tile begins to where the next one does, in tiles: diffusers' default


class VaePeak(NamedTuple):
    """Bytes of activations. encoding: of every rank, while it encodes the image to be restored. decoding: of a rank
    that decodes. decoders: the most ranks of one node that do so at the same time."""

    encoding: int
    decoding: int
    decoders: int


@dataclass(frozen=True)
class Peaks:
    """encoders: bytes of rank 0's text encoders. vae: bytes of the VAE's weights. of_vae: by its setting."""

    encoders: int
    vae: int
    of_vae: Mapping[str, VaePeak]

    def of_rank(self, step: RankMemory, vae: str) -> dict[str, int]:
        """All that a rank holds, by what the run does: of the fullest one. step: what it holds in a denoising step."""
        kept, peak = step.weights + step.library + self.vae, self.of_vae[vae]
        return {
            "text encoding": self.encoders + step.library,
            "image encoding": kept + peak.encoding,
            "denoising": step.total + self.vae,
            "decoding": kept + step.cache + peak.decoding,
        }

    def fullest(self, step: RankMemory, vae: str) -> tuple[str, int]:
        """What the run does when a rank holds most, and how much that is."""
        return max(self.of_rank(step, vae).items(), key=lambda moment: moment[1])


def size_peaks(
    shape: ModelShape, topology: Topology, video: Video, images: int, itemsize: int, replicas: int = 1
) -> Peaks | None:
    """The peaks around a run. None where the model's VAE is not known. video: what is made, or an image; in tiles there
    are images alone. images: of one call. replicas: sets of ranks, all of which decode at the same time. Raises
    UserError where so many replicas do not divide the ranks."""
    vae = shape.vae
    if vae is None:
        return None
    sets = cut(topology, tuple(range(topology.size)), replicas, "replicas")
    tiles = math.prod(len(tile_sides(side, vae.tile)) for side in (video.height, video.width))
    longer = max(video.height, video.width)
    most = {"one": 1, "all": topology.size, "tiled": tiles, "sharded": math.ceil(longer / vae.factor)}

    def peak(how: str) -> VaePeak:
        decoders = [topology.places[rank].node for ranks in sets for rank in ranks[: most[how]]]
        encoding, decoding = _activations(vae, video, how, len(sets[0]))
        unit = images * itemsize
        return VaePeak(encoding * unit, decoding * unit, max(decoders.count(node) for node in range(topology.nodes)))

    settings = [how for how in VAE_SETTINGS if how != "tiled" or video.frames == 1]
    return Peaks(shape.encoders * itemsize, vae.parameters * itemsize, {how: peak(how) for how in settings})


def _activations(vae: VaeSize, video: Video, how: str, ranks: int) -> tuple[int, int]:
    """Numbers of one image or video at the peaks of encoding and decoding it. ranks: that share it."""
    if how == "sharded" and ranks > 1:
        return _of_band(vae, video, ranks)
    pixels = video.height * video.width
    if video.frames > 1:
        decoding, encoding = (numbers + CHANNELS * video.frames for numbers in vae.video)
        return encoding * pixels, decoding * pixels
    if how != "tiled":
        return vae.encoding * pixels, vae.decoding * pixels
    rows, columns = (tile_sides(side, vae.tile) for side in (video.height, video.width))
    tile, own = rows[0] * columns[0], math.ceil(len(rows) * len(columns) / ranks)
    decoded, own = CHANNELS * sum(rows) * sum(columns), CHANNELS * tile * own
    # A rank's last tile, beside those that it has decoded; or all tiles, and its own twice more or the image.
    blending = decoded + max(2 * own, CHANNELS * pixels)
    return vae.encoding * tile, max(vae.decoding * tile + own, blending)


def _of_band(vae: VaeSize, video: Video, ranks: int) -> tuple[int, int]:
    """Numbers of one image or video at the peaks of encoding and decoding the largest of so many bands, with a row of
    each neighbour; or of what is gathered, as it comes and put together: keys and values of all, and the image."""
    shorter, longer = sorted((video.height, video.width))
    latent = math.ceil(longer / vae.factor)
    rows = math.ceil(latent / ranks) * vae.factor
    attended = 4 * vae.attention * latent * math.ceil(shorter / vae.factor)
    of_video, each = CHANNELS * video.frames * shorter, vae.band if video.frames == 1 else vae.video
    kept = of_video * rows if video.frames > 1 else 0
    decoding, encoding = (max(numbers * shorter * min(longer, rows + 2) + kept, attended) for numbers in each)
    return encoding, max(decoding, of_video * (2 * longer + rows))


def tile_sides(side: int, tile: int) -> list[int]:
    """Pixels of the tiles along one side of an image."""
    starts = range(0, side, int(tile * STRIDE)) if side > tile else range(1)
    return [min(tile, side - start) for start in starts]
