"""Random transformers of classes that run by a plan: few layers and narrow heads, the real numbers of heads, and tokens
that no number of ranks divides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tiny_models import small
from torch import Tensor
from torch.utils import _pytree as pytree


class Planned(NamedTuple):
    """name: of the class in diffusers. config: settings beside those that `small` knows. inputs: of a call, in float32;
    functions are called with a random generator. in_double: whether the class computes in float64 where its weights
    are."""

    name: str
    config: dict[str, Any]
    inputs: dict[str, Any]
    in_double: bool = True

    def variant(self, inputs: dict[str, Any], **config: Any) -> Planned:
        return self._replace(inputs=self.inputs | inputs, config=self.config | config)

    def model(self) -> Any:
        torch.manual_seed(0)
        model = small(self.name, self.config).eval()
        for parameter in model.parameters():  # some start at zero, and what they multiply would not be seen
            if parameter.numel() and not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    def call(self, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        drawn = pytree.tree_map_only(partial, lambda draw: draw(generator=generator), self.inputs)
        return cast(drawn, dtype)


def cast(call: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A copy, whose real numbers are of a dtype."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype, copy=True) if x.is_floating_point() else x.clone(), call)


def noise(*shape: int) -> Callable[..., Tensor]:
    return partial(torch.randn, *shape)


def whole(below: int, *shape: int) -> Callable[..., Tensor]:
    return partial(torch.randint, 0, below, shape)


def mask(tokens: int, *lengths: int) -> Tensor:
    """Each row's first tokens are its text."""
    return (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()


OF_WAN = {"num_attention_heads": 12, "attention_head_dim": 12, "rope_max_seq_len": 32}
FROM_IMAGE = {"encoder_hidden_states": noise(1, 512, 16), "encoder_hidden_states_image": noise(1, 5, 12)}
IMAGE = {"image_dim": 12, "added_kv_proj_dim": 144}
WAN = Planned(
    "WanTransformer3DModel",
    OF_WAN,
    {"hidden_states": noise(1, 4, 3, 6, 10), "timestep": torch.tensor([500]), "encoder_hidden_states": noise(1, 7, 16)},
)
VACE = {"control_hidden_states": noise(1, 6, 3, 6, 10), "control_hidden_states_scale": torch.tensor([0.5, 2.0])}
SKYREELS = WAN._replace(name="SkyReelsV2Transformer3DModel").variant({}, num_attention_heads=16)
FORCING = {"timestep": torch.tensor([[100, 400, 900]]), "enable_diffusion_forcing": True}
HISTORY = {"short": (18, 2), "mid": (16, 2), "long": (0, 16)}  # the first frame and the number of frames
HELIOS = Planned(
    "HeliosTransformer3DModel",
    {"num_attention_heads": 12, "attention_head_dim": 12, "rope_dim": (4, 4, 4)},
    {
        "hidden_states": noise(1, 4, 3, 8, 8),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 7, 16),
        "indices_hidden_states": torch.arange(3)[None] + 20,
        **{f"indices_latents_history_{of}": torch.arange(n)[None] + first for of, (first, n) in HISTORY.items()},
        **{f"latents_history_{of}": noise(1, 4, n, 8, 8) for of, (_, n) in HISTORY.items()},
    },
)
MIXED = torch.randperm(29, generator=torch.Generator().manual_seed(1))  # 17 tokens of video, 5 of text, 7 of audio
OF_MINIMAX = {"num_attention_heads": 14, "attention_head_dim": 12, "hidden_size": 24, "rope_freq_dim": 2}
MINIMAX = Planned(
    "MiniMaxH3Transformer3DModel",
    OF_MINIMAX | {"audio_in_channels": 6, "text_dim": 10, "time_embed_hidden_dim": 24, "time_embed_dim": 12},
    {
        "hidden_states": noise(1, 17, 16),
        "audio_hidden_states": noise(1, 7, 6),
        "encoder_hidden_states": noise(1, 5, 10),
        "timestep": torch.tensor([0.3, 0.9]),
        "timestep_indices": whole(2, 29),
        "token_tags": torch.tensor([0] * 17 + [1] * 5 + [2] * 7)[MIXED.argsort()],
        "position_ids": whole(9, 29, 3),
        "video_indices": MIXED[:17],
        "audio_indices": MIXED[22:],
        "text_indices": MIXED[17:22],
    },
)
GRID = {"num_frames": 3, "height": 5, "width": 3}
OF_LTX = {"attention_head_dim": 4, "cross_attention_dim": 128, "caption_channels": 10, "num_attention_heads": 32}
LTX = Planned(
    "LTXVideoTransformer3DModel",
    OF_LTX,
    {
        "hidden_states": noise(2, 3 * 5 * 3, 4),
        "encoder_hidden_states": noise(2, 9, 10),
        "timestep": torch.tensor([500, 500]),
        "encoder_attention_mask": mask(9, 5, 9),
    }
    | GRID,
)
AUDIO = {"in_channels": 6, "out_channels": 6, "num_attention_heads": 32, "attention_head_dim": 2}
AUDIO |= {"cross_attention_dim": 64}
LTX2 = Planned(
    "LTX2VideoTransformer3DModel",
    OF_LTX | {f"audio_{name}": value for name, value in AUDIO.items()} | {"rope_double_precision": False},
    {
        "hidden_states": noise(1, 3 * 5 * 3, 4),
        "audio_hidden_states": noise(1, 11, 6),
        "encoder_hidden_states": noise(1, 9, 10),
        "audio_encoder_hidden_states": noise(1, 9, 10),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": 1 - mask(9, 3),
        "audio_encoder_attention_mask": 1 - mask(9, 3),
        "audio_num_frames": 11,
    }
    | GRID,
)
OF_HUNYUAN = {"mlp_ratio": 2.0, "rope_axes_dim": (2, 2, 4)}
HUNYUAN_15 = Planned(
    "HunyuanVideo15Transformer3DModel",
    OF_HUNYUAN | {"in_channels": 9, "num_attention_heads": 16, "text_embed_2_dim": 10, "image_embed_dim": 8},
    {
        "hidden_states": noise(2, 9, 3, 5, 3),
        "timestep": torch.tensor([500.0, 500.0]),
        "encoder_hidden_states": noise(2, 7, 12),
        "encoder_attention_mask": mask(7, 4, 7),
        "encoder_hidden_states_2": noise(2, 5, 10),
        "encoder_attention_mask_2": mask(5, 5, 2),
        "image_embeds": torch.zeros(2, 4, 8),
    },
)
HUNYUAN = Planned(
    "HunyuanVideoTransformer3DModel",
    OF_HUNYUAN
    | {
        "num_attention_heads": 24,
        "num_layers": 1,
        "patch_size": 1,
        "pooled_projection_dim": 8,
        "guidance_embeds": True,
    },
    {
        "hidden_states": noise(2, 4, 3, 5, 3),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": noise(2, 13, 12),
        "encoder_attention_mask": mask(13, 8, 13),
        "pooled_projections": noise(2, 8),
        "guidance": torch.tensor([6000.0, 6000.0]),
    },
)
OF_Z_IMAGE = {"n_layers": 2, "n_refiner_layers": 1, "n_heads": 30, "n_kv_heads": 30, "dim": 240, "cap_feat_dim": 10}
Z_IMAGE = Planned(
    "ZImageTransformer2DModel",
    OF_Z_IMAGE | {"axes_dims": [4, 2, 2], "axes_lens": [256, 32, 32]},
    {
        "x": [noise(4, 1, 10, 6), noise(4, 1, 10, 6)],
        "t": torch.tensor([0.4, 0.4]),
        "cap_feats": [noise(9, 10), noise(40, 10)],
    },
)
OF_COSMOS = {"num_attention_heads": 32, "attention_head_dim": 12, "mlp_ratio": 2.0, "max_size": (4, 16, 16)}
COSMOS = Planned(
    "CosmosTransformer3DModel",
    OF_COSMOS | {"adaln_lora_dim": 4, "concat_padding_mask": False},
    {
        "hidden_states": noise(1, 4, 3, 6, 10),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": noise(1, 7, 12),
        "fps": 24,
    },
    in_double=False,
)
OF_KANDINSKY = {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 12, "in_text_dim2": 8, "time_dim": 16}
OF_KANDINSKY |= {"model_dim": 14 * 12, "ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2}
KANDINSKY = Planned(
    "Kandinsky5Transformer3DModel",
    OF_KANDINSKY | {"axes_dims": (4, 4, 4)},
    {
        "hidden_states": noise(1, 3, 6, 10, 4),
        "encoder_hidden_states": noise(1, 7, 12),
        "timestep": torch.tensor([500.0]),
        "pooled_projections": noise(1, 8),
        "visual_rope_pos": [torch.arange(3), torch.arange(3), torch.arange(5)],
        "text_rope_pos": torch.arange(7),
    },
    in_double=False,
)
OF_KREA = {"num_attention_heads": 24, "num_key_value_heads": 6, "intermediate_size": 32, "axes_dims_rope": (4, 2, 2)}
KREA_TEXT = {"hidden_dim": 12, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 16}
KREA = Planned(
    "Krea2Transformer2DModel",
    OF_KREA
    | {f"text_{name}": value for name, value in KREA_TEXT.items()}
    | {"timestep_embed_dim": 16, "num_text_layers": 3, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1},
    {
        "hidden_states": noise(2, 30, 4),
        "encoder_hidden_states": noise(2, 7, 3, 12),
        "timestep": torch.tensor([0.5, 0.5]),
        "position_ids": torch.cat([torch.zeros(7, 3), torch.cartesian_prod(*map(torch.arange, (1, 5, 6))).float()]),
        "encoder_attention_mask": mask(7, 4, 7).bool(),
    },
)
OF_COGVIDEOX = {"num_attention_heads": 30, "time_embed_dim": 8, "use_rotary_positional_embeddings": True}
COGVIDEOX = Planned(
    "CogVideoXTransformer3DModel",
    OF_COGVIDEOX | {"sample_width": 6, "sample_height": 10, "sample_frames": 9, "max_text_seq_length": 13},
    {
        "hidden_states": noise(2, 3, 4, 10, 6),
        "encoder_hidden_states": noise(2, 13, 12),
        "timestep": torch.tensor([500, 500]),
        "image_rotary_emb": [noise(45, 8), noise(45, 8)],
    },
)
PLANNED = {
    "cogvideox": COGVIDEOX,
    "hunyuan": HUNYUAN,
    "skyreels": SKYREELS,
    "skyreels, forcing": SKYREELS.variant(FORCING),
    "cosmos": COSMOS,
    "cosmos, timesteps": COSMOS.variant({"timestep": torch.tensor([100, 400, 900]).view(1, 1, 3, 1, 1)}),
    "cosmos, controlnet": COSMOS.variant(
        {"block_controlnet_hidden_states": [noise(1, 45, 384)] * 2}, controlnet_block_every_n=1
    ),
    "kandinsky": KANDINSKY,
    "krea": KREA,
    "wan": WAN,
    "wan, timesteps": WAN.variant({"timestep": whole(1000, 1, 45)}),
    "wan, image": WAN.variant(FROM_IMAGE, **IMAGE),
    "wan vace": WAN._replace(name="WanVACETransformer3DModel").variant(VACE, vace_layers=[0, 1], vace_in_channels=6),
    "chronoedit": WAN._replace(name="ChronoEditTransformer3DModel").variant(FROM_IMAGE, **IMAGE),
    "helios": HELIOS,
    "minimax h3": MINIMAX,
    "ltx": LTX,
    "ltx, timesteps": LTX.variant({"timestep": whole(1000, 2, 45)}),
    "ltx-2": LTX2,
    "ltx-2, timesteps": LTX2.variant({"timestep": whole(1000, 1, 45), "audio_timestep": torch.tensor([500])}),
    "ltx-2, split angles": LTX2.variant({}, rope_type="split"),
    "ltx-2, keyframes": LTX2.variant(
        {"video_keyframes_mask": whole(2, 1, 45, 1)}, use_keyframes_abs_pos_embedding=True
    ),
    "hunyuan 1.5": HUNYUAN_15,
    "hunyuan 1.5, image": HUNYUAN_15.variant({"image_embeds": noise(2, 4, 8)}),
    "z-image": Z_IMAGE,
    # Residuals are as long as image and text are together, with padding.
    "z-image, controlnet": Z_IMAGE.variant({"controlnet_block_samples": {0: noise(2, 96, 240)}}),
}
