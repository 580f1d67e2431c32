"""Inpainting with any pipeline that only generates: after each step, known latents replace the generated ones.

They are put at the noise level of that step. The pipeline itself is not changed. During a call only the scheduler's
`step` and its schedule are replaced, of which a strength below 1 leaves out the first part. Pipelines lay out their
latents in different ways (packed, in patches, normalised by channel). `LatentLayout.asked` finds that out by decoding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from cocodiff.config.errors import UserError
from cocodiff.models import experts_of
from cocodiff.models.checks import replace

DIGIT = 16  # base of the digits that encode places in latents; bf16 holds such digits exactly


class _Decoded(Exception):
    """An exception that carries the latents that a diffusers pipeline would decode, and ends the pipeline's call."""


class _Output(tuple[Any, ...]):
    """The output of a transformer or scheduler, which pipelines read as a tuple or by the attribute `sample`."""

    sample = property(itemgetter(0))


@dataclass(frozen=True)
class LatentLayout:
    """The correspondence of the latents of a diffusers pipeline, which may be packed and normalised, to its VAE's.

    Value number n of an image's latents, in the order of memory, is number `place_N[n]` of the VAE's latents. A value x
    in the pipeline is `x * scale_N[n] + shift_N[n]` in the VAE.
    """

    latents: tuple[int, ...]  # shape of the pipeline's latents, without the batch
    of_vae: tuple[int, ...]  # shape of the VAE's latents without the batch: [C, H, W], or [C, F, H, W] for videos
    place_N: Tensor  # for each value of the pipeline's latents its number in the VAE's
    scale_N: Tensor  # factor from the pipeline's value to the VAE's
    shift_N: Tensor  # number that is added after that to get the VAE's value

    @classmethod
    def asked(cls, pipe: Any, call: Callable[[], Any]) -> LatentLayout:
        """Find the layout of a pipeline's latents by running the pipeline with latents of known values.

        No transformer is run, and nothing is decoded. Raise UserError if the VAE's latents are not the pipeline's one
        by one.

        Args:
            pipe: the diffusers pipeline
            call: function that runs it for one image in one step
        """
        shape, before = _decoded_from(pipe, call, torch.zeros_like)
        size = math.prod(shape)
        shift_N = before.flatten()

        def seen(values_N: Tensor) -> Tensor:
            """Return the latents [N] that the VAE gets if the pipeline's latents have the values `values_N`."""
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
                f"{[*before.shape[1:]]}, number by number"
            )
        place_N = source_N.argsort()
        return cls(shape, tuple(before.shape[1:]), place_N, scale_N[place_N], shift_N[place_N])

    def taken(self, vae_B: Tensor) -> Tensor:
        """Return latents of the VAE as the pipeline would hold them, in its order and scale; float32 [B, *latents].

        vae_B: latents of B images in the VAE's layout, [B, *of_vae]
        """
        placed_BN = self.placed(vae_B.float()).flatten(1)
        return ((placed_BN - self.shift_N.to(vae_B.device)) / self.scale_N.to(vae_B.device)).unflatten(1, self.latents)

    def placed(self, vae_B: Tensor) -> Tensor:
        """Return values in the pipeline's order of latents, not rescaled; [B, *latents].

        vae_B: a value, such as a flag, for each of the VAE's latents of B images, [B, *of_vae]
        """
        return vae_B.flatten(1)[:, self.place_N.to(vae_B.device)].unflatten(1, self.latents)

    @torch.no_grad()
    def known(self, vae: Any, images_BFHW: Tensor, hidden_BFHW: Tensor) -> tuple[Tensor, Tensor]:
        """Encode grey images. Return their latents in the pipeline's layout, and a flag for each; both [B, *latents].

        The flag is True for a hidden latent, in which at least one hidden pixel lies.

        Args:
            vae: the pipeline's VAE
            images_BFHW: B images or videos of F frames, in [0, 1]; F is 1 for images
            hidden_BFHW: 1 for hidden pixels, else 0
        """
        weight = next(chain(vae.parameters(), vae.buffers()))
        pixels = (2 * images_BFHW - 1)[:, None].expand(-1, 3, -1, -1, -1).to(weight.device, weight.dtype)
        frames, *sides = self.of_vae[1:] if len(self.of_vae) == 4 else (1, *self.of_vae[1:])
        encoded = vae.encode(pixels if len(self.of_vae) == 4 else pixels[:, :, 0])
        latents_B = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents
        assert latents_B.shape[1:] == self.of_vae, f"the VAE encodes {[*latents_B.shape]}, and decodes {self.of_vae}"
        # A video's first latent frame holds one frame, and each other latent frame `each` frames.
        each = (images_BFHW.shape[1] - 1) // max(1, frames - 1)
        hidden_BFHW = torch.cat([hidden_BFHW[:, :1].expand(-1, max(0, each - 1), -1, -1), hidden_BFHW], dim=1)
        hidden_BFHW = hidden_BFHW.to(weight.device).float()
        hidden_B = F.adaptive_max_pool3d(hidden_BFHW[:, None], (frames, *sides)).reshape(-1, 1, *self.of_vae[1:])
        return self.taken(latents_B), self.placed(hidden_B.expand(-1, *self.of_vae)) > 0


