"""Decoding of latents into images by a pipeline's VAE: on one rank, or in tiles or bands on all."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cocodiff.comm.transport import Transport
from cocodiff.config.errors import UserError
from cocodiff.engine.agreement import check_agreement
from cocodiff.models.checks import replace

VAES = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan")
PARTS = ("encoder", "quant_conv", "decoder", "post_quant_conv")  # the parts of a VAE that encoding and decoding call
CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
# Classes of layers, of torch and of diffusers, that give the right result in bands.
OF_TORCH = (
    *("ModuleList", "Sequential", "Identity", "Dropout", "SiLU", "ReLU", "GELU", "Mish"),
    *("Linear", "Conv2d", "GroupNorm", "ZeroPad2d"),
)
OF_DIFFUSERS = (
    *("Encoder", "Decoder", "UNetMidBlock2D", "DownEncoderBlock2D", "UpDecoderBlock2D", "ResnetBlock2D"),
    *("Downsample2D", "Upsample2D", "Attention", "AvgDown3D", "DupUp3D"),
    *("QwenImage21AvgDown3D", "QwenImage21DupUp3D"),
    *(
        family + layer
        for family in ("Wan", "QwenImage", "QwenImage21")
        for layer in (
            *("Encoder3d", "Decoder3d", "MidBlock", "ResidualDownBlock", "ResidualUpBlock", "UpBlock"),
            *("ResidualBlock", "AttentionBlock", "Resample", "Upsample", "CausalConv3d", "RMS_norm"),
        )
    ),
)


def share_vae(vae: Any, how: str, transport: Transport) -> Iterator[Callable[[], object]]:
    """Replace a VAE's `encode` and `decode` by ones whose work ranks share. Yield functions that undo it.

    Raise UserError for `tiled` with a VAE without tiles, and for `sharded` with one that is not known in bands.

    Args:
        vae: a diffusers autoencoder.
        how: the setting `vae`: "all" (each rank decodes everything, nothing is replaced), "one", "tiled" or "sharded".
        transport: the ranks.
    """
    if how == "all" or (how == "one" and transport.size == 1):
        return
    shared = {"one": OneRankVAE, "tiled": TiledVAE, "sharded": ShardedVAE}[how](vae, transport)
    for name in ("encode", "decode"):
        if hasattr(shared, name):
            calls = [getattr(vae, name), getattr(shared, name)]
            yield calls.pop  # for references to the replaced function that others keep
            yield replace(vae, name, lambda *args, _calls=calls, **kwargs: _calls[-1](*args, **kwargs))


class SharedVAE:
    """The base of VAEs whose work of decoding, and sometimes encoding, is shared by ranks. Subclasses say which rank
    does what."""

    def __init__(self, vae: Any, transport: Transport) -> None:
        self._vae, self._transport, self._decode = vae, transport, vae.decode

    def decode(self, z: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """Decode latents as the VAE does. Every rank calls it with the same latents and gets the same image, on its own
        device.

        Raise UserError on every rank if their latents differ.

        Args:
            z: the latents.
            return_dict: True for a `DecoderOutput`, False for a tuple with the image.
            options: further arguments of the VAE's `decode`.
        """
        from diffusers.models.autoencoders.vae import DecoderOutput

        check_agreement({"latents": z}, self._transport, "the latents of an image")
        image = self._image(z, **options)
        return DecoderOutput(sample=image) if return_dict else (image,)

    def _image(self, z: Tensor, **options: Any) -> Tensor:
        """Return the image that latents are decoded into. Every rank calls it; a subclass says how they share the work.

        Args:
            z: the latents.
            options: further arguments of the VAE's `decode`.
        """
        raise NotImplementedError

    def _copy(self, tiling: bool) -> Any:
        """Return a copy of the VAE with the same weights, and with the `encode` and `decode` of its class instead of
        replaced ones.

        Args:
            tiling: True if the copy works in tiles.
        """
        vae: Any = object.__new__(type(self._vae))
        own = {name: value for name, value in vars(self._vae).items() if name not in ("encode", "decode")}
        vars(vae).update(own, use_tiling=tiling)
        return vae


class OneRankVAE(SharedVAE):
    """A VAE with which rank 0 decodes alone, and sends the image to the others. They need neither the time nor the
    memory.

    Every rank encodes, since encoding uses the pipeline's random generators.
    """

    def _image(self, z: Tensor, **options: Any) -> Tensor:
        image = self._decode(z, return_dict=False, **options)[0].cpu() if self._transport.rank == 0 else None
        whole: Tensor = self._transport.broadcast_value(image, "the VAE's image")
        return whole.to(z.device)


class TiledVAE(SharedVAE):
    """A VAE with which each rank decodes some of the tiles of an image. The image equals bit for bit that of one
    process with tiling.

    The VAE itself cuts the latents and blends the tiles, as after `enable_tiling()`. Its `decode` runs twice, on copies
    that share its weights and have another decoder. The first decoder only records its calls. Then every rank decodes
    its part of the calls and sends the results to all. The second decoder returns these in order. An image no larger
    than a tile is one call, which rank 0 makes.

    Memory: a rank decodes one tile at a time, and keeps those that it has decoded. Then it holds all ranks' tiles,
    which with overlaps of a quarter are up to 1.8 images. Besides them it holds its own twice more while they are sent,
    or the image once they are blended. Encoding is tiled as well, but every rank does all of it.
    """

    def __init__(self, vae: Any, transport: Transport) -> None:
        """Set up decoding in tiles. Raise UserError if the VAE has no tiles.

        Args:
            vae: a diffusers autoencoder.
            transport: the ranks that decode.
        """
        if not hasattr(vae, "use_tiling") or not isinstance(getattr(vae, "decoder", None), nn.Module):
            raise UserError(f"vae tiled: a {type(vae).__name__} does not decode in tiles; choose vae one or all")
        super().__init__(vae, transport)

    def encode(self, x: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """Encode an image in tiles, as the VAE does. Every rank encodes all of it by itself.

        Args:
            x: the image.
            return_dict: True for the VAE's output object, False for a tuple.
            options: further arguments of the VAE's `encode`.
        """
        return self._copy(tiling=True).encode(x, return_dict=return_dict, **options)

    def _image(self, z: Tensor, **options: Any) -> Tensor:
        """Return the image of latents, decoded in tiles by all ranks.

        Raise UserError for a video's latents: its frames depend on each other.

        Args:
            z: the latents.
            options: further arguments of the VAE's `decode`.
        """
        if z.ndim == 5 and z.shape[2] > 1:
            raise UserError(f"vae tiled: {z.shape[2]} frames; only images are decoded in tiles: choose vae one or all")
        calls: list[partial[Tensor]] = []

        def note(tile: Tensor, *more: Any, **options: Any) -> Tensor:
            calls.append(partial(self._vae.decoder, tile, *more, **options))
            return torch.empty_like(tile, device="meta")  # a meta tensor, which costs nothing to blend

        self._decode_with(note, z, **options)
        divided = share_tiles([call.args[0].numel() for call in calls], self._transport.size)
        own = [calls[number]() for number in divided[self._transport.rank]]
        of_ranks = tensors_of_all(own, self._transport, z, "the exchange of decoded tiles")
        tiles = dict(zip(itertools.chain(*divided), itertools.chain(*of_ranks), strict=True))
        in_order = iter([tiles[number] for number in sorted(tiles)])
        return self._decode_with(lambda *_, **__: next(in_order), z, **options)

    def _decode_with(self, call: Callable[..., Tensor], z: Tensor, **options: Any) -> Tensor:
        """Return the image that the VAE's tiled decoding makes of latents, with another function in place of its
        decoder.

        Args:
            call: takes a tile of latents and returns a tile of the image.
            z: the latents.
            options: further arguments of the VAE's `decode`.
        """
        vae = self._copy(tiling=True)
        vae._modules = {**vae._modules, "decoder": _InPlaceOfDecoder(vae.decoder, call)}
        return vae.decode(z, return_dict=False, **options)[0]


class _InPlaceOfDecoder(nn.Module):
    """A module that calls a function in place of a VAE's decoder. It has the decoder's layers, since some VAEs look at
    them."""

    def __init__(self, decoder: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.decoder, self._call = decoder, call

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return self._call(*args, **options)


class ShardedVAE(SharedVAE):
    """A VAE with which each rank encodes and decodes a band of the picture along its longer side.

    The result is that of one process up to rounding, since ranks exchange the rows at the edges of bands that layers
    need (`Bands`). A rank needs the memory of its band. There are at most as many bands as latent rows; ranks without
    one wait for the picture. The VAE's own tiling is off.
    """

    def __init__(self, vae: Any, transport: Transport) -> None:
        """Set up work in bands. Raise UserError if the VAE has a layer that is not known to be right in bands.

        Args:
            vae: a diffusers autoencoder.
            transport: the ranks that encode and decode.
        """
        unknown = unknown_layer(vae)
        if unknown is not None:
            raise UserError(
                f"vae sharded: a {type(vae).__name__} is not known in bands: it has {unknown}; choose vae one or all"
            )
        super().__init__(vae, transport)

    def encode(self, x: Tensor, return_dict: bool = True, **options: Any) -> Any:
        """Encode an image as the VAE does, in bands. Every rank calls it with the same image and gets the same
        distribution.

        Args:
            x: the image.
            return_dict: True for an `AutoencoderKLOutput`, False for a tuple with the distribution.
            options: further arguments of the VAE's `encode`.
        """
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
        from diffusers.models.modeling_outputs import AutoencoderKLOutput

        def parameters(vae: Any, band: Tensor) -> Tensor:
            return vae.encode(band, return_dict=False, **options)[0].parameters

        patch = getattr(self._vae.config, "patch_size", None)  # a whole number if the VAE itself cuts patches
        factor = 2 ** halvings(self._vae) * (patch if isinstance(patch, int) else 1)
        found = DiagonalGaussianDistribution(self._in_bands(parameters, x, factor))
        return AutoencoderKLOutput(latent_dist=found) if return_dict else (found,)

    def _image(self, z: Tensor, **options: Any) -> Tensor:
        return self._in_bands(lambda vae, band: vae.decode(band, return_dict=False, **options)[0], z, 1)

    @torch.no_grad()
    def _in_bands(self, call: Callable[[Any, Tensor], Tensor], x: Tensor, factor: int) -> Tensor:
        """Cut a tensor into bands, call a function on this rank's, and return the results of all bands put together, on
        every rank.

        Args:
            call: takes a copy of the VAE and a band, and returns the band's result.
            x: an image to encode or latents to decode; cut along the longer of its last two dimensions.
            factor: rows of x for each row of latents: 1 for latents.
        """
        transport, axis = self._transport, -2 if x.shape[-2] >= x.shape[-1] else -1
        latent_rows = x.shape[axis] // factor
        bands = max(1, min(transport.size, latent_rows))
        rows = [(latent_rows + band) // bands for band in range(bands)]
        own = []
        if transport.rank < bands:
            ends = [factor * end for end in itertools.accumulate(rows)][:-1]
            band = x.tensor_split(ends, axis)[transport.rank]
            with Bands(transport.part(range(bands)), rows, axis) if bands > 1 else contextlib.nullcontext():
                own.append(call(self._copy(tiling=False), band))
        return torch.cat([*itertools.chain(*tensors_of_all(own, transport, x, "the exchange of decoded bands"))], axis)


def tensors_of_all(own: list[Tensor], transport: Transport, like: Tensor, at: str) -> list[list[Tensor]]:
    """Return the tensors of every rank, on every rank: one list for each.

    Args:
        own: this rank's tensors, of one dtype on all ranks; their number and shapes may differ between ranks.
        transport: the ranks.
        like: a tensor on the device of the results.
        at: name of the exchange, for the error if a rank does not reach it.
    """
    of_ranks = transport.all_gather_values([(tensor.shape, tensor.dtype) for tensor in own], at)
    dtype = next(dtype for of_rank in of_ranks for _, dtype in of_rank)
    counts = [[math.prod(shape) for shape, _ in of_rank] for of_rank in of_ranks]
    sent = torch.cat([tensor.flatten() for tensor in own] or [like.new_empty(0, dtype=dtype)])
    parts = gather_all(transport, sent, [like.new_empty(sum(count), dtype=dtype) for count in counts], at)
    return [
        [x.view(shape) for x, (shape, _) in zip(part.split(count), of_rank, strict=True)]
        for part, count, of_rank in zip(parts, counts, of_ranks, strict=True)
    ]


def gather_all(transport: Transport, own: Tensor, parts: list[Tensor], at: str) -> list[Tensor]:
    """Fill `parts` with every rank's own tensor, and return them. It blocks; all ranks call it.

    Args:
        transport: the ranks.
        own: this rank's tensor.
        parts: memory for the tensor of each rank.
        at: name of the exchange, for the error if a rank does not reach it.
    """

    def gather(own: Tensor, parts: list[Tensor]) -> list[Tensor]:
        transport.world.all_gather(own, parts).wait()
        return parts

    transport.arrive(at)
    return transport.control.submit(gather, own, parts).wait()


def share_tiles(sizes: list[int], ranks: int) -> list[list[int]]:
    """Divide tiles among ranks. Return a list for each rank with the indices of its tiles.

    The largest go first, each to the rank with least to decode so far.

    Args:
        sizes: number of latent elements of each tile.
        ranks: number of ranks.
    """
    divided: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        min(divided, key=lambda numbers: sum(sizes[number] for number in numbers)).append(number)
    return divided


# A VAE's layers in bands: each rank computes a band of the picture, and values beyond its edges come from other ranks.
#
# Most layers of a VAE compute a pixel from the same pixel, or from its own part of a coarser picture. The exceptions:
#
# - a convolution of three rows needs a row on each side of the band, or below it alone where it halves the picture;
# - attention compares all pixels: queries stay, keys and values are gathered;
# - a group norm's mean and variance are of the whole picture.
#
# `Bands` intercepts these three as torch's functions, in any class. `unknown_layer` first refuses every class that is
# not known to be made of them. So a layer that computes anything else ends a run instead of changing its image.


def unknown_layer(vae: Any) -> str | None:
    """Return the first layer of a VAE that is not known to be right in bands, with its place and the reason, as text
    for an error.

    Return None if all are known. A VAE whose class is not in VAES is refused as a whole.
    """
    if type(vae).__name__ not in VAES or not type(vae).__module__.startswith("diffusers."):
        return "a class of its own"
    for part in (part for part in PARTS if getattr(vae, part, None) is not None):
        for name, layer in getattr(vae, part).named_modules():
            reason = _why_unknown(layer)
            if reason is not None:
                return f"{reason} at {f'{part}.{name}'.rstrip('.')}"
    return None


def halvings(vae: Any) -> int:
    """Return the number of times that a VAE's encoder halves a picture's sides."""
    return sum(layer.stride[-1] == 2 for layer in vae.encoder.modules() if isinstance(layer, CONVOLUTIONS))


def _why_unknown(layer: Any) -> str | None:
    """Return the reason, as text for an error, why a layer is not known to be right in bands; None if it is."""
    kind = type(layer)
    known = (kind.__name__ in OF_TORCH and kind.__module__.startswith("torch.nn.")) or (
        kind.__name__ in OF_DIFFUSERS and kind.__module__.startswith("diffusers.")
    )
    if not known:
        return f"a {kind.__name__}"
    if layer._compiled_call_impl is not None:
        return f"a {kind.__name__} that is compiled"
    if issubclass(kind, CONVOLUTIONS):
        # Some classes pad their input themselves, with amounts in the order of `torch.nn.functional.pad`.
        pads = layer._padding[:4] if hasattr(layer, "_padding") else (*layer.padding, *layer.padding)
        form = tuple(layer.kernel_size[-2:]), tuple(layer.stride[-2:]), set(pads)
        forms = (((1, 1), (1, 1), {0}), ((3, 3), (1, 1), {1}), ((3, 3), (2, 2), {0}))
        if form not in forms or set(layer.dilation) != {1} or layer.padding_mode != "zeros":
            return f"a convolution with {layer.extra_repr()}"
    attributes = {
        "ZeroPad2d": ("padding", ((0, 1, 0, 1),)),
        "Downsample2D": ("padding", (0,)),
        "Upsample2D": ("interpolate", (True,)),
        "RMS_norm": ("channel_first", (True,)),
        "Upsample": ("mode", ("nearest", "nearest-exact")),
    }
    for name, (attribute, values) in attributes.items():
        if kind.__name__.endswith(name) and getattr(layer, attribute) not in values:
            return f"a {kind.__name__} with {attribute} {getattr(layer, attribute)!r}"
    processor = type(getattr(layer, "processor", None)).__name__
    return None if processor in ("NoneType", "AttnProcessor2_0") else f"attention by a {processor}"


class Bands(TorchFunctionMode):
    """A mode of torch in which a VAE's encoder and decoder compute one band of a picture, and exchange values with
    other bands.

    It replaces convolutions, attention and group norm. All ranks of the transport enter it, and call the same layers,
    each with its band.
    """

    def __init__(self, transport: Transport, rows: Sequence[int], axis: int) -> None:
        """Prepare the mode.

        Args:
            transport: the ranks that have a band, in the picture's order.
            rows: number of latent rows (or columns) of every rank's band; at least one each.
            axis: -2 if the picture is cut into bands of rows, -1 for columns.
        """
        super().__init__()
        self._transport, self._rows, self._axis = transport, rows, axis
        self._instead: dict[Any, Callable[..., Tensor]] = {
            F.conv2d: self._convolve,
            F.conv3d: self._convolve,
            F.scaled_dot_product_attention: self._attend,
            F.group_norm: self._group_norm,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))

    def _convolve(self, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, *more: Any) -> Tensor:
        """Compute a convolution on this rank's band: torch's `conv2d` or `conv3d`, with the neighbours' rows at the
        edges.

        Args:
            x: the band, [B, C, height, width]; for `conv3d` [B, C, frames, height, width], padded by its layer already.
            weight: as for torch's function.
            bias: as for torch's function.
            stride: as for torch's function.
            padding: zeros at each side of every dimension after C.
            more: further arguments of torch's function.
        """
        padding = list(padding)
        if padding[self._axis]:  # pad before the convolution, to make place for the neighbours' rows
            x = F.pad(x, (0, 0, 1, 1) if self._axis == -2 else (1, 1, 0, 0))
            padding[self._axis] = 0
        self._take_edges(x, weight, stride)
        convolve = F.conv2d if weight.ndim == 4 else F.conv3d
        return convolve(x, weight, bias, stride, padding, *more)

    def _take_edges(self, x: Tensor, weight: Tensor, stride: Sequence[int]) -> None:
        """Write the neighbouring bands' rows over the padding of a convolution's input, in place, in one exchange with
        each neighbour.

        At the picture's own edges the padding's zeros stay.

        Args:
            x: the padded input.
            weight: the convolution's weight; with one row along the cut nothing is done.
            stride: the convolution's stride. With 1 both sides get a row, with 2 only the end.
        """
        if weight.shape[self._axis] == 1:
            return
        rank, both = self._transport.rank, stride[self._axis] == 1
        before = [rank - 1] if rank else []
        after = [rank + 1] if rank + 1 < self._transport.size else []

        def row(at: int) -> Tensor:
            return x.narrow(self._axis, at % x.shape[self._axis], 1)

        sends = [(row(1 if both else 0).contiguous(), peer) for peer in before]
        sends += [(row(-2).contiguous(), peer) for peer in after if both]
        places = [(row(-1), peer) for peer in after] + [(row(0), peer) for peer in before if both]
        recvs = [(place.contiguous(), peer) for place, peer in places]
        self._transport.arrive("the exchange of a picture's edges")
        received = self._transport.control.submit(self._exchange, sends, recvs).wait()
        for (place, _), came in zip(places, received, strict=True):
            place.copy_(came)

    def _exchange(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> list[Tensor]:
        """Send rows to neighbouring ranks, and fill tensors with rows from them. Return the filled tensors.

        A background thread (lane "control") runs it.

        Args:
            sends: tensors to send, each with the rank that gets it.
            recvs: tensors to fill, each with the rank that sends it.
        """
        self._transport.world.send_recv(sends, recvs).wait()
        return [tensor for tensor, _ in recvs]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        """Compute attention of this band's pixels to all pixels, [B, H, L, D]: keys and values of all bands are
        gathered.

        With bands of columns, keys lie in another order than in one process, which does not change the result but for
        rounding.

        Args:
            query: this band's queries, [B, H, L, D].
            key: its keys.
            value: its values.
            more: further arguments of `scaled_dot_product_attention`.
        """
        own = torch.stack([key, value])
        pixels = key.shape[2] // self._rows[self._transport.rank]
        parts = [own.new_empty(*own.shape[:3], pixels * rows, own.shape[4]) for rows in self._rows]
        key, value = torch.cat(self._gathered(own, parts), 3)
        return F.scaled_dot_product_attention(query, key, value, **more)

    def _group_norm(self, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalise this band by the mean and variance of all bands, in float32 at least.

        Mean and variance are computed group by group, so that no float32 copy of all of x is made.

        Args:
            x: the band, [B, C, ...].
            groups: number of groups of channels.
            weight: scale of each channel.
            bias: offset of each channel.
            eps: added to the variance.
        """
        batch, channels = x.shape[:2]
        wide = torch.promote_types(x.dtype, torch.float32)
        of_groups = x.reshape(batch * groups, -1)
        moments = [torch.stack(torch.var_mean(of_group.to(wide), correction=0)) for of_group in of_groups]
        own = torch.cat([*moments, moments[0].new_full((1,), of_groups.shape[1])])
        gathered = torch.stack(self._gathered(own, [torch.empty_like(own) for _ in self._rows]))
        share = gathered[:, -1:] / gathered[:, -1].sum()
        var, mean = gathered[:, :-1].view(len(self._rows), -1, 2).unbind(-1)
        whole_mean = (share * mean).sum(0)
        whole_var = (share * (var + (mean - whole_mean) ** 2)).sum(0)
        # Batch norm with given mean and variance, for which every row of the batch has channels of its own.
        flat, of_channels = x.reshape(1, batch * channels, -1), channels // groups
        mean, var = (each.repeat_interleave(of_channels) for each in (whole_mean, whole_var))
        weight, bias = (each.to(wide).repeat(batch) for each in (weight, bias))
        return F.batch_norm(flat, mean, var, weight, bias, False, 0.0, eps).view(x.shape)

    def _gathered(self, own: Tensor, parts: list[Tensor]) -> list[Tensor]:
        """Fill `parts` with the tensors of all bands, and return them.

        Args:
            own: this band's tensor.
            parts: memory for the tensor of each band.
        """
        return gather_all(self._transport, own, parts, "a gather of all bands")
