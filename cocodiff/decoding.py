"""Decoding latents on one rank: the others neither spend the time nor need the memory, they are sent the image."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cocodiff.comm.transport import Transport


class OneRankVAE:
    """Stands in for a pipeline's VAE on every rank. Everything but `decode` is the VAE's own: encoding draws from the
    pipeline's random generators, so every rank does it."""

    def __init__(self, vae: Any, transport: Transport) -> None:
        self._vae, self._transport = vae, transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._vae, name)

    def decode(self, z: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """As the VAE's own. Every rank calls it and gets rank 0's image, on its own device."""
        from diffusers.models.autoencoders.vae import DecoderOutput

        image = None
        if self._transport.rank == 0:
            image = self._vae.decode(z, return_dict=False, **options)[0].cpu()
        image = self._transport.broadcast_object(image).to(z.device)
        return DecoderOutput(sample=image) if return_dict else (image,)
