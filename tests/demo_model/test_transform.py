"""The lapped transform: orthonormal, reversible, overlapping, and usable where AutoencoderKL is."""

import pytest
import torch
from torch.nn import functional

from cocodiff.demo_model.vae import CHANNEL_SCALE, LappedTransformVAE, fill_holes, lapped_matrix


@pytest.mark.parametrize("size", [8, 16, 96, 200])
def test_full_transform_is_orthogonal(size: int) -> None:
    matrix = lapped_matrix(size)
    assert matrix.shape == (size, size)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size), atol=1e-6, rtol=0)


def test_constant_image_needs_one_coefficient_per_block() -> None:
    coefficients = (lapped_matrix(48) @ torch.ones(48)).view(6, 8)
    torch.testing.assert_close(coefficients[:, 0], torch.full((6,), 8**0.5))
    assert coefficients[:, 1:].abs().max() < 1e-6


@pytest.mark.parametrize("size", [0, 12, 4])
def test_size_must_be_a_multiple_of_8(size: int) -> None:
    with pytest.raises(ValueError, match=f"{size} pixels"):
        lapped_matrix(size)


def test_decoding_keeps_latents() -> None:
    vae = LappedTransformVAE()
    latents_BCHW = torch.randn(2, 16, 5, 12)
    image_B3HW = vae.decode(latents_BCHW, return_dict=False)[0]
    assert image_B3HW.shape == (2, 3, 40, 96)
    torch.testing.assert_close(vae.encode(image_B3HW).latent_dist.sample(), latents_BCHW, atol=2e-5, rtol=1e-4)


def test_a_vae_has_the_scales_and_angles_that_it_is_given() -> None:
    """Without rotation the first coefficient of a block is eight times its mean."""
    image_BHW, scale = torch.rand(2, 24, 40), tuple(float(1 + number) for number in range(16))
    vae = LappedTransformVAE(channel_scale=scale, overlap_angles=(0.0,) * 6)
    latents_BCHW = vae.transform(image_BHW)
    torch.testing.assert_close(latents_BCHW[:, 0], 8 * functional.avg_pool2d(image_BHW, 8))
    usual = vae.inverse(latents_BCHW), LappedTransformVAE(overlap_angles=(0.0,) * 6).transform(image_BHW)
    torch.testing.assert_close(vae.transform(usual[0]), latents_BCHW)
    of_channels = torch.tensor(scale) / torch.tensor(CHANNEL_SCALE)
    torch.testing.assert_close(latents_BCHW, usual[1] * of_channels[:, None, None])


def test_grey_is_the_mean_of_the_channels() -> None:
    vae = LappedTransformVAE()
    image_B3HW = torch.rand(1, 3, 16, 16)
    grey_B3HW = image_B3HW.mean(1, keepdim=True).repeat(1, 3, 1, 1)
    torch.testing.assert_close(vae.encode(image_B3HW).latent_dist.mode(), vae.encode(grey_B3HW).latent_dist.mode())


def test_hidden_pixels_are_continued_from_around_them() -> None:
    vae = LappedTransformVAE()
    ramp_B1HW = torch.linspace(0.1, 0.9, 64).expand(1, 1, 64, 64).contiguous()
    hidden_B1HW = ramp_B1HW.clone()
    hidden_B1HW[..., 20:45, 20:45] = 0
    expected, found = (vae.encode(x).latent_dist.mode() for x in (ramp_B1HW, hidden_B1HW))
    # A ramp is its own thin plate; what remains is how far the relaxation was carried.
    assert (vae.inverse(found) - vae.inverse(expected)).abs().max() < 0.05
    assert vae.encode(torch.zeros(1, 3, 16, 16)).latent_dist.mode().abs().max() == 0


@pytest.mark.parametrize(("height", "width"), [(96, 96), (40, 72), (8, 24)])
def test_fill_keeps_known_pixels(height: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    image_BHW = torch.rand(3, height, width, generator=generator) - 0.3
    known_BHW = torch.rand(3, 1, width, generator=generator).expand(3, height, width) > 0.6
    filled_BHW = fill_holes(image_BHW, known_BHW)
    assert torch.equal(filled_BHW[known_BHW], image_BHW[known_BHW])
    assert filled_BHW.abs().max() < 3 * image_BHW[known_BHW].abs().max()


def test_bfloat16_in_and_out() -> None:
    vae = LappedTransformVAE()
    image_B3HW = torch.rand(1, 3, 32, 32)
    latents_BCHW = vae.encode(image_B3HW.bfloat16()).latent_dist.mode()
    assert latents_BCHW.dtype == torch.bfloat16
    exact_BCHW = vae.encode(image_B3HW).latent_dist.mode()
    # Rounding image and latents to 8 bits of mantissa: 2^-8 of the largest coefficient each.
    assert (latents_BCHW - exact_BCHW).abs().max() <= 2 * 2**-8 * exact_BCHW.abs().max()
    assert vae.decode(latents_BCHW).sample.dtype == torch.bfloat16
