"""FLUX.1: double blocks with joint attention over text then image tokens; single blocks with one stream of both and an
MLP beside attention. A rotary embedding covers all tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from cocodiff.attention.strategy import LazyQKV, nothing
from cocodiff.models.adapter import IMAGE, TEXT, Adapter, Arguments, AttentionProcessor, Forward
from cocodiff.models.family import KL_VAE, Family, Pipelines
from cocodiff.models.plan import Cut, Gather, Plan
from cocodiff.models.streams import UNTURNED, Once, Rotary, Streams, heads_of, image_stream, joint_outputs, text_stream

Angles = tuple[Tensor, Tensor]  # cos and sin, each [L, D], of this rank's text then image rows
# Tokens and their positions, [S, n] or [B, S, n]; and a ControlNet's residuals.
CALL = {
    "hidden_states": Cut(tokens=IMAGE),
    "encoder_hidden_states": Cut(tokens=TEXT),
    "img_ids": Cut(-2, tokens=IMAGE),
    "txt_ids": Cut(-2, tokens=TEXT),
}
RESIDUALS = dict.fromkeys(("controlnet_block_samples", "controlnet_single_block_samples"), Cut(tokens=IMAGE))
TOKENS: Plan = {"": CALL | RESIDUALS, "proj_out": Gather(tokens=IMAGE)}


class FluxAdapter(Adapter):
    """The adapter of FLUX.1, by which several ranks run its transformer: attention to replace, and tokens to cut."""

    plan = TOKENS

    def attention_arguments(self, model: Any) -> set[str]:
        # An IP-Adapter takes its image's embeddings, and what `encoder_hid_proj` makes of them.
        loaded = getattr(model, "encoder_hid_proj", None) is not None
        return {"scale", "ip_adapter_image_embeds", "ip_hidden_states"} if loaded else {"scale"}

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor

        return {FluxAttnProcessor: FluxAttentionProcessor, FluxIPAdapterAttnProcessor: FluxIPAdapterProcessor}

    def blocks(self) -> dict[type, Forward]:
        from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock

        return {FluxSingleTransformerBlock: single_block}


class FluxAttentionProcessor(AttentionProcessor):
    """The attention of diffusers' FluxAttnProcessor, FluxIPAdapterAttnProcessor and Flux2AttnProcessor, computed by the
    engine on several ranks.

    In single blocks the hidden states are text and image rows in one. An IP-Adapter needs no exchange: every rank has
    all tokens of the prompting images, and its own tokens attend to these while q and k are sent.
    """

    takes_images: ClassVar[bool] = False  # True with an IP-Adapter

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles | None = None,
        meanwhile: Callable[[], object] = nothing,
        ip_hidden_states: Sequence[Tensor] = (),
    ) -> Any:
        text_BLC, rotary = encoder_hidden_states, rotary_of(image_rotary_emb)
        text_rows = 0 if text_BLC is None else text_BLC.shape[1]
        parts = [image_stream(attn, hidden_states, rotary.rows(slice(text_rows, None)))]
        is_prompted = self.takes_images and text_BLC is not None
        if is_prompted:
            to_q = cache(attn.to_q)  # used twice
            parts = [parts[0]._replace(to_q=to_q)]
            meanwhile = cache(lambda: prompted(self.replaced, attn, to_q(hidden_states), ip_hidden_states))
        if text_BLC is not None:
            parts = [text_stream(attn, text_BLC, rotary.rows(slice(text_rows))), *parts]
        streams = Streams(parts, attn.heads, self.kernels)
        qkv = LazyQKV(streams.q, streams.k, streams.v, self.host.segments, attn.heads, meanwhile=meanwhile)
        out_BLC = self.attend(qkv).flatten(-2)
        if text_BLC is None:
            return out_BLC
        both = joint_outputs(attn, out_BLC, text_rows)
        return (*both, meanwhile()) if is_prompted else both


class FluxIPAdapterProcessor(FluxAttentionProcessor, nn.Module):
    """The attention processor for FLUX.1 with an IP-Adapter, which prompts by images.

    It is a module, since the weights of the processor that it replaces are part of the model.
    """

    takes_images = True

    def __init__(self, *args: Any) -> None:
        nn.Module.__init__(self)
        super().__init__(*args)

    @property
    def scale(self) -> list[float]:
        """The weight of each adapter's image, as diffusers' `set_ip_adapter_scale` has set it."""
        return self.replaced.scale

    @scale.setter
    def scale(self, scale: list[float]) -> None:
        self.replaced.scale = scale


def prompted(adapters: Any, attn: Any, q_BLC: Tensor, images: Sequence[Tensor]) -> Tensor:
    """Return the attention of this rank's tokens to the prompting images, summed over the IP-Adapters: [B, L, C].

    Args:
        adapters: diffusers' processor with the adapters' weights and scales.
        attn: diffusers' attention module.
        q_BLC: the tokens' queries before normalisation.
        images: for each adapter, the tokens of its images.
    """
    q_BHLD, out_BLC = attn.norm_q(heads_of(q_BLC, attn.heads)).transpose(1, 2), torch.zeros_like(q_BLC)
    for x, scale, *to_kv in zip(images, adapters.scale, adapters.to_k_ip, adapters.to_v_ip, strict=False):
        k, v = (heads_of(to(x).flatten(1, -2), attn.heads).transpose(1, 2) for to in to_kv)
        attended = functional.scaled_dot_product_attention(q_BHLD, k, v)
        out_BLC = out_BLC + scale * attended.transpose(1, 2).flatten(2)
    return out_BLC


def rotary_of(angles: Angles | None) -> Rotary:
    """Return cos and sin of all this rank's rows as a rotary embedding; None gives the one that rotates nothing."""
    return UNTURNED if angles is None else Rotary("pairs", angles)


def single_block(
    block: Any,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor,
    temb: Tensor,
    image_rotary_emb: Angles | None = None,
    joint_attention_kwargs: Arguments | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute diffusers' FluxSingleTransformerBlock. Return the text's and the image's rows, each [B, L, C].

    Its MLP, which needs no attention, is computed while q and k are sent.
    """
    text_rows = encoder_hidden_states.shape[1]
    x_BLC = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    normed_BLC, gate_BC = block.norm(x_BLC, emb=temb)
    mlp_BLC = Once(lambda: block.act_mlp(block.proj_mlp(normed_BLC)))
    out_BLC = block.attn(
        hidden_states=normed_BLC, image_rotary_emb=image_rotary_emb, meanwhile=mlp_BLC, **joint_attention_kwargs or {}
    )
    x_BLC = x_BLC + gate_BC[:, None] * block.proj_out(torch.cat([out_BLC, mlp_BLC()], dim=2))
    if x_BLC.dtype == torch.float16:
        x_BLC = x_BLC.clip(-65504, 65504)
    return x_BLC[:, :text_rows], x_BLC[:, text_rows:]


ENCODED = ("prompt_embeds", "pooled_prompt_embeds", "")
FAMILY = Family(
    transformer="diffusers.FluxTransformer2DModel",
    adapter=FluxAdapter(),
    pipelines=(
        Pipelines("FluxPipeline", "FluxInpaintPipeline", ENCODED, others=("FluxImg2ImgPipeline",)),
        Pipelines(
            "",
            "FluxFillPipeline",
            ENCODED,
            lacks="FluxFillPipeline's weights only restore; FluxPipeline's (FLUX.1-dev) generate",
        ),
    ),
    vae=KL_VAE,
)