def _decoded_from(pipe: Any, call: Callable[[], Any], latents: Callable[[Tensor], Tensor]) -> tuple[Any, Tensor]:
    """Run a diffusers pipeline up to its VAE, without its transformer, to learn how it lays out latents.

    Return the shape of the pipeline's latents, without the batch, and the latents that the VAE would decode, float32 on
    the CPU. Raise UserError if the VAE would decode none.

    Args:
        pipe: the pipeline
        call: function that runs it
        latents: called in place of each denoising step: takes the latents, and returns those to continue with
    """
    shapes: list[tuple[int, ...]] = []

    def still(*args: Any, **kwargs: Any) -> _Output:
        """Return zeros of the shape of the latents that are given, as the transformer's output. It takes its place."""
        sample = kwargs.get("hidden_states", args[0] if args else next(iter(kwargs.values()), None))
        return _Output([tree_map(torch.zeros_like, sample)])

    def step(_: Any, __: Any, sample: Tensor, *args: Any, **kwargs: Any) -> _Output:
        """Record the shape of the latents, and return what `latents` gives for them, in the scheduler's place."""
        shapes.append(tuple(sample.shape[1:]))
        return _Output([latents(sample)])

    def decode(vae_B: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Raise `_Decoded` with the latents that are to be decoded. It replaces the VAE's `decode`."""
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
def keeping(pipe: Any, known: tuple[Tensor, Tensor], start: int, fresh: float, generators: list[Any]) -> Iterator[None]:
    """Let calls of a generating pipeline inpaint within the context: known latents are put back after each step.

    If steps are left out at the start of the schedule, a call begins with the known latents, noised to the level at
    which it starts.

    Args:
        pipe: the diffusers pipeline, whose scheduler is changed within the context
        known: latents of the images, and True for the hidden ones, as `LatentLayout.known` returns them, for as many
            images as the call makes
        start: number of steps of the schedule that are left out
        fresh: share of each step's noise that is new, 0 to 1, see `renoised`
        generators: the random generator of each image
    """
    scheduler, (known_B, hidden_B), ran = pipe.scheduler, known, 0
    own_prepare, own_set, own_step = pipe.prepare_latents, scheduler.set_timesteps, scheduler.step
    first: Tensor | None = None  # the random latents that the pipeline begins with
    scheduled = False

    def begin() -> None:
        """Replace the pipeline's first latents by noised known ones, once both latents and schedule are set."""
        # Some pipelines sample latents before they ask for the schedule, others after it.
        if first is not None and scheduled and start:
            image, noise = level_of(scheduler, ran)
            first.copy_(image * known_B + noise * first.float() / float(getattr(scheduler, "init_noise_sigma", 1.0)))

    @functools.wraps(own_prepare)
    def prepare_latents(*args: Any, **kwargs: Any) -> Any:
        """Prepare latents as the pipeline does, and record them. It replaces the pipeline's method."""
        nonlocal first
        prepared = own_prepare(*args, **kwargs)
        first = prepared[0] if isinstance(prepared, tuple) else prepared
        begin()
        return prepared

    @functools.wraps(own_set)
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        """Set the schedule as the scheduler does, but without its first `start` steps, in the scheduler's place."""
        nonlocal scheduled
        own_set(*args, **kwargs)
        scheduler.timesteps = scheduler.timesteps[start:]
        if getattr(scheduler, "sigmas", None) is not None:
            scheduler.sigmas = scheduler.sigmas[start:]
        scheduled = True
        begin()

    @functools.wraps(own_step)
    def step(output: Tensor, time: Any, sample: Tensor, *args: Any, **kwargs: Any) -> _Output:
        """Step as the scheduler does, then put known latents in place of the generated ones.

        It replaces the scheduler's method.

        Args:
            output: the transformer's output
            time: the timestep
            sample: latents before the step
        """
        nonlocal ran
        before = level_of(scheduler, ran)
        made = own_step(output.float(), time, sample.float(), *args, **kwargs)
        made_B = made[0] if isinstance(made, tuple) else made.prev_sample
        ran += 1
        # Schedulers' memory of earlier steps is invalid, since known latents have been replaced since.
        for name, none in (("last_sample", None), ("lower_order_nums", 0)):
            if hasattr(scheduler, name):
                setattr(scheduler, name, none)
        drawn = [torch.randn(sample.shape[1:], generator=one).to(sample.device) for one in generators]
        steps = (sample.float(), before), (made_B.float(), level_of(scheduler, ran))
        return _Output([renoised(*steps, known_B, hidden_B, fresh, torch.stack(drawn)).to(sample)])

    with ExitStack() as undo:
        undo.callback(replace(pipe, "prepare_latents", prepare_latents))
        undo.callback(replace(scheduler, "set_timesteps", set_timesteps))
        undo.callback(replace(scheduler, "step", step))
        yield


Level = tuple[float, float]  # factors of image and of noise in latents
State = tuple[Tensor, Level]  # latents and their level


def level_of(scheduler: Any, ran: int) -> Level:
    """Return the factors of image and of noise in a scheduler's latents after `ran` steps of its schedule.

    After the last step they are 1 and 0.
    """
    if ran >= len(scheduler.timesteps):
        return 1.0, 0.0
    times, one, none = scheduler.timesteps[ran].reshape(1).cpu(), torch.ones(1), torch.zeros(1)
    if hasattr(scheduler, "scale_noise"):
        return float(scheduler.scale_noise(one, times, none)), float(scheduler.scale_noise(none, times, one))
    return float(scheduler.add_noise(one, none, times)), float(scheduler.add_noise(none, one, times))


def renoised(before: State, after: State, known_B: Tensor, hidden_B: Tensor, fresh: float, drawn_B: Tensor) -> Tensor:
    """Return the latents after a denoising step, with known latents put into the image that the step predicts.

    The share `fresh` of the predicted noise is replaced by new noise. Both parts of the latents have the same noise,
    and so fit each other. With `fresh` 0 all noise is what the model predicts. With 1 samples are pulled to the mean of
    what is possible (docs/inpainting.md has figures).

    Args:
        before: latents before the step, and the factors of image and noise in them
        after: the same after the step, which must be of first order
        known_B: latents of the known image
        hidden_B: True for hidden latents, which the model's replace
        fresh: share of new noise, 0 to 1
        drawn_B: the new noise
    """
    (before_B, (a, b)), (after_B, (c, d)) = before, after
    if d == 0:  # last step: near hidden pixels the known latents encode the fill, so they are not put in
        return after_B
    image_B, noise_B = (d * before_B - b * after_B) / (a * d - b * c), (a * after_B - c * before_B) / (a * d - b * c)
    noise_B = math.sqrt(1 - fresh**2) * noise_B + fresh * drawn_B
    return c * torch.where(hidden_B, image_B, known_B) + d * noise_B
