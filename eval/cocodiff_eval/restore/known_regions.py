"""Restoring with a pipeline that only generates, whatever its model: what is known of an image is put back into its
latents after each step, at that step's noise level (blended latents, as diffusers' own inpainting pipelines do).

The pipeline stays as it is. What stands in other places for the time of a call is the scheduler's `step`, which blends,
and its schedule, whose first part a strength below 1 leaves away. Nor has anybody to say how a pipeline lays out its
latents (packed, in patches, normalised by channel): `LatentLayout.asked` finds it by decoding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from cocodiff.config.errors import UserError
from cocodiff.models import experts_of
from cocodiff.models.checks import replace

DIGIT = 16  # places are told in digits to this base, which the rounding of bf16 leaves whole


class _Decoded(Exception):
    """What a pipeline gives its VAE, which ends its call."""


class _Output(tuple[Any, ...]):
    """What a transformer returns, by either of the ways in which pipelines take it."""

    sample = property(itemgetter(0))


@dataclass(frozen=True)
class LatentLayout:
    """How the latents of a pipeline lie in its VAE's: number n of an image's latents, in the order of memory, is
    `place_N[n]` there, and there is `x * scale_N[n] + shift_N[n]`.

    latents, of_vae: the shape of both without the batch: [C, H, W] of the VAE, [C, F, H, W] of one for videos.
    """

    latents: tuple[int, ...]
    of_vae: tuple[int, ...]
    place_N: Tensor
    scale_N: Tensor
    shift_N: Tensor

    @classmethod
    def asked(cls, pipe: Any, call: Callable[[], Any]) -> LatentLayout:
        """Of a pipeline, which `call` runs for one image in one step. No transformer is run, nothing is decoded.

        Raises UserError for a pipeline whose latents do not lie one by one in its VAE's."""
        shape, before = _decoded_from(pipe, call, torch.zeros_like)
        size = math.prod(shape)
        shift_N = before.flatten()

        def seen(values_N: Tensor) -> Tensor:
            return _decoded_from(pipe, call, lambda x: values_N.to(x).view(x.shape))[1].flatten()

        scale_N = (seen(torch.full((size,), float(DIGIT))) - shift_N) / DIGIT
        number_N, source_N = torch.arange(size), torch.zeros(shift_N.shape, dtype=torch.long)
        for power in range(max(1, math.ceil(math.log(size, DIGIT)))):
            digits = (seen((number_N // DIGIT**power % DIGIT).float()) - shift_N) / scale_N
            source_N += digits.nan_to_num(-1).round().long() * DIGIT**power
        one_by_one = torch.equal(source_N.sort().values, number_N)
        if one_by_one:
            trial_N = torch.linspace(-2, 2, size)
            told_N = trial_N[source_N] * scale_N + shift_N
            one_by_one = torch.allclose(seen(trial_N), told_N, rtol=0.02, atol=0.02 * float(scale_N.abs().max()))
        if not one_by_one:
            raise UserError(
                f"{type(pipe).__name__} cannot inpaint: its latents {[*shape]} are not what its VAE decodes, "
                f"{[*before.shape[1:]]}, number by number; diffusers has no inpainting pipeline for it either"
            )
        place_N = source_N.argsort()
        return cls(shape, tuple(before.shape[1:]), place_N, scale_N[place_N], shift_N[place_N])

    def taken(self, vae_B: Tensor) -> Tensor:
        """The pipeline's latents of the VAE's; float32 [B, *latents]."""
        placed_BN = self.placed(vae_B.float()).flatten(1)
        return ((placed_BN - self.shift_N.to(vae_B.device)) / self.scale_N.to(vae_B.device)).unflatten(1, self.latents)

    def placed(self, vae_B: Tensor) -> Tensor:
        """Whatever there is for each of the VAE's latents, for each of the pipeline's: [B, *latents]."""
        return vae_B.flatten(1)[:, self.place_N.to(vae_B.device)].unflatten(1, self.latents)

    @torch.no_grad()
    def known(self, vae: Any, images_BFHW: Tensor, hidden_BFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Of grey images in [0, 1] and what is hidden of them, 1 or 0, the latents, and which are hidden: those that
        a hidden pixel lies in. F is 1 but for videos."""
        weight = next(vae.parameters())
        pixels = (2 * images_BFHW - 1)[:, None].expand(-1, 3, -1, -1, -1).to(weight.device, weight.dtype)
        frames, *sides = self.of_vae[1:] if len(self.of_vae) == 4 else (1, *self.of_vae[1:])
        encoded = vae.encode(pixels if len(self.of_vae) == 4 else pixels[:, :, 0])
        latents_B = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
        assert latents_B.shape[1:] == self.of_vae, f"the VAE encodes {[*latents_B.shape]}, and decodes {self.of_vae}"
        # A video's first latent frame is of one frame, the others of as many each.
        each = (images_BFHW.shape[1] - 1) // max(1, frames - 1)
        hidden_BFHW = torch.cat([hidden_BFHW[:, :1].expand(-1, max(0, each - 1), -1, -1), hidden_BFHW], dim=1)
        hidden_BFHW = hidden_BFHW.to(weight.device).float()
        hidden_BFHW = F.adaptive_max_pool3d(hidden_BFHW[:, None], (frames, *sides))
        hidden_B = hidden_BFHW if len(self.of_vae) == 4 else hidden_BFHW[:, :, 0]
        return self.taken(latents_B), self.placed(hidden_B.expand(-1, *self.of_vae)) > 0


def _decoded_from(pipe: Any, call: Callable[[], Any], latents: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor]:
    """The shape of a pipeline's latents, and what it gives its VAE, float32 on the CPU, where `latents` of what a step
    takes are what it leaves."""
    shapes: list[tuple[int, ...]] = []

    def still(*args: Any, **kwargs: Any) -> _Output:
        sample = kwargs.get("hidden_states", args[0] if args else next(iter(kwargs.values()), None))
        return _Output([tree_map(torch.zeros_like, sample)])

    def step(_: Any, __: Any, sample: Tensor, *args: Any, **kwargs: Any) -> _Output:
        shapes.append(tuple(sample.shape[1:]))
        return _Output([latents(sample)])

    def decode(vae_B: Tensor, *args: Any, **kwargs: Any) -> Any:
        raise _Decoded(vae_B)

    with ExitStack() as undo:
        for model in experts_of(pipe):
            undo.callback(replace(model, "_call_impl", still))
        undo.callback(replace(pipe.scheduler, "step", functools.wraps(pipe.scheduler.step)(step)))
        undo.callback(replace(pipe.vae, "decode", decode))
        try:
            call()
        except _Decoded as decoded:
            return shapes[-1], decoded.args[0].detach().to("cpu", torch.float32)
    raise UserError(f"{type(pipe).__name__} cannot inpaint: its VAE decodes nothing")


@contextmanager
def keeping(pipe: Any, known_B: Tensor, hidden_B: Tensor, start: int) -> Iterator[None]:
    """Inside, a call of the pipeline keeps known latents, and leaves the first `start` steps of its schedule away: it
    begins with the known latents, noised as they are there.

    known_B, hidden_B: by `LatentLayout.known`, of as many images as the call makes."""
    scheduler, ran = pipe.scheduler, 0
    first: Tensor | None = None  # the latents that the call begins with, as the pipeline has drawn them
    noise_B: Tensor | None = None
    scheduled = False

    def noised(time: Tensor) -> Tensor:
        assert noise_B is not None, "latents are prepared before the first step"
        times = time.reshape(1)
        if hasattr(scheduler, "scale_noise"):
            return scheduler.scale_noise(known_B, times, noise_B)
        return scheduler.add_noise(known_B, noise_B, times)

    def begin() -> None:
        # Pipelines differ in whether they draw latents or ask for the schedule first.
        nonlocal noise_B
        if first is not None and scheduled:
            noise_B = first.float() / float(getattr(scheduler, "init_noise_sigma", 1.0))
            if start:
                first.copy_(noised(scheduler.timesteps[0]))

    @functools.wraps(pipe.prepare_latents)
    def prepare_latents(*args: Any, _prepare: Any = pipe.prepare_latents, **kwargs: Any) -> Any:
        nonlocal first
        prepared = _prepare(*args, **kwargs)
        first = prepared[0] if isinstance(prepared, tuple) else prepared
        begin()
        return prepared

    @functools.wraps(scheduler.set_timesteps)
    def set_timesteps(*args: Any, _set: Any = scheduler.set_timesteps, **kwargs: Any) -> None:
        nonlocal scheduled
        _set(*args, **kwargs)
        scheduler.timesteps = scheduler.timesteps[start:]
        if getattr(scheduler, "sigmas", None) is not None:
            scheduler.sigmas = scheduler.sigmas[start:]
        scheduled = True
        begin()

    @functools.wraps(scheduler.step)
    def step(*args: Any, _step: Any = scheduler.step, **kwargs: Any) -> _Output:
        nonlocal ran
        made = _step(*args, **kwargs)
        made_B = made[0] if isinstance(made, tuple) else made.prev_sample
        ran += 1
        level_B = noised(scheduler.timesteps[ran]) if ran < len(scheduler.timesteps) else known_B
        return _Output([torch.where(hidden_B, made_B, level_B.to(made_B))])

    with ExitStack() as undo:
        undo.callback(replace(pipe, "prepare_latents", prepare_latents))
        undo.callback(replace(scheduler, "set_timesteps", set_timesteps))
        undo.callback(replace(scheduler, "step", step))
        yield
