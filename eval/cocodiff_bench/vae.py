"""The real AutoencoderKL with random weights, for `cocodiff bench memory --model vae`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cocodiff.decoding import shared_vae
from cocodiff.loading.model_shapes import load_shape
from cocodiff.loading.pipelines import torch_dtype
from cocodiff.planning.memory import LIBRARIES, RankMemory
from cocodiff.planning.peaks import size_peaks
from cocodiff_bench.common import Values, topology_of

NAME = "sd3.5"  # whose VAE it is
CHANNELS, FACTOR = 16, 8
SETTINGS: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": CHANNELS,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}


def decoding(values: Values, transport: Any) -> tuple[Callable[[], None], RankMemory]:
    """Decodes one image as the setting `vae` says; and the node's predicted memory."""
    import torch
    from diffusers import AutoencoderKL

    dtype, how = torch_dtype(values["dtype"]), values["vae"] or "one"
    torch.manual_seed(0)
    whole: Any = AutoencoderKL(**SETTINGS, sample_size=values["tile"]).to(dtype).eval()
    vae, side = shared_vae(whole, how, transport), values["size"] // FACTOR
    latents = torch.randn(values["batch"], CHANNELS, side, side, generator=torch.Generator().manual_seed(0)).to(dtype)

    def call() -> None:
        with torch.no_grad():
            vae.decode(latents)

    shape = load_shape(NAME)
    assert shape.vae is not None, "a shipped model names its family"
    shape = replace(shape, vae=replace(shape.vae, tile=values["tile"]))
    topology = topology_of(values, transport.size)
    peaks = size_peaks(shape, topology, values["size"], values["batch"], dtype.itemsize)
    assert peaks is not None, "its family tells of the VAE"
    peak, ranks = peaks.of_vae[how], transport.size
    return call, RankMemory(ranks * peaks.vae, peak.decoding * peak.decoders, libraries=ranks * LIBRARIES)
