"""Wan 2.1 and 2.2: videos from text, or from a first frame and text. Both run by a plan."""

from __future__ import annotations

from cocodiff.models.by_plan import PlanAdapter
from cocodiff.models.family import Family, Pipelines
from cocodiff.models.plans import WAN

FAMILY = Family(
    transformer="diffusers.WanTransformer3DModel",
    adapter=PlanAdapter(WAN),
    pipelines=(
        Pipelines(
            "WanPipeline",
            "",
            ("prompt_embeds", ""),
            also={"do_classifier_free_guidance": False, "max_sequence_length": 512},
            negative="",
            animate="WanImageToVideoPipeline",
            video=(81, 480, 832),
            lacks="diffusers has no inpainting pipeline for Wan",
        ),
    ),
    vae_numbers=(),
    vae_lists=("latents_mean", "latents_std"),
    text_tokens=0,  # attention over the text exchanges nothing
    branches=2,  # guidance calls the model twice a step
)
