"""The pipelines that `inpaint` and `generate` know, as data: which class does what, and how it is called.

What the classes have in common (`image`, `mask_image`, `strength`, `height`, `generator`, ...) stands where they are
called; here is what differs between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from cocodiff.errors import UserError

INPAINT, GENERATE = "inpaint", "generate"


@dataclass(frozen=True)
class Family:
    """Pipelines that share their weights.

    generate, inpaint  diffusers' class for text to image and for restoring; "" where there is none, and `lacks` says so
    encoded            what the pipeline's `encode_prompt` returns, as a call's arguments; "" for what it makes itself
    also               further arguments that `encode_prompt` wants to be given; None each
    negative           the prompt that guidance leads away from, where `encode_prompt` has to be called for it
    guidance           the call's argument for the strength of guidance
    others             further classes whose folders hold these weights
    """

    generate: str
    inpaint: str
    encoded: tuple[str, ...]
    also: tuple[str, ...] = ()
    negative: str | None = None
    guidance: str = "guidance_scale"
    others: tuple[str, ...] = ()
    lacks: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        """All classes whose folders hold these weights."""
        return tuple(name for name in (self.generate, self.inpaint, *self.others) if name)

    def pipeline(self, task: str, model: str) -> str:
        """The class that does a task. Raises UserError where diffusers has none for these weights."""
        name = self.inpaint if task == INPAINT else self.generate
        if not name:
            raise UserError(f"model {model} cannot {task}: {self.lacks}")
        return name


FAMILIES = (
    Family(
        "StableDiffusion3Pipeline",
        "StableDiffusion3InpaintPipeline",
        ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
        also=("prompt_2", "prompt_3"),
        others=("StableDiffusion3Img2ImgPipeline",),
    ),
    Family(
        "FluxPipeline",
        "FluxInpaintPipeline",
        ("prompt_embeds", "pooled_prompt_embeds", ""),
        others=("FluxImg2ImgPipeline",),
    ),
    Family(
        "",
        "FluxFillPipeline",
        ("prompt_embeds", "pooled_prompt_embeds", ""),
        lacks="FluxFillPipeline's weights only restore; FluxPipeline's (FLUX.1-dev) generate",
    ),
    Family(
        "Flux2Pipeline",
        "",
        ("prompt_embeds", ""),
        lacks="diffusers has no inpainting pipeline for FLUX.2-dev; it has one for FLUX.2-klein (Flux2KleinPipeline)",
    ),
    Family("Flux2KleinPipeline", "Flux2KleinInpaintPipeline", ("prompt_embeds", ""), negative=""),
    Family(
        "QwenImagePipeline",
        "QwenImageInpaintPipeline",
        ("prompt_embeds", "prompt_embeds_mask"),
        negative=" ",
        guidance="true_cfg_scale",
        others=("QwenImageImg2ImgPipeline",),
    ),
)


def family_of(pipeline: str, model: str) -> Family:
    """The family of the class that a model's `model_index.json` names. Raises UserError for others."""
    for family in FAMILIES:
        if pipeline in family.classes:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.classes)
    raise UserError(f"model {model} is a {pipeline or 'pipeline of no name'}; known: {known}")
