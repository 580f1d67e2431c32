"""The demo model's latent space: a lapped orthogonal transform with the interface of diffusers' `AutoencoderKL`.

Nothing here is trained. Along each axis the image is cut into blocks of 8 pixels. An orthogonal rotation across every
block border, then an orthonormal DCT in every block, give basis functions 16 pixels long that fade out inside the
neighbouring block (Malvar's lapped orthogonal transform in its pre-filter form: Tran, Liang and Tu, 2003). So an error
in one latent does not end in a visible edge, as it does with a plain block DCT. Of the 8 x 8 coefficients of a block
the 4 x 4 lowest are kept: 16 latent channels at an eighth of the resolution, as in SD3.

Inpainting pipelines set hidden pixels to exactly 0 before they encode. Encoding treats such pixels as unknown and
continues the image smoothly into them (`fill_holes`). So the transformer starts from a classical restoration and learns
what that lacks.
"""

from functools import lru_cache
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, IdentityDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor
from torch.nn import functional

ITERATIONS = 20  # iterations of the fill at each scale
BLOCK = 8  # pixels of a block's side
KEPT = 4  # frequencies of a block that are kept along each axis
OVERLAP_ANGLES = (0.1333, 0.2355, 0.2884, 0.1022, 0.1552, 0.0529)
"""The rotation across block borders, as the 6 entries of a 4 x 4 skew-symmetric matrix's upper triangle. It is the
smallest one that turns a step between two blocks into half a sine wave from the middle of one to the middle of the
other: wrong means of neighbouring blocks, most of a model's error in a deep hole, then blend without an edge. The kept
coefficients hold slices to 36.8 dB; the transform that holds them best, to 38.7 dB, shows its blocks."""
# Standard deviation to the power -0.6 of each coefficient (row frequency, then column) over training slices, made
# symmetric.
CHANNEL_SCALE = (
    *(0.468, 1.108, 2.422, 3.161),
    *(1.108, 1.707, 3.185, 4.575),
    *(2.422, 3.185, 4.692, 6.116),
    *(3.161, 4.575, 6.116, 7.082),
)


@lru_cache(maxsize=16)
def lapped_matrix(size: int, kept: int = BLOCK, angles: tuple[float, ...] = OVERLAP_ANGLES) -> Tensor:
    """Return the matrix that transforms one axis of an image: float32 [size / 8 * kept, size].

    Its rows are orthonormal and ordered by block, then frequency. With `kept=8` it is square and orthogonal. The first
    and last 4 pixels of the image have no block to overlap with and go into the DCT unchanged, so constant images stay
    in the first coefficient up to the border. Raise ValueError if `size` is not a positive multiple of 8.

    Args:
        size: pixels of the axis.
        kept: number of frequencies of each block of 8 pixels.
        angles: the rotation across block borders, see OVERLAP_ANGLES.
    """
    if size < BLOCK or size % BLOCK:
        raise ValueError(f"{size} pixels on a side: must be a positive multiple of {BLOCK}")
    blocks = size // BLOCK
    half = BLOCK // 2
    position = torch.arange(BLOCK, dtype=torch.float64)
    dct = torch.cos(torch.pi / BLOCK * position[:, None] * (position + 0.5)) * (2 / BLOCK) ** 0.5
    dct[0] /= 2**0.5
    skew = torch.zeros(half, half, dtype=torch.float64)
    skew[tuple(torch.triu_indices(half, half, 1))] = torch.tensor(angles, dtype=torch.float64)
    eye = torch.eye(half, dtype=torch.float64)
    butterfly = torch.cat([torch.cat([eye, eye.flip(0)], 1), torch.cat([eye.flip(0), -eye], 1)]) / 2**0.5
    # Only the part that is odd about the border is rotated: a constant passes unchanged.
    border = butterfly @ torch.block_diag(eye, torch.linalg.matrix_exp(skew - skew.T)) @ butterfly
    overlap = torch.block_diag(eye, *[border] * (blocks - 1), eye)
    return (torch.block_diag(*[dct[:kept]] * blocks) @ overlap).float()


