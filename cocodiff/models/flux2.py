"""FLUX.2 (dev and klein): FLUX.1's double blocks, and single blocks with one linear layer for q, k, v and the MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cocodiff.attention.strategy import LazyQKV
from cocodiff.models.adapter import IMAGE, Adapter, AttentionProcessor
from cocodiff.models.family import KL_VAE, Family, Pipelines
from cocodiff.models.flux import CALL, Angles, FluxAttentionProcessor, rotary_of
from cocodiff.models.plan import Gather, Plan
from cocodiff.models.streams import FusedLinear, heads_of, norm_rope

TOKENS: Plan = {"": CALL, "proj_out": Gather(tokens=IMAGE)}


class Flux2Adapter(Adapter):
    """The adapter of FLUX.2, by which several ranks run its transformer: attention to replace, and tokens to cut."""

    unsupported: ClassVar = {
        "kv_cache_mode": "the cache of reference images' keys and values is for all tokens, a rank holds some: "
        "run without it"
    }
    plan = TOKENS

    def processors(self) -> dict[type, type[AttentionProcessor]]:
        from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor

        return {Flux2AttnProcessor: FluxAttentionProcessor, Flux2ParallelSelfAttnProcessor: Flux2SingleProcessor}


class Flux2SingleProcessor(AttentionProcessor):
    """The attention of diffusers' Flux2ParallelSelfAttnProcessor, computed by the engine on several ranks.

    If v is needed first, it is computed from its own rows of the fused weight. The MLP needs no attention: it is
    computed while q and k are sent.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Angles | None = None,
    ) -> Tensor:
        width = attn.inner_dim
        fused = FusedLinear(attn.to_qkv_mlp_proj, hidden_states)
        rotary = rotary_of(image_rotary_emb)
        qk_BLC = cache(lambda: fused.channels(0, 2 * width))  # used twice, computed once
        mlp_BLC = cache(lambda: attn.mlp_act_fn(fused.channels(3 * width, None)))

        def rotated(norm: nn.Module, x_BLC: Tensor) -> Tensor:
            return norm_rope(heads_of(x_BLC, attn.heads), norm, rotary, self.kernels)

        qkv = LazyQKV(
            q=lambda: rotated(attn.norm_q, qk_BLC()[..., :width]),
            k=lambda: rotated(attn.norm_k, qk_BLC()[..., width:]),
            v=lambda: heads_of(fused.channels(2 * width, 3 * width), attn.heads),
            segments=self.host.segments,
            heads=attn.heads,
            meanwhile=mlp_BLC,
        )
        out_BLC = self.attend(qkv).flatten(-2)
        return attn.to_out(torch.cat([out_BLC, mlp_BLC()], dim=-1))


FAMILY = Family(
    transformer="diffusers.Flux2Transformer2DModel",
    adapter=Flux2Adapter(),
    pipelines=(
        Pipelines("Flux2Pipeline", "", ("prompt_embeds", "")),
        Pipelines("Flux2KleinPipeline", "Flux2KleinInpaintPipeline", ("prompt_embeds", ""), negative=""),
    ),
    vae_numbers=("batch_norm_eps",),
    vae=replace(KL_VAE, parameters=84_046_115),  # the layers of AutoencoderKL
    gated_mlp=True,
)
