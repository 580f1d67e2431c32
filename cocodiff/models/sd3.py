"""Stable Diffusion 3 and 3.5: joint attention over image then text tokens, no rotary embedding."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cocodiff.attention.strategy import LazyQKV
from cocodiff.models.adapter import IMAGE, TEXT, Adapter, Arguments, AttentionProcessor, image_and_text
from cocodiff.models.family import KL_VAE, Family, Pipelines
from cocodiff.models.plan import Cut, Gather, Plan
from cocodiff.models.streams import Streams, image_stream, text_stream
from cocodiff.topology.layout import Segments

TOKENS: Plan = {
    "": {"block_controlnet_hidden_states": Cut(tokens=IMAGE)},
    "pos_embed": {0: Cut(tokens=IMAGE)},
    "context_embedder": {0: Cut(tokens=TEXT)},
    "proj_out": Gather(tokens=IMAGE),
}


class SD3Adapter(Adapter):
    """The adapter of Stable Diffusion 3 and 3.5, by which several ranks run them: attention to replace, and tokens to
    cut."""

    plan = TOKENS

    def segments(self, model: Any, arguments: Arguments) -> Segments:
        height, width = arguments["hidden_states"].shape[-2:]
        patch = model.config.patch_size
        return image_and_text((height // patch) * (width // patch), arguments["encoder_hidden_states"].shape[1])

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        from diffusers.models.attention_processor import JointAttnProcessor2_0

        return {JointAttnProcessor2_0: SD3AttentionProcessor}


class SD3AttentionProcessor(AttentionProcessor):
    """The attention of diffusers' JointAttnProcessor2_0, computed by the engine on several ranks.

    It is joint attention over image and text and, in SD3.5's dual layers, the second attention over image tokens alone.
    """

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        image_BLC, text_BLC = hidden_states, encoder_hidden_states
        parts = [image_stream(attn, image_BLC)]
        if text_BLC is not None:
            parts.append(text_stream(attn, text_BLC))
        streams, segments = Streams(parts, attn.heads, self.kernels), self.host.segments
        qkv = LazyQKV(streams.q, streams.k, streams.v, segments[:1] if text_BLC is None else segments, attn.heads)
        out_BLC = self.attend(qkv).flatten(-2)
        image_out_BLC = attn.to_out[1](attn.to_out[0](out_BLC[:, : image_BLC.shape[1]]))
        if text_BLC is None:
            return image_out_BLC
        text_out_BLC = out_BLC[:, image_BLC.shape[1] :]
        return image_out_BLC, text_out_BLC if attn.context_pre_only else attn.to_add_out(text_out_BLC)


FAMILY = Family(
    transformer="diffusers.SD3Transformer2DModel",
    adapter=SD3Adapter(),
    pipelines=(
        Pipelines(
            "StableDiffusion3Pipeline",
            "StableDiffusion3InpaintPipeline",
            ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
            also={"prompt_2": None, "prompt_3": None},
            others=("StableDiffusion3Img2ImgPipeline",),
        ),
    ),
    vae=KL_VAE,
    patch=None,
    text_tokens=333,  # 77 of CLIP and 256 of T5
    rows_per_image=2,  # classifier-free guidance puts both halves in one call
    unsharded_copies=3,  # the patches' output, their positions, and the sum
)
