"""Random transformers of classes that run by a plan: few layers and narrow heads, the real numbers of heads, and tokens
that no number of ranks divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Planned(NamedTuple):
    """name, config: of the class in diffusers. inputs: of a call, in float32. in_double: whether the class computes in
    float64 where its weights are."""

    name: str
    config: dict[str, Any]
    inputs: Callable[[torch.Generator], dict[str, Any]]
    in_double: bool = True

    def model(self) -> Any:
        import diffusers

        torch.manual_seed(0)
        model = getattr(diffusers, self.name)(**self.config).eval()
        for parameter in model.parameters():  # some start at zero, and what they multiply would not be seen
            if parameter.numel() and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    def call(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return cast(self.inputs(torch.Generator().manual_seed(1)), dtype)


def cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: cast(x, dtype) for name, x in value.items()}
    return [cast(x, dtype) for x in value] if isinstance(value, list) else value


def wan(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 3, 6, 10, generator=g),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 7, 16, generator=g),
    }


def wan_with_a_timestep_for_each_token(g: torch.Generator) -> dict[str, Any]:
    return wan(g) | {"timestep": torch.randint(0, 1000, (1, 45), generator=g)}


def wan_from_an_image(g: torch.Generator) -> dict[str, Any]:
    text = {"encoder_hidden_states": torch.randn(1, 512, 16, generator=g)}
    return wan(g) | text | {"encoder_hidden_states_image": torch.randn(1, 5, 12, generator=g)}


WAN = {
    "num_attention_heads": 12,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
WAN_VACE = WAN | {"vace_layers": [0, 1], "vace_in_channels": 6}
WAN_IMAGE = WAN | {"image_dim": 12, "added_kv_proj_dim": 144}


def wan_vace(g: torch.Generator) -> dict[str, Any]:
    control = torch.randn(1, 6, 3, 6, 10, generator=g)
    return wan(g) | {"control_hidden_states": control, "control_hidden_states_scale": torch.tensor([0.5, 2.0])}


def helios(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 3, 8, 8, generator=g),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 7, 16, generator=g),
        "indices_hidden_states": torch.arange(3)[None] + 20,
        "indices_latents_history_short": torch.arange(2)[None] + 18,
        "indices_latents_history_mid": torch.arange(2)[None] + 16,
        "indices_latents_history_long": torch.arange(16)[None],
        "latents_history_short": torch.randn(1, 4, 2, 8, 8, generator=g),
        "latents_history_mid": torch.randn(1, 4, 2, 8, 8, generator=g),
        "latents_history_long": torch.randn(1, 4, 16, 8, 8, generator=g),
    }


HELIOS = {name: value for name, value in WAN.items() if name != "rope_max_seq_len"} | {"rope_dim": (4, 4, 4)}


def minimax(g: torch.Generator) -> dict[str, Any]:
    order = torch.randperm(29, generator=g)
    tags = torch.empty(29, dtype=torch.long)
    video, text, audio = order[:17], order[17:22], order[22:]
    for tag, where in enumerate((video, text, audio)):
        tags[where] = tag
    return {
        "hidden_states": torch.randn(1, 17, 16, generator=g),
        "audio_hidden_states": torch.randn(1, 7, 6, generator=g),
        "encoder_hidden_states": torch.randn(1, 5, 10, generator=g),
        "timestep": torch.tensor([0.3, 0.9]),
        "timestep_indices": torch.randint(0, 2, (29,), generator=g),
        "token_tags": tags,
        "position_ids": torch.randint(0, 9, (29, 3), generator=g),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


MINIMAX = {
    "num_attention_heads": 14,
    "attention_head_dim": 12,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 32,
    "in_channels": 4,
    "audio_in_channels": 6,
    "text_dim": 10,
    "freq_dim": 16,
    "time_embed_hidden_dim": 24,
    "time_embed_dim": 12,
    "rope_freq_dim": 2,
}


def ltx(g: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 5:] = 0
    return {
        "hidden_states": torch.randn(2, 3 * 5 * 3, 4, generator=g),
        "encoder_hidden_states": torch.randn(2, 9, 10, generator=g),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 5,
        "width": 3,
    }


def ltx_with_a_timestep_for_each_token(g: torch.Generator) -> dict[str, Any]:
    return ltx(g) | {"timestep": torch.randint(0, 1000, (2, 45), generator=g)}


LTX = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 32,
    "attention_head_dim": 4,
    "cross_attention_dim": 128,
    "num_layers": 2,
    "caption_channels": 10,
}


def ltx2(g: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, :3] = 0
    return {
        "hidden_states": torch.randn(1, 3 * 5 * 3, 4, generator=g),
        "audio_hidden_states": torch.randn(1, 11, 6, generator=g),
        "encoder_hidden_states": torch.randn(1, 9, 10, generator=g),
        "audio_encoder_hidden_states": torch.randn(1, 9, 10, generator=g),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": mask,
        "audio_encoder_attention_mask": mask,
        "num_frames": 3,
        "height": 5,
        "width": 3,
        "audio_num_frames": 11,
    }


def ltx2_with_a_timestep_for_each_token(g: torch.Generator) -> dict[str, Any]:
    return ltx2(g) | {"timestep": torch.randint(0, 1000, (1, 45), generator=g), "audio_timestep": torch.tensor([500])}


def ltx2_with_keyframes(g: torch.Generator) -> dict[str, Any]:
    return ltx2(g) | {"video_keyframes_mask": torch.randint(0, 2, (1, 45, 1), generator=g)}


LTX2 = LTX | {
    "audio_in_channels": 6,
    "audio_out_channels": 6,
    "audio_num_attention_heads": 32,
    "audio_attention_head_dim": 2,
    "audio_cross_attention_dim": 64,
    "rope_double_precision": False,
}


def hunyuan_15(g: torch.Generator) -> dict[str, Any]:
    mask, mask_2 = torch.ones(2, 7, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    mask[0, 4:], mask_2[1, 2:] = 0, 0
    return {
        "hidden_states": torch.randn(2, 9, 3, 5, 3, generator=g),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": torch.randn(2, 7, 12, generator=g),
        "encoder_attention_mask": mask,
        "encoder_hidden_states_2": torch.randn(2, 5, 10, generator=g),
        "encoder_attention_mask_2": mask_2,
        "image_embeds": torch.zeros(2, 4, 8),
    }


def hunyuan_15_from_an_image(g: torch.Generator) -> dict[str, Any]:
    return hunyuan_15(g) | {"image_embeds": torch.randn(2, 4, 8, generator=g)}


HUNYUAN_15 = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 16,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "text_embed_dim": 12,
    "text_embed_2_dim": 10,
    "image_embed_dim": 8,
    "rope_axes_dim": (2, 2, 4),
}


def z_image(g: torch.Generator) -> dict[str, Any]:
    return {
        "x": [torch.randn(4, 1, 10, 6, generator=g), torch.randn(4, 1, 10, 6, generator=g)],
        "t": torch.tensor([0.4, 0.4]),
        "cap_feats": [torch.randn(9, 10, generator=g), torch.randn(40, 10, generator=g)],
    }


def z_image_with_a_controlnet(g: torch.Generator) -> dict[str, Any]:
    """Residuals are as long as image and text are together, with padding."""
    return z_image(g) | {"controlnet_block_samples": {0: torch.randn(2, 96, 240, generator=g)}}


Z_IMAGE = {
    "in_channels": 4,
    "dim": 240,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 30,
    "n_kv_heads": 30,
    "cap_feat_dim": 10,
    "axes_dims": [4, 2, 2],
    "axes_lens": [256, 32, 32],
}


def hunyuan(g: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, 8:] = 0
    return {
        "hidden_states": torch.randn(2, 4, 3, 5, 3, generator=g),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, 13, 12, generator=g),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(2, 8, generator=g),
        "guidance": torch.tensor([6000.0, 6000.0]),
    }


HUNYUAN = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 24,
    "attention_head_dim": 8,
    "num_layers": 1,
    "num_single_layers": 2,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "patch_size": 1,
    "text_embed_dim": 12,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (2, 2, 4),
    "guidance_embeds": True,
}


def diffusion_forcing(g: torch.Generator) -> dict[str, Any]:
    return wan(g) | {"timestep": torch.tensor([[100, 400, 900]]), "enable_diffusion_forcing": True}


def cosmos(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 4, 3, 6, 10, generator=g),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 7, 12, generator=g),
        "fps": 24,
    }


def cosmos_with_a_timestep_for_each_frame(g: torch.Generator) -> dict[str, Any]:
    return cosmos(g) | {"timestep": torch.tensor([100, 400, 900]).view(1, 1, 3, 1, 1)}


def cosmos_with_a_controlnet(g: torch.Generator) -> dict[str, Any]:
    return cosmos(g) | {"block_controlnet_hidden_states": [torch.randn(1, 45, 384, generator=g)] * 2}


COSMOS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 32,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 12,
    "adaln_lora_dim": 4,
    "max_size": (4, 16, 16),
    "concat_padding_mask": False,
}


def kandinsky(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(1, 3, 6, 10, 4, generator=g),
        "encoder_hidden_states": torch.randn(1, 7, 12, generator=g),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": torch.randn(1, 8, generator=g),
        "visual_rope_pos": [torch.arange(3), torch.arange(3), torch.arange(5)],
        "text_rope_pos": torch.arange(7),
    }


KANDINSKY = {
    "in_visual_dim": 4,
    "out_visual_dim": 4,
    "in_text_dim": 12,
    "in_text_dim2": 8,
    "time_dim": 16,
    "model_dim": 14 * 12,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (4, 4, 4),
}


def krea(g: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, 4:] = False
    positions = torch.cat([torch.zeros(7, 3), torch.cartesian_prod(*map(torch.arange, (1, 5, 6))).float()])
    return {
        "hidden_states": torch.randn(2, 30, 4, generator=g),
        "encoder_hidden_states": torch.randn(2, 7, 3, 12, generator=g),
        "timestep": torch.tensor([0.5, 0.5]),
        "position_ids": positions,
        "encoder_attention_mask": mask,
    }


KREA = {
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 24,
    "num_key_value_heads": 6,
    "intermediate_size": 32,
    "timestep_embed_dim": 16,
    "text_hidden_dim": 12,
    "num_text_layers": 3,
    "text_num_attention_heads": 3,
    "text_num_key_value_heads": 3,
    "text_intermediate_size": 16,
    "num_layerwise_text_blocks": 1,
    "num_refiner_text_blocks": 1,
    "axes_dims_rope": (4, 2, 2),
}


def cogvideox(g: torch.Generator) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(2, 3, 4, 10, 6, generator=g),
        "encoder_hidden_states": torch.randn(2, 13, 12, generator=g),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": [torch.randn(45, 8, generator=g), torch.randn(45, 8, generator=g)],
    }


COGVIDEOX = {
    "num_attention_heads": 30,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 12,
    "num_layers": 2,
    "sample_width": 6,
    "sample_height": 10,
    "sample_frames": 9,
    "max_text_seq_length": 13,
    "use_rotary_positional_embeddings": True,
}


PLANNED = {
    "cogvideox": Planned("CogVideoXTransformer3DModel", COGVIDEOX, cogvideox),
    "hunyuan": Planned("HunyuanVideoTransformer3DModel", HUNYUAN, hunyuan),
    "skyreels": Planned("SkyReelsV2Transformer3DModel", WAN | {"num_attention_heads": 16}, wan),
    "skyreels, forcing": Planned("SkyReelsV2Transformer3DModel", WAN | {"num_attention_heads": 16}, diffusion_forcing),
    "cosmos": Planned("CosmosTransformer3DModel", COSMOS, cosmos, in_double=False),
    "cosmos, timesteps": Planned(
        "CosmosTransformer3DModel", COSMOS, cosmos_with_a_timestep_for_each_frame, in_double=False
    ),
    "cosmos, controlnet": Planned(
        "CosmosTransformer3DModel", COSMOS | {"controlnet_block_every_n": 1}, cosmos_with_a_controlnet, in_double=False
    ),
    "kandinsky": Planned("Kandinsky5Transformer3DModel", KANDINSKY, kandinsky, in_double=False),
    "krea": Planned("Krea2Transformer2DModel", KREA, krea),
    "wan": Planned("WanTransformer3DModel", WAN, wan),
    "wan, timesteps": Planned("WanTransformer3DModel", WAN, wan_with_a_timestep_for_each_token),
    "wan, image": Planned("WanTransformer3DModel", WAN_IMAGE, wan_from_an_image),
    "wan vace": Planned("WanVACETransformer3DModel", WAN_VACE, wan_vace),
    "chronoedit": Planned("ChronoEditTransformer3DModel", WAN_IMAGE, wan_from_an_image),
    "helios": Planned("HeliosTransformer3DModel", HELIOS, helios),
    "minimax h3": Planned("MiniMaxH3Transformer3DModel", MINIMAX, minimax),
    "ltx": Planned("LTXVideoTransformer3DModel", LTX, ltx),
    "ltx, timesteps": Planned("LTXVideoTransformer3DModel", LTX, ltx_with_a_timestep_for_each_token),
    "ltx-2": Planned("LTX2VideoTransformer3DModel", LTX2, ltx2),
    "ltx-2, timesteps": Planned("LTX2VideoTransformer3DModel", LTX2, ltx2_with_a_timestep_for_each_token),
    "ltx-2, split angles": Planned("LTX2VideoTransformer3DModel", LTX2 | {"rope_type": "split"}, ltx2),
    "ltx-2, keyframes": Planned(
        "LTX2VideoTransformer3DModel", LTX2 | {"use_keyframes_abs_pos_embedding": True}, ltx2_with_keyframes
    ),
    "hunyuan 1.5": Planned("HunyuanVideo15Transformer3DModel", HUNYUAN_15, hunyuan_15),
    "hunyuan 1.5, image": Planned("HunyuanVideo15Transformer3DModel", HUNYUAN_15, hunyuan_15_from_an_image),
    "z-image": Planned("ZImageTransformer2DModel", Z_IMAGE, z_image),
    "z-image, controlnet": Planned("ZImageTransformer2DModel", Z_IMAGE, z_image_with_a_controlnet),
}
