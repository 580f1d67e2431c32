"""What the project knows of a model family, said once: how it is run in parallel, which pipelines it has, and what
its memory depends on. `docs/models.md` tells how a family is added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.config.errors import UserError

if TYPE_CHECKING:
    from cocodiff.models.adapter import Adapter

EXPERTS = ("transformer", "transformer_2")  # of a pipeline: they take turns in a run, each for some noise levels
INPAINT, GENERATE = "inpaint", "generate"  # the tasks of pipelines
VAE_FACTOR = 8  # pixels of a latent pixel's side, of all families


class Video(NamedTuple):
    """What is made: so many frames of so many pixels, and frames a second. An image is a video of one frame."""

    frames: int
    height: int
    width: int
    fps: int = 16


@dataclass(frozen=True)
class Pipelines:
    """Pipelines of diffusers that have the same weights, and how they are called.

    Arguments that all classes have (`image`, `mask_image`, `strength`, `height`, `generator`, ...) stand where the
    pipelines are called; here is what differs between them.

    generate, inpaint  diffusers' class for text to image and for restoring; "" where there is none. What is restored
                       without one: what generates keeps what is known. What cannot generate, `lacks` says
    encoded            what `encode_prompt` returns, as a call's arguments; "" for what a call makes itself. Of a class
                       that no family tells of, what its call takes
    also               further arguments of `encode_prompt`
    negative           the prompt that guidance leads away from, where `encode_prompt` has to be called for it
    guidance           the call's argument for the strength of guidance
    others             further classes whose folders hold these weights
    animate            diffusers' class for an image and text to video; "" where there is none
    video              what a video is, unless a call says otherwise; None for images
    token_video        the same of weights that take a timestep for each token, as `model_index.json` says
    """

    generate: str
    inpaint: str
    encoded: tuple[str, ...]
    also: Mapping[str, Any] = field(default_factory=dict)
    negative: str | None = None
    guidance: str = "guidance_scale"
    others: tuple[str, ...] = ()
    animate: str = ""
    video: Video | None = None
    token_video: Video | None = None
    lacks: str = ""
    told: bool = True  # by a family; else by the class alone
    lists: bool = False  # of embeddings, one for each image, are what a call takes

    @classmethod
    def of_class(cls, kind: Any) -> Pipelines:
        """Of a class of diffusers that no family tells of, by the arguments of its call."""
        takes = signature(kind.__call__).parameters

        def number(name: str, otherwise: int) -> int:
            default = takes[name].default if name in takes else Parameter.empty
            return default if isinstance(default, int) else otherwise

        encoded = tuple(name for name in takes if name.endswith(("prompt_embeds", "prompt_attention_mask")))
        video = Video(number("num_frames", 49), number("height", 480), number("width", 720))
        lists = "prompt_embeds" in takes and str(takes["prompt_embeds"].annotation).startswith("list[")
        return cls(kind.__name__, "", encoded, video=video if "num_frames" in takes else None, told=False, lists=lists)

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """What `encode_prompt` has returned, by the arguments of a call. Of a class that no family tells of, masks,
        pooled embeddings and others are told by what they look like; of each the positive prompt's come first."""
        if self.told:
            return dict(zip(self.encoded, values, strict=True))

        def looks(value: Any) -> str:
            if isinstance(value, list) or value.ndim > 2:
                return "prompt_embeds"
            return "pooled_prompt_embeds" if value.is_floating_point() else "prompt_attention_mask"

        found: dict[str, Any] = {}
        for value in values:
            if value is not None and len(value):
                name = looks(value)
                found[f"negative_{name}" if name in found else name] = value
        return {name: value for name, value in found.items() if name in self.encoded}

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes whose folders hold these weights."""
        return tuple(name for name in (self.generate, self.inpaint, *self.others, self.animate) if name)

    def video_of(self, index: Mapping[str, Any]) -> Video | None:
        """What the weights of a `model_index.json` make, unless a call says otherwise; None for images."""
        return self.token_video if index.get("expand_timesteps") else self.video

    def of_task(self, task: str, model: str, image: bool = False) -> str:
        """The class that does a task, from an image where one is given. Raises UserError where diffusers has none."""
        if image:
            if not self.animate:
                raise UserError(f"--image: model {model} makes images from text alone: leave it away")
            return self.animate
        name = self.inpaint if task == INPAINT else self.generate
        if not name:
            raise UserError(f"model {model} cannot {task}: {self.lacks}")
        return name


@dataclass(frozen=True)
class VaeSize:
    """What a family's VAE takes, in numbers of whatever dtype: counted on the published architecture, without weights
    (`tests/test_peaks.py`).

    parameters          numbers that its weights hold
    decoding, encoding  numbers that live at the peak for each pixel of the image, with a copy of a convolution's input
                        in the layout that it computes in
    tile                pixels of the side of a tile, where it decodes in tiles
    band                numbers that live at the peaks of decoding and encoding for each pixel of a band, where it
                        decodes in bands: a convolution that pads by itself copies its input once more there
    attention           channels of its attention over all latent pixels
    video               numbers that live at the peaks of decoding and encoding a video for each pixel of a frame,
                        beside its frames: latent frames are computed one by one, with what is kept of the last one
    factor, frames      pixels of a latent pixel's side, and frames of a latent frame, of which the first one has one
    """

    parameters: int
    decoding: int
    encoding: int
    tile: int
    band: tuple[int, int]
    attention: int
    video: tuple[int, int] = (0, 0)
    factor: int = VAE_FACTOR
    frames: int = 1


# diffusers' AutoencoderKL as SD3, SD3.5 and FLUX.1 have it: 128, 256, 512 and 512 channels, 16 of latents. At the peak
# a layer of 256 channels at full resolution is convolved.
KL_VAE = VaeSize(parameters=83_819_683, decoding=960, encoding=640, tile=1024, band=(1216, 768), attention=512)


@dataclass(frozen=True)
class Family:
    """One family of transformers.

    transformer        its class with the package that has it, e.g. "diffusers.SD3Transformer2DModel"
    adapter            how it is run on several ranks
    pipelines          for each kind of weights; empty for a transformer that no command runs
    vae_numbers        settings of its VAE that pipelines calculate with
    vae_lists          settings of its VAE that hold a number for each latent channel, and that have to be there
    vae                what its VAE takes of memory; None where that is not known. token_vae: the same of weights that
                       take a timestep for each token

    Of its models' shape, what their config does not say (`planner.memory.ModelShape` tells of each):

    patch              latent pixels of a token's side; None: `patch_size` of the config
    text_tokens, rows_per_image, branches, unsharded_copies, gated_mlp

    unplanned          why `plan` does not know what its ranks send and keep; empty where it does
    """

    transformer: str
    adapter: Adapter
    pipelines: tuple[Pipelines, ...] = ()
    vae_numbers: tuple[str, ...] = ("scaling_factor", "shift_factor")
    vae_lists: tuple[str, ...] = ()
    vae: VaeSize | None = None
    token_vae: VaeSize | None = None
    patch: int | None = 2
    text_tokens: int = 512
    rows_per_image: int = 1
    branches: int = 1
    unsharded_copies: int = 0
    gated_mlp: bool = False
    unplanned: str = ""

    @property
    def planned(self) -> bool:
        return not self.unplanned

    @property
    def class_name(self) -> str:
        return self.transformer.rpartition(".")[2]

    def has(self, kind: type) -> bool:
        """Whether a model's class is the family's transformer or derives from it. Imports nothing: where the class is
        not in memory, nothing derives from it."""
        package, _, name = self.transformer.rpartition(".")
        return any(c.__name__ == name and f"{c.__module__}.".startswith(f"{package}.") for c in kind.__mro__)

    def import_transformer(self) -> Any:
        """The transformer's class."""
        package, _, name = self.transformer.rpartition(".")
        return getattr(import_module(package), name)

    def shape_facts(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The fields of a ModelShape that the family decides. config: the model's, where there is one."""
        names = ("text_tokens", "rows_per_image", "branches", "unsharded_copies", "gated_mlp", "vae")
        patch = self.patch if self.patch is not None else (config or {}).get("patch_size")
        sides = {} if patch is None else {"pixels_per_token": VAE_FACTOR * patch}
        video = {"video": self.pipelines[0].video} if self.pipelines else {}
        return {name: getattr(self, name) for name in names} | sides | video
