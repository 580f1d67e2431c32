"""Decoding latents into images, on one rank, or in tiles or bands on all: a pipeline's VAE in a `with` block."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff.comm.transport import Part, Transport
from cocodiff.errors import UserError
from cocodiff.replacing import replace


def share_vae(vae: Any, how: str, transport: Transport) -> Iterator[Callable[[], object]]:
    """Puts the calls that the setting `vae` asks for in the place of a VAE's own; gives what takes each off.

    Raises UserError for `tiled` with a VAE that has no tiles, and for `sharded` with one that is not known in bands."""
    if how == "all" or (how == "one" and transport.size == 1):
        return
    shared = {"one": OneRankVAE, "tiled": TiledVAE, "sharded": ShardedVAE}[how](vae, transport)
    for name in ("encode", "decode"):
        if hasattr(shared, name):
            calls = [getattr(vae, name), getattr(shared, name)]
            yield calls.pop  # should others have kept what calls the last one
            yield replace(vae, name, lambda *args, _calls=calls, **kwargs: _calls[-1](*args, **kwargs))


class SharedVAE:
    def __init__(self, vae: Any, transport: Transport) -> None:
        self._vae, self._transport, self._decode = vae, transport, vae.decode

    def _copy(self, tiling: bool) -> Any:
        """The VAE as its class has it, with the same weights; tiling: its `use_tiling`."""
        vae: Any = object.__new__(type(self._vae))
        own = {name: value for name, value in vars(self._vae).items() if name not in ("encode", "decode")}
        vars(vae).update(own, use_tiling=tiling)
        return vae


class OneRankVAE(SharedVAE):
    """Rank 0 decodes: the others neither spend the time nor need the memory, they are sent the image. Encoding draws
    from the pipeline's random generators, so every rank does it."""

    def decode(self, z: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """As the VAE's own. Every rank calls it and gets rank 0's image, on its own device."""
        from diffusers.models.autoencoders.vae import DecoderOutput

        image = None
        if self._transport.rank == 0:
            image = self._decode(z, return_dict=False, **options)[0].cpu()
        image = self._transport.broadcast_object(image).to(z.device)
        return DecoderOutput(sample=image) if return_dict else (image,)


class TiledVAE(SharedVAE):
    """All ranks decode, each some of the tiles that the VAE cuts by itself once its `enable_tiling()` was called: the
    image is bit for bit that of one process with tiling.

    How an image is cut and how tiles are blended stays the VAE's own affair. Its `decode` runs twice, on copies that
    share its weights and have another decoder: first one that only notes its calls, then, when every rank has decoded
    its part of these calls and sent the results to all, one that returns these in order. An image no larger than a tile
    is one call, which rank 0 makes.

    Memory: a rank decodes one tile at a time, beside those that it has decoded. Then it holds all ranks' tiles (with
    overlaps of a quarter up to 1.8 images), and with them its own twice more while they are sent, or the image once
    they are blended. Encoding is tiled as well, but every rank does all of it.
    """

    def __init__(self, vae: Any, transport: Transport) -> None:
        """Raises UserError where the VAE has no tiles."""
        if not hasattr(vae, "use_tiling") or not isinstance(getattr(vae, "decoder", None), nn.Module):
            raise UserError(f"vae tiled: a {type(vae).__name__} does not decode in tiles; choose vae one or all")
        super().__init__(vae, transport)

    def encode(self, x: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """As the VAE's own with tiling. Every rank calls it, none waits for another."""
        return self._copy(tiling=True).encode(x, return_dict=return_dict, **options)

    def decode(self, z: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """As the VAE's own with tiling. Every rank calls it with the same latents and gets the same image.

        Raises UserError for latents of a video: its frames depend on each other."""
        if z.ndim == 5 and z.shape[2] > 1:
            raise UserError(f"vae tiled: {z.shape[2]} frames; only images are decoded in tiles: choose vae one or all")
        noting = _NotingDecoder(self._vae.decoder)
        self._decode_with(noting, z, **options)
        dealt = deal_tiles(noting.sizes, self._transport.size)
        of_ranks = tensors_of_all(
            [noting.calls[number]() for number in dealt[self._transport.rank]],
            self._transport,
            z,
            "the exchange of decoded tiles",
        )
        tiles = dict(zip(itertools.chain(*dealt), itertools.chain(*of_ranks), strict=True))
        decoder = _ReturningDecoder(self._vae.decoder, [tiles[number] for number in sorted(tiles)])
        return self._decode_with(decoder, z, return_dict=return_dict, **options)

    def _decode_with(self, decoder: nn.Module, z: Tensor, **options: Any) -> Any:
        vae = self._copy(tiling=True)
        vae._modules = {**vae._modules, "decoder": decoder}
        return vae.decode(z, **options)


class _NotingDecoder(nn.Module):
    """In a decoder's place: notes its calls, and returns tensors without numbers, which cost nothing to blend."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder  # some VAEs look at its layers
        self.calls: list[Callable[[], Tensor]] = []
        self.sizes: list[int] = []

    def forward(self, tile: Tensor, *more: Any, **options: Any) -> Tensor:
        self.calls.append(partial(self.decoder, tile, *more, **options))
        self.sizes.append(tile.numel())
        return torch.empty_like(tile, device="meta")


class _ReturningDecoder(nn.Module):
    """In a decoder's place: returns what it would decode, one tile a call."""

    def __init__(self, decoder: nn.Module, tiles: list[Tensor]) -> None:
        super().__init__()
        self.decoder, self._tiles = decoder, iter(tiles)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return next(self._tiles)


class ShardedVAE(SharedVAE):
    """All ranks decode, each a band of the picture along its longer side, and encode so: the same as one process up to
    rounding, since rows that layers need of other bands are sent (`bands.py`). A rank needs the memory of its band.

    There are no more bands than latent rows: ranks without one wait for the picture. A VAE's own tiles are left off.
    """

    def __init__(self, vae: Any, transport: Transport) -> None:
        """Raises UserError where the VAE has a layer that is not known in bands."""
        from cocodiff.bands import unknown_layer

        unknown = unknown_layer(vae)
        if unknown is not None:
            raise UserError(
                f"vae sharded: a {type(vae).__name__} is not known in bands: it has {unknown}; choose vae one or all"
            )
        super().__init__(vae, transport)

    def encode(self, x: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """As the VAE's own. Every rank calls it with the same image and gets the same distribution."""
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        from cocodiff.bands import halvings

        def parameters(vae: Any, band: Tensor) -> Tensor:
            return vae.encode(band, return_dict=False, **options)[0].parameters

        patch = getattr(self._vae.config, "patch_size", None)  # a whole number where the VAE itself cuts patches
        found = DiagonalGaussianDistribution(
            self._in_bands(parameters, x, 2 ** halvings(self._vae) * (patch if isinstance(patch, int) else 1))
        )
        return AutoencoderKLOutput(latent_dist=found) if return_dict else (found,)

    def decode(self, z: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """As the VAE's own. Every rank calls it with the same latents and gets the same image."""
        from diffusers.models.autoencoders.vae import DecoderOutput

        def sample(vae: Any, band: Tensor) -> Tensor:
            return vae.decode(band, return_dict=False, **options)[0]

        image = self._in_bands(sample, z, 1)
        return DecoderOutput(sample=image) if return_dict else (image,)

    @torch.no_grad()
    def _in_bands(self, call: Callable[[Any, Tensor], Tensor], x: Tensor, factor: int) -> Tensor:
        """What `call` makes of all bands of x. factor: rows of x for each latent row."""
        from cocodiff.bands import Bands

        transport, axis = self._transport, -2 if x.shape[-2] >= x.shape[-1] else -1
        latent_rows = x.shape[axis] // factor
        bands = max(1, min(transport.size, latent_rows))
        rows = [(latent_rows + band) // bands for band in range(bands)]
        own = []
        if transport.rank < bands:
            ends = [factor * end for end in itertools.accumulate(rows)][:-1]
            band = x.tensor_split(ends, axis)[transport.rank]
            with Bands(Part(transport, range(bands)), rows, axis) if bands > 1 else contextlib.nullcontext():
                own.append(call(self._copy(tiling=False), band))
        return torch.cat([*itertools.chain(*tensors_of_all(own, transport, x, "the exchange of decoded bands"))], axis)


def tensors_of_all(own: list[Tensor], transport: Transport, like: Tensor, at: str) -> list[list[Tensor]]:
    """Every rank's tensors, on every rank. own: this rank's, of one dtype on all ranks. like: on the device of these.
    at: the name of the exchange, should a rank not come to it."""
    gathered = transport.gather_object([(tensor.shape, tensor.dtype) for tensor in own])
    of_ranks = transport.broadcast_object(gathered)
    dtype = next(dtype for of_rank in of_ranks for _, dtype in of_rank)
    counts = [[math.prod(shape) for shape, _ in of_rank] for of_rank in of_ranks]

    def gathered_tensors(own: list[Tensor]) -> list[Tensor]:
        sent = torch.cat([tensor.flatten() for tensor in own] or [like.new_empty(0, dtype=dtype)])
        parts = [like.new_empty(sum(count), dtype=dtype) for count in counts]
        transport.world.all_gather(sent, parts).wait()
        return parts

    transport.arrive(at)
    parts = transport.control.submit(gathered_tensors, own).wait()
    return [
        [x.view(shape) for x, (shape, _) in zip(part.split(count), of_rank, strict=True)]
        for part, count, of_rank in zip(parts, counts, of_ranks, strict=True)
    ]


def deal_tiles(sizes: list[int], ranks: int) -> list[list[int]]:
    """Numbers of tiles for each rank: the largest first, each to the rank that has least to decode so far."""
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    load = [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        size, rank = heapq.heappop(load)
        dealt[rank].append(number)
        heapq.heappush(load, (size + sizes[number], rank))
    return dealt
