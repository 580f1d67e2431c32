"""Random pipelines of every model family, without text encoders unless asked, small enough for any test.

Their autoencoders halve a picture once, so that the 128 latents a side that most pipelines call their own are 256
pixels. FLUX.2's and Qwen-Image's are the families' own classes.
"""

from __future__ import annotations

from typing import Any

import torch

TEXT_WIDTH = 24


def sd3_pipeline(heads: int = 4, **text: Any) -> Any:
    """Weights for text to image and for restoring alike, of 32 x 32 pixels."""
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    torch.manual_seed(0)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=16,
        out_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=16,
        caption_projection_dim=heads * 8,
        pos_embed_max_size=24,
        qk_norm="rms_norm",
    )
    return _assembled(StableDiffusion3Pipeline, transformer, image_vae(16), 3, text)


def flux_pipeline(heads: int = 4, fill: bool = False, **text: Any) -> Any:
    from diffusers import FluxFillPipeline, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    # FLUX.1 Fill sees the packed latents, those of the known part, and the mask, one value for each pixel.
    transformer = FluxTransformer2DModel(
        in_channels=16 + 16 + 16 if fill else 16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(2, 2, 4),
    )
    return _assembled(FluxFillPipeline if fill else FluxPipeline, transformer, image_vae(4), 2, text)


def flux2_pipeline(heads: int = 4, klein: bool = True, **text: Any) -> Any:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Pipeline, Flux2Transformer2DModel

    torch.manual_seed(0)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=not klein,
    )
    vae = AutoencoderKLFlux2(**_image_vae_shape(4))
    return _assembled(Flux2KleinPipeline if klein else Flux2Pipeline, transformer, vae, 1, text)


def qwen_pipeline(heads: int = 4, **text: Any) -> Any:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

    torch.manual_seed(0)
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(2, 2, 4),
    )
    vae = AutoencoderKLQwenImage(
        base_dim=4,
        z_dim=4,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    return _assembled(QwenImagePipeline, transformer, vae, 1, text)


def wan_pipeline(
    heads: int = 4, experts: int = 2, image: bool = False, tokens: bool = False, clip: bool = False, **text: Any
) -> Any:
    """Videos of 4 n + 1 frames, whose sides are multiples of 16 pixels. experts: transformers, the second one for the
    later half of the steps. image: weights for image to video, like Wan 2.1 and 2.2's. tokens: a timestep for each
    token, like TI2V. clip: with an image encoder, like Wan 2.1's image to video."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanImageToVideoPipeline, WanPipeline
    from diffusers import WanTransformer3DModel as Transformer

    shape: dict[str, Any] = {
        "num_attention_heads": heads,
        "attention_head_dim": 12,
        "in_channels": 4 + 4 + 4 if image else 4,  # latents; which frames are known, of four to one; their latents
        "out_channels": 4,
        "text_dim": TEXT_WIDTH,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 2,
        "rope_max_seq_len": 32,
    }
    torch.manual_seed(0)
    if clip:
        text |= clip_vision()
        shape |= {"image_dim": text["image_encoder"].config.hidden_size, "added_kv_proj_dim": heads * 12}
    transformers = [Transformer(**shape).eval() for _ in range(experts)]
    for parameter in (parameter for one in transformers for parameter in one.parameters()):
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1] * 4, num_res_blocks=1, latents_mean=[0.0] * 4, latents_std=[1.0] * 4
    )
    more = {"transformer_2": transformers[1], "boundary_ratio": 0.8} if experts > 1 else {}
    kind = WanImageToVideoPipeline if image else WanPipeline
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    more |= {"text_encoder": None, "tokenizer": None, "expand_timesteps": tokens, **text}
    return kind(transformer=transformers[0], vae=vae.eval(), scheduler=scheduler, **more)


def image_vae(channels: int) -> Any:
    from diffusers import AutoencoderKL

    settings = _image_vae_shape(channels) | {"use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(**settings, shift_factor=0.0, scaling_factor=1.0)


def _image_vae_shape(channels: int) -> dict[str, Any]:
    return {
        "block_out_channels": (4, 4),
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "sample_size": 32,
        "up_block_types": ("UpDecoderBlock2D",) * 2,
        "latent_channels": channels,
        "norm_num_groups": 2,
        "layers_per_block": 1,
        "mid_block_add_attention": False,
    }


def _assembled(kind: type, transformer: Any, vae: Any, encoders: int, text: dict[str, Any]) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    ends = ["", "_2", "_3"][:encoders]
    absent = {f"{part}{end}": None for part in ("text_encoder", "tokenizer") for end in ends}
    scheduler = FlowMatchEulerDiscreteScheduler()
    return kind(transformer=transformer.eval(), vae=vae.eval(), scheduler=scheduler, **absent | text)


PIPELINES = {
    "sd3": sd3_pipeline,
    "flux": flux_pipeline,
    "fill": lambda: flux_pipeline(fill=True),
    "klein": flux2_pipeline,
    "qwen": qwen_pipeline,
}


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
        config = CLIPTextConfig(
            vocab_size=len(words),
            hidden_size=8,
            intermediate_size=16,
            projection_dim=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=len(words) - 2,
            eos_token_id=len(words) - 1,
            pad_token_id=len(words) - 1,
        )
        text[part] = CLIPTextModelWithProjection(config).eval()
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
    config = Qwen3Config(
        vocab_size=len(words),
        hidden_size=TEXT_WIDTH // 3,
        intermediate_size=16,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
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

    config = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=16
    )
    sides = {"height": 32, "width": 32}
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=sides)
    return {"image_encoder": CLIPVisionModel(config).eval(), "image_processor": processor}


# Of classes that no family tells of: they run by a plan alone ---------------------------------------------------------


def z_image_pipeline(heads: int = 4, **text: Any) -> Any:
    """Prompts are lists of tensors, and guidance of 1 calls with both branches."""
    from diffusers import ZImagePipeline, ZImageTransformer2DModel

    torch.manual_seed(0)
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=heads * 8,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=text["text_encoder"].config.hidden_size if text else TEXT_WIDTH,
        axes_dims=[4, 2, 2],
        axes_lens=[64, 64, 64],
    )
    return _assembled(ZImagePipeline, transformer, image_vae(4), 1, text)


def cogvideox_pipeline(heads: int = 4, **text: Any) -> Any:
    """Videos by noise prediction, of 4 n + 1 frames, whose latents have the frames before the channels."""
    from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

    torch.manual_seed(0)
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=TEXT_WIDTH,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=5,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
        scaling_factor=0.7,
    )
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction", snr_shift_scale=1.0)
    absent = {"text_encoder": None, "tokenizer": None}
    return CogVideoXPipeline(transformer=transformer.eval(), vae=vae.eval(), scheduler=scheduler, **absent | text)
