"""Qwen-Image: joint attention over text then image tokens in every block, each stream with its own rotary embedding,
and a mask over padded text."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cocodiff.attention.strategy import LazyQKV
from cocodiff.models.adapter import IMAGE, TEXT, Adapter, AttentionProcessor
from cocodiff.models.family import Family, Pipelines, VaeSize
from cocodiff.models.plan import Cut, Gather, Plan
from cocodiff.models.streams import UNTURNED, Rotary, Streams, image_stream, joint_outputs, text_stream

# The model derives text positions from its text's length, so tokens are cut at the first block. The text mask stays
# whole: every rank attends to all tokens.
TOKENS: Plan = {
    "": {"controlnet_block_samples": Cut(tokens=IMAGE)},
    "pos_embed": {0: Cut(0, tokens=IMAGE), 1: Cut(0, tokens=TEXT)},
    "transformer_blocks.0": {"hidden_states": Cut(tokens=IMAGE), "encoder_hidden_states": Cut(tokens=TEXT)},
    "transformer_blocks.*": {"modulate_index": Cut(tokens=IMAGE)},
    "proj_out": Gather(tokens=IMAGE),
}


class QwenImageAdapter(Adapter):
    """The adapter of Qwen-Image, by which several ranks run its transformer: attention to replace, and tokens to
    cut."""

    plan = TOKENS
    attention_kwargs = "attention_kwargs"

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

        return {QwenDoubleStreamAttnProcessor2_0: QwenAttentionProcessor}


class QwenAttentionProcessor(AttentionProcessor):
    """The attention of diffusers' QwenDoubleStreamAttnProcessor2_0, computed by the engine on several ranks."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        image_rotary = text_rotary = UNTURNED
        if image_rotary_emb is not None:
            image_rotary, text_rotary = (Rotary("complex", (table,)) for table in image_rotary_emb)
        parts = text_stream(attn, encoder_hidden_states, text_rotary), image_stream(attn, hidden_states, image_rotary)
        streams = Streams(parts, attn.heads, self.kernels)
        masks = {} if encoder_hidden_states_mask is None else {TEXT: encoder_hidden_states_mask}
        qkv = LazyQKV(streams.q, streams.k, streams.v, self.host.segments, attn.heads, masks)
        return joint_outputs(attn, self.attend(qkv).flatten(-2), encoder_hidden_states.shape[1])


FAMILY = Family(
    transformer="diffusers.QwenImageTransformer2DModel",
    adapter=QwenImageAdapter(),
    pipelines=(
        Pipelines(
            "QwenImagePipeline",
            "QwenImageInpaintPipeline",
            ("prompt_embeds", "prompt_embeds_mask"),
            negative=" ",
            guidance="true_cfg_scale",
            others=("QwenImageImg2ImgPipeline",),
        ),
    ),
    vae_numbers=(),
    vae_lists=("latents_mean", "latents_std"),
    # A video's VAE: its convolutions cover three frames, two of them padding, and keep inputs for the next frame.
    vae=VaeSize(126_892_531, decoding=2021, encoding=1259, tile=256, band=(2021, 1259), attention=384),
    branches=2,  # true classifier-free guidance calls the model twice a step, with a set of caches for each call
    unsharded_copies=1,  # tokens are cut at the first block
)
