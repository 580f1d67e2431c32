"""The facts about a model family: its adapter, its pipelines, and the sizes that its memory depends on.
`docs/models.md` explains how to add a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NamedTuple

from cocodiff.config.errors import UserError

if TYPE_CHECKING:
    from cocodiff.models.adapter import Adapter

EXPERTS = ("transformer", "transformer_2")  # a pipeline's transformers, which take turns by noise level
INPAINT, GENERATE = "inpaint", "generate"  # the tasks of pipelines
VAE_FACTOR = 8  # pixels of a latent pixel's side, in all families


class Video(NamedTuple):
    """The size of a video. An image is a video of one frame."""

    frames: int  # number of frames
    height: int  # pixels
    width: int  # pixels
    fps: int = 16  # frames per second


@dataclass(frozen=True)
class Pipelines:
    """A set of diffusers' pipeline classes that can load the same weights, and the arguments in which their calls
    differ.

    Arguments that all classes have (`image`, `mask_image`, `strength`, `height`, `generator`, ...) are not listed here.
    """

    generate: str  # diffusers' class for text to image; "" if there is none
    inpaint: str  # diffusers' class for restoring; "" if there is none: `generate` then restores, known pixels are kept
    encoded: tuple[str, ...]  # names, as a call's arguments, of the results of `encode_prompt`; "" for one that is none
    also: Mapping[str, Any] = field(default_factory=dict)  # further arguments of `encode_prompt`
    negative: str | None = None  # negative prompt for guidance, if `encode_prompt` has to be called for it
    guidance: str = "guidance_scale"  # name of the call's argument for the strength of guidance
    others: tuple[str, ...] = ()  # further classes whose folders hold these weights
    animate: str = ""  # diffusers' class for an image and text to video; "" if there is none
    video: Video | None = None  # default size of a video; None for images
    token_video: Video | None = None  # `video` for weights with a timestep for each token (`model_index.json`)
    lacks: str = ""  # why `generate` is "", for the error
    told: bool = True  # True if a family gives these facts, False if they follow from the class
    lists: bool = False  # True if a call takes lists of embeddings, one for each image

    @classmethod
    def of_class(cls, kind: Any) -> Pipelines:
        """Return the facts about a diffusers pipeline class that no family of this project lists, from the signature of
        its call.

        The class is the one that generates, and there is none to inpaint. The signature tells which embeddings a call
        takes, if these are lists, and the default size of a video.

        Args:
            kind: the class.
        """
        takes = signature(kind.__call__).parameters

        def number(name: str, otherwise: int) -> int:
            """Return the default of the argument `name`, or `otherwise` if that is no whole number."""
            default = takes[name].default if name in takes else Parameter.empty
            return default if isinstance(default, int) else otherwise

        encoded = tuple(name for name in takes if name.endswith(("prompt_embeds", "prompt_attention_mask")))
        video = Video(number("num_frames", 49), number("height", 480), number("width", 720))
        lists = "prompt_embeds" in takes and str(takes["prompt_embeds"].annotation).startswith("list[")
        return cls(kind.__name__, "", encoded, video=video if "num_frames" in takes else None, told=False, lists=lists)

    def named(self, values: Sequence[Any]) -> dict[str, Any]:
        """Return the results of `encode_prompt` as keyword arguments for the pipeline's call.

        For a class that no family lists, embeddings, pooled ones and masks are told apart by their shape and dtype. The
        positive prompt's come first.

        Args:
            values: the results, in their order.
        """
        if self.told:
            return dict(zip(self.encoded, values, strict=True))

        def looks(value: Any) -> str:
            """Return the name for a value of the positive prompt, by its shape and dtype."""
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
        """The names of all classes whose folders hold these weights."""
        return tuple(name for name in (self.generate, self.inpaint, *self.others, self.animate) if name)

    def video_of(self, index: Mapping[str, Any]) -> Video | None:
        """Return the default size of the videos that weights make; None for weights that make images.

        Args:
            index: the content of the weights' `model_index.json`.
        """
        return self.token_video if index.get("expand_timesteps") else self.video

    def of_task(self, task: str, model: str, image: bool = False) -> str:
        """Return the name of the diffusers class for a task. Raise UserError if there is none.

        Args:
            task: INPAINT or GENERATE.
            model: the model's name, for the error.
            image: True for the class that makes a video of an image and a text, whatever the task.
        """
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
    """The sizes of a family's VAE, from which its memory is computed, in elements of any dtype.

    They are counted on the published architecture, without weights (`tests/test_peaks.py`).
    """

    parameters: int  # elements of its weights
    # A peak has a copy of a convolution's input in its own layout.
    decoding: int  # elements at the peak of decoding, for each pixel of the image
    encoding: int  # elements at the peak of encoding, for each pixel of the image
    tile: int  # pixels of the side of a tile, if the image is decoded tile by tile
    # These have one more copy, of inputs that a convolution pads itself.
    band: tuple[int, int]  # elements at the peaks of decoding and encoding a band of the image, for each pixel of it
    attention: int  # channels of its attention over all latent pixels
    # Latent frames are computed one by one, and tensors of the last one are kept. The video's frames are not counted.
    video: tuple[int, int] = (0, 0)  # elements at the peaks of decoding and encoding a video, for each pixel of a frame
    factor: int = VAE_FACTOR  # pixels of a latent pixel's side
    frames: int = 1  # frames of a latent frame, but for the first, which has one


# diffusers' AutoencoderKL of SD3, SD3.5 and FLUX.1: 128, 256, 512 and 512 channels, 16 of latents. The peak is the
# convolution of a layer of 256 channels at full resolution.
KL_VAE = VaeSize(parameters=83_819_683, decoding=960, encoding=640, tile=1024, band=(1216, 768), attention=512)


@dataclass(frozen=True)
class Family:
    """One family of transformers that run on several ranks, with all facts about it that commands need.

    The fields from `patch` to `gated_mlp` are facts about the models' shape that their config does not have; see
    `planner.case.ModelShape`.
    """

    transformer: str  # package and name of its class, e.g. "diffusers.SD3Transformer2DModel"
    adapter: Adapter  # its behaviour on several ranks
    pipelines: tuple[Pipelines, ...] = ()  # one for each kind of weights; () if no command runs it
    # names in the config of its VAE
    vae_numbers: tuple[str, ...] = ("scaling_factor", "shift_factor")  # settings that pipelines calculate with
    vae_lists: tuple[str, ...] = ()  # required settings of its VAE with a number for each latent channel
    vae: VaeSize | None = None  # memory of its VAE; None if not known
    token_vae: VaeSize | None = None  # memory of the VAE of weights with a timestep for each token
    patch: int | None = 2  # latent pixels of a token's side; None: `patch_size` of the config
    text_tokens: int = 512  # tokens of the longest prompt
    rows_per_image: int = 1  # batch rows of a call for one image: 2 if guidance puts both halves in one call
    branches: int = 1  # calls of the transformer in a step: 2 if guidance calls it twice
    unsharded_copies: int = 0  # tensors of all image tokens that a rank has before they are cut
    gated_mlp: bool = False  # True if the MLP's hidden layer is the product of two
    unplanned: str = ""  # why `plan` does not know what ranks send and keep; "" if it does

    @property
    def planned(self) -> bool:
        """True if the command `plan` can predict what ranks of this family send and keep."""
        return not self.unplanned

    @property
    def class_name(self) -> str:
        """The name of the transformer's class in diffusers, without its package."""
        return self.transformer.rpartition(".")[2]

    def has(self, kind: type) -> bool:
        """Return True if a class is the family's transformer or derives from it.

        It compares names, so that nothing has to be imported.
        """
        package, _, name = self.transformer.rpartition(".")
        return any(c.__name__ == name and f"{c.__module__}.".startswith(f"{package}.") for c in kind.__mro__)

    def import_transformer(self) -> Any:
        """Import and return the transformer's class."""
        package, _, name = self.transformer.rpartition(".")
        return getattr(import_module(package), name)

    def shape_facts(self, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return, by name, the fields of a ModelShape, the sizes for the planner, that the family decides.

        Args:
            config: the model's config, if there is one.
        """
        names = ("text_tokens", "rows_per_image", "branches", "unsharded_copies", "gated_mlp", "vae")
        patch = self.patch if self.patch is not None else (config or {}).get("patch_size")
        sides = {} if patch is None else {"pixels_per_token": VAE_FACTOR * patch}
        video = {"video": self.pipelines[0].video} if self.pipelines else {}
        return {name: getattr(self, name) for name in names} | sides | video
