"""Qwen-Image: joint attention over text then image tokens in every block, each stream with its own rotary embedding,
and a mask over padded text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from cocodiff.attention.strategy import LazyQKV
from cocodiff.models.adapter import Adapter, Arguments, AttentionProcessor, Hook, Shard
from cocodiff.models.family import Family, Pipelines, VaeSize
from cocodiff.models.norm_rope import Rotary
from cocodiff.models.streams import Stream, Streams
from cocodiff.models.tokens import IMAGE, TEXT


class QwenImageAdapter(Adapter):
    residuals: ClassVar = ("controlnet_block_samples",)
    attention_kwargs = "attention_kwargs"

    def hooks(self, model: Any, shard: Shard) -> Iterable[Hook]:
        """The model derives text positions from its text's length, so tokens are cut at the first block. The text mask
        stays whole: every rank attends to all tokens."""
        first, *others = model.transformer_blocks

        def cut_index(arguments: Arguments) -> Arguments:
            index_BL = arguments.get("modulate_index")
            return arguments if index_BL is None else arguments | {"modulate_index": shard.cut(IMAGE, index_BL)}

        def cut_tokens(arguments: Arguments) -> Arguments:
            return cut_index(arguments) | {
                "hidden_states": shard.cut(IMAGE, arguments["hidden_states"]),
                "encoder_hidden_states": shard.cut(TEXT, arguments["encoder_hidden_states"]),
            }

        def cut_angles(rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            return shard.cut(IMAGE, rotary[0], 0), shard.cut(TEXT, rotary[1], 0)

        yield Hook(model.pos_embed, output=cut_angles)
        yield Hook(first, arguments=cut_tokens)
        yield from (Hook(block, arguments=cut_index) for block in others)

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

        return {QwenDoubleStreamAttnProcessor2_0: QwenAttentionProcessor}


class QwenAttentionProcessor(AttentionProcessor):
    """Does what diffusers' QwenDoubleStreamAttnProcessor2_0 does; attention itself is asked of the engine."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        image_rotary, text_rotary = Rotary(), Rotary()
        if image_rotary_emb is not None:
            image_rotary, text_rotary = (Rotary("complex", (table,)) for table in image_rotary_emb)
        image_BLC, text_BLC = hidden_states, encoder_hidden_states
        added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj, attn.norm_added_q, attn.norm_added_k)
        own = (attn.to_q, attn.to_k, attn.to_v, attn.norm_q, attn.norm_k)
        parts = Stream(text_BLC, *added, text_rotary), Stream(image_BLC, *own, image_rotary)
        streams = Streams(parts, attn.heads, self._kernels)
        masks = {} if encoder_hidden_states_mask is None else {TEXT: encoder_hidden_states_mask}
        qkv = LazyQKV(streams.q, streams.k, streams.v, self._host.segments, attn.heads, masks)
        out_BLC = self._attend(qkv).flatten(-2)
        text_rows = text_BLC.shape[1]
        image_out_BLC = attn.to_out[0](out_BLC[:, text_rows:].contiguous())
        image_out_BLC = attn.to_out[1](image_out_BLC) if len(attn.to_out) > 1 else image_out_BLC
        return image_out_BLC, attn.to_add_out(out_BLC[:, :text_rows].contiguous())


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
    # A video's VAE: convolutions over three frames, two of them padding, whose inputs are kept for the next frame
    vae=VaeSize(126_892_531, decoding=2021, encoding=1259, tile=256, band=(2021, 1259), attention=384),
    branches=2,  # true classifier-free guidance calls the model twice a step: two sets of caches
    unsharded_copies=1,  # tokens are cut at the first block
)
