"""Wan 2.1 and 2.2: videos from text, or from a first frame and text. Both run by a plan."""

from __future__ import annotations

from cocodiff.models.by_plan import PlanAdapter
from cocodiff.models.family import Family, Pipelines, VaeSize, Video
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
            video=Video(81, 480, 832),
            token_video=Video(121, 704, 1280, 24),
        ),
    ),
    vae_numbers=(),
    vae_lists=("latents_mean", "latents_std"),
    vae=VaeSize(126_892_531, 2021, 1259, 256, (2021, 1259), 384, (5254, 3910), frames=4),
    token_vae=VaeSize(704_688_668, 1780, 613, 256, (1780, 613), 1024, (5649, 1984), factor=16, frames=4),
    text_tokens=0,  # attention over the text exchanges nothing
    branches=2,  # guidance calls the model twice a step
    unsharded_copies=2,  # the patches' output, and its contiguous copy for the first block, where tokens are cut
)
