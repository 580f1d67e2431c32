"""Stable Diffusion 3 and 3.5: joint attention over image then text tokens, no rotary embedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff.attention.strategy import LazyQKV
from cocodiff.errors import UserError
from cocodiff.models.adapter import Attend, Tokens


class SD3Adapter:
    def matches(self, model: nn.Module) -> bool:
        from diffusers import SD3Transformer2DModel

        return isinstance(model, SD3Transformer2DModel)

    def processors(self, model: Any, attend: Attend, tokens: Callable[[], Tokens]) -> dict[str, Any]:
        from diffusers.models.attention_processor import JointAttnProcessor2_0

        for name, processor in model.attn_processors.items():
            if type(processor) is not JointAttnProcessor2_0:
                raise UserError(
                    f"{name} is a {type(processor).__name__}, which has no parallel form (plain joint attention has): "
                    f"unload the adapter or unfuse the projections that put it there, then parallelize"
                )
        return {
            name: SD3AttentionProcessor(attend, tokens, name.removesuffix(".processor"))
            for name in model.attn_processors
        }

    def image_entry(self, model: Any) -> nn.Module:
        return model.pos_embed

    def text_entry(self, model: Any) -> nn.Module:
        return model.context_embedder

    def image_exit(self, model: Any) -> nn.Module:
        return model.proj_out

    def check_call(self, arguments: dict[str, Any]) -> None:
        if arguments.get("block_controlnet_hidden_states") is not None:
            raise UserError("ControlNet residuals are for all tokens, a rank holds some: run without a ControlNet")
        if arguments.get("joint_attention_kwargs"):
            keys = ", ".join(sorted(arguments["joint_attention_kwargs"]))
            raise UserError(f"joint_attention_kwargs ({keys}) reach no parallel attention processor: run without them")


class SD3AttentionProcessor:
    """Does what diffusers' JointAttnProcessor2_0 does; attention itself is asked of the engine.

    Serves the joint attention and, in SD3.5's dual layers, the second one over image tokens alone.
    """

    def __init__(self, attend: Attend, tokens: Callable[[], Tokens], layer: str) -> None:
        self._attend, self._tokens, self._layer = attend, tokens, layer

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        image_BLC, text_BLC = hidden_states, encoder_hidden_states

        def project(to_image: nn.Module, to_text: nn.Module | None, norm: Any, norm_text: Any) -> Tensor:
            x_BLHD = to_image(image_BLC).unflatten(-1, (attn.heads, -1))
            x_BLHD = x_BLHD if norm is None else norm(x_BLHD)
            if text_BLC is None or to_text is None:
                return x_BLHD
            text_BLHD = to_text(text_BLC).unflatten(-1, (attn.heads, -1))
            text_BLHD = text_BLHD if norm_text is None else norm_text(text_BLHD)
            return torch.cat([x_BLHD, text_BLHD], dim=1)

        tokens = self._tokens()
        joint = text_BLC is not None
        qkv = LazyQKV(
            q=lambda: project(attn.to_q, attn.add_q_proj if joint else None, attn.norm_q, attn.norm_added_q),
            k=lambda: project(attn.to_k, attn.add_k_proj if joint else None, attn.norm_k, attn.norm_added_k),
            v=lambda: project(attn.to_v, attn.add_v_proj if joint else None, None, None),
            image_tokens=tokens.image,
            text_tokens=tokens.text if joint else 0,
            heads=attn.heads,
        )
        out_BLC = self._attend(qkv, self._layer).flatten(-2)
        image_out_BLC = attn.to_out[1](attn.to_out[0](out_BLC[:, : image_BLC.shape[1]]))
        if not joint:
            return image_out_BLC
        text_out_BLC = out_BLC[:, image_BLC.shape[1] :]
        return image_out_BLC, text_out_BLC if attn.context_pre_only else attn.to_add_out(text_out_BLC)
