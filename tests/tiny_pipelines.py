"""Random pipelines of every model family, without text encoders unless asked, small enough for any test.

Their autoencoders halve a picture once, so that the 128 latents a side that most pipelines call their own are 256
pixels. FLUX.2's and Qwen-Image's are the families' own classes.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import small

TEXT_WIDTH = 24


def sd3_pipeline(heads: int = 4, **text: Any) -> Any:
    """Weights for text to image and for restoring alike, of 32 x 32 pixels."""
    from diffusers import StableDiffusion3Pipeline

    settings = {"sample_size": 16, "patch_size": 2, "pos_embed_max_size": 24, "qk_norm": "rms_norm"}
    settings |= {"pooled_projection_dim": 16, "caption_projection_dim": heads * 8}
    transformer = _transformer("SD3Transformer2DModel", heads, in_channels=16, out_channels=16, **settings)
    return assembled(StableDiffusion3Pipeline, transformer, image_vae(16), 3, **text)


def flux_pipeline(heads: int = 4, fill: bool = False, **text: Any) -> Any:
    from diffusers import FluxFillPipeline, FluxPipeline

    settings: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1, "out_channels": 16}
    settings |= {"pooled_projection_dim": 16, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4)}
    # FLUX.1 Fill sees the packed latents, those of the known part, and the mask, one value for each pixel.
    settings["in_channels"] = 16 + 16 + 16 if fill else 16
    transformer = _transformer("FluxTransformer2DModel", heads, **settings)
    return assembled(FluxFillPipeline if fill else FluxPipeline, transformer, image_vae(4), 2, **text)


def flux2_pipeline(heads: int = 4, klein: bool = True, **text: Any) -> Any:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline

    settings: dict[str, Any] = {"num_layers": 1, "num_single_layers": 1, "in_channels": 16, "out_channels": 16}
    settings |= {"timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2), "guidance_embeds": not klein}
    transformer = _transformer("Flux2Transformer2DModel", heads, **settings)
    vae = AutoencoderKLFlux2(**image_vae_shape(4))
    return assembled(Flux2KleinPipeline if klein else Flux2Pipeline, transformer, vae, 1, **text)


def qwen_pipeline(heads: int = 4, **text: Any) -> Any:
    from diffusers import QwenImagePipeline

    settings = {"patch_size": 2, "in_channels": 16, "axes_dims_rope": (2, 2, 4)}
    transformer = _transformer("QwenImageTransformer2DModel", heads, **settings)
    return assembled(QwenImagePipeline, transformer, qwen_vae(4, 2), 1, **text)


def qwen_vae(width: int, levels: int) -> Any:
    """Each level but the first halves the picture."""
    from diffusers import AutoencoderKLQwenImage

    latents = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    settings = {"num_res_blocks": 1, "dim_mult": [1] * levels, "temperal_downsample": [False] * (levels - 1)}
    return AutoencoderKLQwenImage(base_dim=width, **settings, **latents).eval()


def wan_pipeline(
    heads: int = 4, experts: int = 2, image: bool = False, tokens: bool = False, clip: bool = False, **text: Any
) -> Any:
    """Videos of 4 n + 1 frames, whose sides are multiples of 16 pixels. experts: transformers, the second one for the
    later half of the steps. image: weights for image to video, like Wan 2.1 and 2.2's. tokens: a timestep for each
    token, like TI2V. clip: with an image encoder, like Wan 2.1's image to video."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline

    torch.manual_seed(0)
    settings = {"num_attention_heads": heads, "attention_head_dim": 12, "text_dim": TEXT_WIDTH}
    if clip:
        text |= clip_vision()
        settings |= {"image_dim": text["image_encoder"].config.hidden_size, "added_kv_proj_dim": heads * 12}
    # Latents; which frames are known, of four to one; their latents.
    settings |= {"in_channels": 4 + 4 + 4 if image else 4, "rope_max_seq_len": 32}
    transformers = [small("WanTransformer3DModel", settings).eval() for _ in range(experts)]
    for parameter in (parameter for one in transformers for parameter in one.parameters()):
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    latents = {"z_dim": 4, "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
    vae = AutoencoderKLWan(base_dim=4, dim_mult=[1] * 4, num_res_blocks=1, **latents)
    more = {"transformer_2": transformers[1], "boundary_ratio": 0.8} if experts > 1 else {}
    kind = WanImageToVideoPipeline if image else WanPipeline
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return assembled(kind, transformers[0], vae, 1, expand_timesteps=tokens, scheduler=scheduler, **more, **text)


def image_vae(channels: int, widths: tuple[int, ...] = (4, 4), **more: Any) -> Any:
    from diffusers import AutoencoderKL

    settings = image_vae_shape(channels, widths) | {"use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(**settings | {"shift_factor": 0.0, "scaling_factor": 1.0} | more)


def image_vae_shape(channels: int, widths: tuple[int, ...] = (4, 4)) -> dict[str, Any]:
    down, up = ((f"{way}Block2D",) * len(widths) for way in ("DownEncoder", "UpDecoder"))
    blocks = {"block_out_channels": widths, "down_block_types": down, "up_block_types": up, "layers_per_block": 1}
    return blocks | {
        "sample_size": 32,
        "latent_channels": channels,
        "norm_num_groups": 2,
        "mid_block_add_attention": False,
    }


def _transformer(class_name: str, heads: int, **settings: Any) -> Any:
    torch.manual_seed(0)
    return small(class_name, {"num_attention_heads": heads, "joint_attention_dim": TEXT_WIDTH} | settings)


def assembled(kind: type, transformer: Any, vae: Any, encoders: int, **more: Any) -> Any:
    """A pipeline of these parts; so many text encoders are absent unless they are given."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    ends = ["", "_2", "_3"][:encoders]
    parts = {f"{part}{end}": None for part in ("text_encoder", "tokenizer") for end in ends}
    parts |= {"scheduler": FlowMatchEulerDiscreteScheduler()}
    return kind(transformer=transformer.eval(), vae=vae.eval(), **parts | more)


PIPELINES = {
    "sd3": sd3_pipeline,
    "flux": flux_pipeline,
    "fill": lambda: flux_pipeline(fill=True),
    "klein": flux2_pipeline,
    "qwen": qwen_pipeline,
}


ENCODER = {"intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip_text() -> dict[str, Any]:
    """SD3's two CLIP encoders, without T5, and a tokenizer that knows single letters."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

    letters = [*"abcdefghijklmnopqrstuvwxyz"]
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer({word: number for number, word in enumerate(words)}, [])
    tokenizer.model_max_length = 16
    text: dict[str, Any] = {"tokenizer": tokenizer, "tokenizer_2": tokenizer}
    for seed, part in enumerate(("text_encoder", "text_encoder_2")):
        torch.manual_seed(seed)
        ids = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
        sizes = {"hidden_size": 8, "projection_dim": 8, "max_position_embeddings": 16, "vocab_size": len(words)}
        text[part] = CLIPTextModelWithProjection(CLIPTextConfig(**ENCODER | ids | sizes)).eval()
    return text


def qwen3_text() -> dict[str, Any]:
    """FLUX.2 klein's Qwen3, of which it reads layers 9, 18 and 27, and a tokenizer that knows single bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*specials, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer({word: number for number, word in enumerate(words)}, [])
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    torch.manual_seed(0)
    sizes = {"hidden_size": TEXT_WIDTH // 3, "head_dim": 4, "num_key_value_heads": 1, "vocab_size": len(words)}
    config = Qwen3Config(**ENCODER | sizes | {"num_hidden_layers": 28})
    return {"tokenizer": tokenizer, "text_encoder": Qwen3ForCausalLM(config).eval()}


def umt5_text() -> dict[str, Any]:
    """Wan's UMT5 and a tokenizer that knows single letters."""
    from transformers import T5TokenizerFast, UMT5Config, UMT5EncoderModel

    specials, letters = ("<pad>", "</s>", "<unk>"), "abcdefghijklmnopqrstuvwxyz▁"
    words = [*((word, 0.0) for word in specials), *((letter, -2.0) for letter in letters)]
    torch.manual_seed(0)
    config = UMT5Config(
        vocab_size=128, d_model=TEXT_WIDTH, d_kv=4, d_ff=16, num_layers=2, num_heads=2, pad_token_id=0, eos_token_id=1
    )
    tokenizer = T5TokenizerFast(vocab=words, extra_ids=0)
    return {"tokenizer": tokenizer, "text_encoder": UMT5EncoderModel(config).eval()}


def clip_vision() -> dict[str, Any]:
    """An image encoder of 32 x 32 pixels."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(**ENCODER | {"hidden_size": 16, "image_size": 32, "patch_size": 16})
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}


# Of classes that no family tells of: they run by a plan alone ---------------------------------------------------------


def z_image_pipeline(heads: int = 4, **text: Any) -> Any:
    """Prompts are lists of tensors, and guidance of 1 calls with both branches."""
    from diffusers import ZImagePipeline

    torch.manual_seed(0)
    settings = {"n_layers": 2, "n_refiner_layers": 1, "n_heads": heads, "n_kv_heads": heads, "dim": heads * 8}
    settings |= {"cap_feat_dim": text["text_encoder"].config.hidden_size if text else TEXT_WIDTH}
    settings |= {"axes_dims": [4, 2, 2], "axes_lens": [64, 64, 64]}
    return assembled(ZImagePipeline, small("ZImageTransformer2DModel", settings), image_vae(4), 1, **text)


def cogvideox_pipeline(heads: int = 4, **text: Any) -> Any:
    """Videos by noise prediction, of 4 n + 1 frames, whose latents have the frames before the channels."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline

    torch.manual_seed(0)
    settings = {"num_attention_heads": heads, "attention_head_dim": 16, "time_embed_dim": 8, "text_embed_dim": 24}
    settings |= {"sample_width": 8, "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 8}
    transformer = small("CogVideoXTransformer3DModel", settings | {"use_rotary_positional_embeddings": True})
    down, up = ((f"CogVideoX{way}Block3D",) * 4 for way in ("Down", "Up"))
    blocks = {"down_block_types": down, "up_block_types": up, "block_out_channels": (8, 8, 8, 8), "norm_num_groups": 2}
    scales = {"temporal_compression_ratio": 4, "scaling_factor": 0.7}
    vae = AutoencoderKLCogVideoX(latent_channels=4, layers_per_block=1, **blocks, **scales)
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction", snr_shift_scale=1.0)
    return assembled(CogVideoXPipeline, transformer, vae, 1, scheduler=scheduler, **text)
