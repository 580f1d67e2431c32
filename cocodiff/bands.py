"""A VAE's layers on a band of the picture each: what reaches over a band's edges comes from the other ranks.

Most layers of a VAE compute a pixel from the same pixel, or from its own part of a coarser picture. The exceptions:

- a convolution of three rows needs a row on each side of the band, or below it alone where it halves the picture;
- attention compares all pixels: queries stay, keys and values are gathered;
- a group norm's mean and variance are of the whole picture.

`Bands` sees these three as torch's functions, whichever class calls them, and `unknown_layer` refuses beforehand every
class that is not known to be made of them. So a layer that computes otherwise ends a run instead of changing its image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from cocodiff.comm.transport import Group, Transport

VAES = ("AutoencoderKL", "AutoencoderKLFlux2", "AutoencoderKLQwenImage", "AutoencoderKLQwenImage21", "AutoencoderKLWan")
PARTS = ("encoder", "quant_conv", "decoder", "post_quant_conv")  # what encoding and decoding call
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


def unknown_layer(vae: Any) -> str | None:
    """The first layer of a VAE that is not known to be right in bands, with its place and why; None where all are."""
    if type(vae).__name__ not in VAES or not _is_from(type(vae), "diffusers."):
        return "a class of its own"
    for part in (part for part in PARTS if getattr(vae, part, None) is not None):
        for name, layer in getattr(vae, part).named_modules():
            reason = _why_unknown(layer)
            if reason is not None:
                return f"{reason} at {f'{part}.{name}'.rstrip('.')}"
    return None


def halvings(vae: Any) -> int:
    """How often a VAE's encoder halves a picture's sides."""
    return sum(layer.stride[-1] == 2 for layer in vae.encoder.modules() if _is_convolution(layer))


def _is_from(kind: type, package: str) -> bool:
    return kind.__module__.startswith(package)


def _is_convolution(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d | nn.Conv3d)


def _why_unknown(layer: Any) -> str | None:
    kind = type(layer)
    known = (kind.__name__ in OF_TORCH and _is_from(kind, "torch.nn.")) or (
        kind.__name__ in OF_DIFFUSERS and _is_from(kind, "diffusers.")
    )
    if not known:
        return f"a {kind.__name__}"
    if layer._compiled_call_impl is not None:
        return f"a {kind.__name__} that is compiled"
    if _is_convolution(layer):
        # Some classes pad their input by themselves, and say by how much in the order of `torch.nn.functional.pad`.
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
    """While it is entered, a VAE's encoder and decoder compute one band of a picture that is cut along `axis`, -2 for
    rows or -1 for columns. All ranks of the transport enter it, and call the same layers, with a band each.

    rows: latent rows (or columns) of every rank's band, in the picture's order; at least one each.
    """

    def __init__(self, transport: Transport, rows: Sequence[int], axis: int) -> None:
        super().__init__()
        self._transport, self._rows, self._axis = transport, rows, axis
        self._instead: dict[Any, Callable[..., Tensor]] = {
            F.conv2d: self._conv2d,
            F.conv3d: self._conv3d,
            F.scaled_dot_product_attention: self._attend,
            F.group_norm: self._group_norm,
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._instead.get(func, func)(*args, **(kwargs or {}))

    def _conv2d(self, x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, *more: Any) -> Tensor:
        padding = list(padding)
        if padding[self._axis]:  # by the convolution itself, so there is no place yet for the neighbours' rows
            x = F.pad(x, (0, 0, 1, 1) if self._axis == -2 else (1, 1, 0, 0))
            padding[self._axis] = 0
        self._take_edges(x, weight, stride)
        return F.conv2d(x, weight, bias, stride, padding, *more)

    def _conv3d(self, x: Tensor, weight: Tensor, bias: Any, stride: Any, *more: Any) -> Tensor:
        self._take_edges(x, weight, stride)
        return F.conv3d(x, weight, bias, stride, *more)

    def _take_edges(self, x: Tensor, weight: Tensor, stride: Sequence[int]) -> None:
        """Puts the neighbours' rows where a convolution's input has been padded with zeros: in one exchange with each.
        At the picture's own edges zeros stay."""
        if weight.shape[self._axis] == 1:
            return
        rank, both = self._transport.rank, stride[self._axis] == 1
        before, after = rank > 0, rank + 1 < self._transport.size

        def row(at: int) -> Tensor:
            return x.narrow(self._axis, at % x.shape[self._axis], 1)

        sends, places = [], []
        if before:
            sends.append((row(1 if both else 0).contiguous(), rank - 1))
        if after:
            places.append((row(-1), rank + 1))
        if both and after:
            sends.append((row(-2).contiguous(), rank + 1))
        if both and before:
            places.append((row(0), rank - 1))
        recvs = [(place.contiguous(), peer) for place, peer in places]
        for (place, _), came in zip(places, self._exchanged(sends, recvs), strict=True):
            place.copy_(came)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        """Of this band's pixels to all; [B, H, L, D]. In columns keys stand in another order than in one process."""
        own = torch.stack([key, value])
        pixels = key.shape[2] // self._rows[self._transport.rank]
        parts = [own.new_empty(*own.shape[:3], pixels * rows, own.shape[4]) for rows in self._rows]
        key, value = torch.cat(self._gathered(own, parts), 3)
        return F.scaled_dot_product_attention(query, key, value, **more)

    def _group_norm(self, x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """By the mean and variance of all bands, in float32 at least; x: [B, C, ...]. They are computed group by group,
        so that no copy of a whole x in float32 comes about."""
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
        # Batch norm takes mean and variance as given: every row's channels are channels of their own to it.
        flat, of_channels = x.reshape(1, batch * channels, -1), channels // groups
        mean, var = (each.repeat_interleave(of_channels) for each in (whole_mean, whole_var))
        return F.batch_norm(
            flat, mean, var, weight.to(wide).repeat(batch), bias.to(wide).repeat(batch), False, 0.0, eps
        ).view(x.shape)

    def _exchanged(self, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> list[Tensor]:
        self._transport.arrive("the exchange of a picture's edges")
        return self._transport.control.submit_inline(partial(exchange, self._transport.world), sends, recvs).wait()

    def _gathered(self, own: Tensor, parts: list[Tensor]) -> list[Tensor]:
        self._transport.arrive("a gather of all bands")
        return self._transport.control.submit_inline(partial(gather, self._transport.world), own, parts).wait()


def exchange(group: Group, sends: list[tuple[Tensor, int]], recvs: list[tuple[Tensor, int]]) -> list[Tensor]:
    """What has been received. A job of a lane."""
    group.send_recv(sends, recvs).wait()
    return [tensor for tensor, _ in recvs]


def gather(group: Group, own: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """`parts`, filled with every rank's tensor. A job of a lane."""
    group.all_gather(own, parts).wait()
    return parts