class LappedTransformVAE(ModelMixin, ConfigMixin):
    """A transform of images [B, 3, 8h, 8w] in [-1, 1] to latents [B, 16, h, w] and back.

    Encoding takes the mean of the three channels, decoding repeats the grey result in each. Latents are coefficients
    times `channel_scale`, which brings their standard deviations closer to each other and to the noise's.
    """

    @register_to_config
    def __init__(
        self,
        latent_channels: int = KEPT * KEPT,
        block_out_channels: tuple[int, ...] = (1, 1, 1, 1),
        scaling_factor: float = 1.0,
        shift_factor: float = 0.0,
        channel_scale: tuple[float, ...] = CHANNEL_SCALE,
        overlap_angles: tuple[float, ...] = OVERLAP_ANGLES,
    ) -> None:
        super().__init__()
        if latent_channels != KEPT * KEPT or len(channel_scale) != latent_channels:
            raise ValueError(
                f"{latent_channels} latent channels, {len(channel_scale)} scales: both must be {KEPT * KEPT}"
            )
        # There are no parameters: this buffer only tells pipelines the module's device and dtype.
        self.register_buffer("placement", torch.zeros(1), persistent=False)

    def _scale_C11(self, device: torch.device) -> Tensor:
        return torch.tensor(tuple(self.config.channel_scale), device=device)[:, None, None]

    def _matrix(self, size: int, device: torch.device) -> Tensor:
        return lapped_matrix(size, KEPT, tuple(self.config.overlap_angles)).to(device)

    def transform(self, grey_BHW: Tensor) -> Tensor:
        """Return the scaled latents [B, 16, h, w] of grey images, float32 [B, 8h, 8w]."""
        batch, height, width = grey_BHW.shape
        rows, columns = self._matrix(height, grey_BHW.device), self._matrix(width, grey_BHW.device)
        kept_BHW = rows @ grey_BHW @ columns.T
        split = kept_BHW.view(batch, height // BLOCK, KEPT, width // BLOCK, KEPT).permute(0, 2, 4, 1, 3)
        return split.reshape(batch, KEPT * KEPT, height // BLOCK, width // BLOCK) * self._scale_C11(grey_BHW.device)

    def inverse(self, latents_BCHW: Tensor) -> Tensor:
        """Return the grey images [B, 8h, 8w] of scaled latents, float32 [B, 16, h, w]."""
        batch, _, high, wide = latents_BCHW.shape
        rows, columns = self._matrix(high * BLOCK, latents_BCHW.device), self._matrix(wide * BLOCK, latents_BCHW.device)
        split = (latents_BCHW / self._scale_C11(latents_BCHW.device)).view(batch, KEPT, KEPT, high, wide)
        kept_BHW = split.permute(0, 3, 1, 4, 2).reshape(batch, high * KEPT, wide * KEPT)
        return rows.T @ kept_BHW @ columns

    def encode(self, x: Tensor, return_dict: bool = True) -> Any:
        """Return a one-point distribution of latents [B, 16, H/8, W/8] for images [B, 3, H, W] (H, W multiples of 8).

        Pixels that are exactly 0 are treated as hidden and filled from their surroundings; an image of zeros stays
        zero.
        """
        grey_BHW = x.float().mean(1)
        known_BHW = grey_BHW != 0
        if not known_BHW.all():
            grey_BHW = fill_holes(grey_BHW, known_BHW)
        latents = IdentityDistribution(self.transform(grey_BHW).to(x.dtype))
        return AutoencoderKLOutput(latent_dist=latents) if return_dict else (latents,)

    def decode(self, z: Tensor, return_dict: bool = True, generator: torch.Generator | None = None) -> Any:
        """Return the images [B, 3, 8h, 8w] of latents [B, 16, h, w], with three equal channels."""
        image_B3HW = self.inverse(z.float()).to(z.dtype)[:, None].repeat(1, 3, 1, 1)
        return DecoderOutput(sample=image_B3HW) if return_dict else (image_B3HW,)


def fill_holes(image_BHW: Tensor, known_BHW: Tensor) -> Tensor:
    """Return images, float32 [B, H, W], in which unknown pixels continue the known ones smoothly (a biharmonic
    continuation).

    It goes from coarse to fine. At every scale, from a few pixels up, the hole starts from the coarser solution. At
    most `ITERATIONS` steps of conjugate gradients then reduce the sum of squared Laplacians. An image with nothing
    known becomes 0.

    Args:
        image_BHW: float32 images.
        known_BHW: bool, False at the pixels to fill.
    """
    height, width = image_BHW.shape[1:]
    image_BHW = image_BHW * known_BHW
    if max(height, width) <= 3:
        share = known_BHW.float().mean((1, 2), keepdim=True).clamp_min(1e-6)
        return torch.where(known_BHW, image_BHW, image_BHW.mean((1, 2), keepdim=True) / share)
    odd = (0, width % 2, 0, height % 2)
    share = functional.avg_pool2d(functional.pad(known_BHW.float(), odd)[:, None], 2)[:, 0]
    total = functional.avg_pool2d(functional.pad(image_BHW, odd)[:, None], 2)[:, 0]
    coarse = fill_holes(total / share.clamp_min(0.25), share > 0)
    start = functional.interpolate(coarse[:, None], scale_factor=2, mode="bilinear", align_corners=False)
    return _relax(torch.where(known_BHW, image_BHW, start[:, 0, :height, :width]), (~known_BHW).float())


def _relax(image_BHW: Tensor, hole_BHW: Tensor) -> Tensor:
    """Return images whose hole was made smoother, by ITERATIONS steps of conjugate gradients for each image separately.

    The sum of squared Laplacians is reduced.

    Args:
        image_BHW: the images, with a first guess in the hole.
        hole_BHW: 1 at pixels that may change, 0 at others.
    """
    residual = -hole_BHW * _laplacian(_laplacian(image_BHW))
    direction, size = residual, (residual * residual).sum((1, 2), keepdim=True)
    for _ in range(ITERATIONS):
        image_of = hole_BHW * _laplacian(_laplacian(direction))
        length = size / (direction * image_of).sum((1, 2), keepdim=True).clamp_min(1e-20)
        image_BHW = image_BHW + length * direction
        residual = residual - length * image_of
        size, previous = (residual * residual).sum((1, 2), keepdim=True), size
        direction = residual + size / previous.clamp_min(1e-20) * direction
    return image_BHW


def _laplacian(image_BHW: Tensor) -> Tensor:
    """Return, for each pixel, the sum of its four neighbours' differences to it. Beyond its border an image continues
    with its edge values."""
    rows, columns = image_BHW.diff(dim=1), image_BHW.diff(dim=2)
    sum_BHW = functional.pad(rows, (0, 0, 0, 1))
    sum_BHW[:, 1:] -= rows
    sum_BHW[:, :, :-1] += columns
    sum_BHW[:, :, 1:] -= columns
    return sum_BHW
