"""Plans of this project for diffusers' classes whose own plan is missing, wrong or slow.

A class that is not here runs by its own `_cp_plan`, if it has one. Those in `OWN` have one that was compared with one
process, as all plans here were: `tests/test_plans.py`.
"""

from __future__ import annotations

from typing import Any

from cocodiff.config.errors import UserError
from cocodiff.models.plan import Cut, Gather, Plan

VIDEO, TEXT = "video", "text"
ROTARY = (Cut(1, 3), Cut(2, 4))  # interleaved angles, or split ones with a dimension of heads before the tokens'
OWN = ("ChronoEditTransformer3DModel", "MiniMaxH3Transformer3DModel")

# Every rank has the whole text and attends to it without an exchange. TI2V has a timestep for each token.
WAN: Plan = {
    "": {"timestep": Cut(1, 2)},
    "rope": {0: Cut(1, 4), 1: Cut(1, 4)},
    "blocks.0": {"hidden_states": Cut(1, 3)},
    "proj_out": Gather(1),
}

PLANS: dict[str, Plan] = {
    "WanTransformer3DModel": WAN,
    # Every rank has the whole text and attends to it without an exchange.
    "LTXVideoTransformer3DModel": {
        "": {"hidden_states": Cut(1, 3), "timestep": Cut(1, 2)},
        "rope": {0: Cut(1, 3), 1: Cut(1, 3)},
        "proj_out": Gather(1),
    },
    # diffusers' own plan is a copy of LTX-Video's: it cuts the texts of two streams by one length, and does not cut the
    # angles between video and audio, nor timesteps for each token. Audio is short: every rank has all of it.
    "LTX2VideoTransformer3DModel": {
        "": {"hidden_states": Cut(1, 3), "timestep": Cut(1, 2), "video_keyframes_mask": Cut(1, 3)},
        "rope": {0: ROTARY, 1: ROTARY},
        "cross_attn_rope": {0: ROTARY, 1: ROTARY},
        "proj_out": Gather(1),
    },
    "HeliosTransformer3DModel": {
        "blocks.*.attn1": {"hidden_states": Cut(1), "rotary_emb": Cut(1), 0: Gather(1)},
        "blocks.*.attn2": {"hidden_states": Cut(1), 0: Gather(1)},
        "blocks.*.ffn": {0: Gather(1), "hidden_states": Cut(1)},
    },
    "HunyuanVideo15Transformer3DModel": {
        "rope": {0: Cut(0, 2), 1: Cut(0, 2)},
        "transformer_blocks.0": {"hidden_states": Cut(1), "encoder_hidden_states": Cut(1)},
        "transformer_blocks.*": {"attention_mask": Cut(1)},
        "proj_out": Gather(1),
    },
    # Hints are made of the video's and of the control's tokens, by blocks of their own.
    "WanVACETransformer3DModel": {
        "rope": {0: Cut(1, 4), 1: Cut(1, 4)},
        "vace_blocks.0": {"hidden_states": Cut(1), "control_hidden_states": Cut(1)},
        "blocks.0": {"hidden_states": Cut(1)},
        "proj_out": Gather(1),
    },
    "ZImageTransformer2DModel": {
        "": {"controlnet_block_samples": Cut(1)},
        "layers.0": {"x": Cut(1)},
        "layers.*": {"attn_mask": Cut(1), "freqs_cis": Cut(1), "noise_mask": Cut(1)},
        "all_final_layer.*": {"noise_mask": Cut(1), 0: Gather(1)},
    },
    # Its forward continues with whole tensors after the last block, as Kandinsky's and Krea's do.
    "SkyReelsV2Transformer3DModel": {
        "rope": {0: Cut(1, 4), 1: Cut(1, 4)},
        "blocks.0": {"hidden_states": Cut(1)},
        "blocks.*": {"temb": Cut(2, 4)},
        "blocks.-1": Gather(1),
    },
    "HunyuanVideoTransformer3DModel": {
        "rope": {0: Cut(0, 2), 1: Cut(0, 2)},
        "transformer_blocks.0": {"hidden_states": Cut(1, tokens=VIDEO), "encoder_hidden_states": Cut(1, tokens=TEXT)},
        "transformer_blocks.*": {"attention_mask": Cut(3, of=(VIDEO, TEXT))},
        "single_transformer_blocks.*": {"attention_mask": Cut(3, of=(VIDEO, TEXT))},
        "proj_out": Gather(1),
    },
    "CosmosTransformer3DModel": {
        "rope": {0: Cut(0, 2), 1: Cut(0, 2)},
        "transformer_blocks.0": {"hidden_states": Cut(1)},
        "transformer_blocks.*": {
            "embedded_timestep": Cut(1, 3),
            "temb": Cut(1, 3),
            "extra_pos_emb": Cut(1),
            "controlnet_residual": Cut(1),
        },
        "norm_out": {"embedded_timestep": Cut(1, 3), "temb": Cut(1, 3)},
        "proj_out": Gather(1),
    },
    "Kandinsky5Transformer3DModel": {
        "visual_transformer_blocks.0": {"visual_embed": Cut(1)},
        "visual_transformer_blocks.*": {"rope": Cut(1)},
        "visual_transformer_blocks.-1": Gather(1),
    },
    "Krea2Transformer2DModel": {
        "transformer_blocks.0": {"hidden_states": Cut(1)},
        "transformer_blocks.*": {"image_rotary_emb": Cut(0, 2), "attention_mask": Cut(3)},
        "transformer_blocks.-1": Gather(1),
    },
    "CogVideoXTransformer3DModel": {
        "transformer_blocks.0": {"hidden_states": Cut(1), "encoder_hidden_states": Cut(1)},
        "transformer_blocks.*": {"image_rotary_emb": Cut(0)},
        "proj_out": Gather(1),
    },
}

FIRST_FRAME = "tokens of the first frame are told by their place"
HISTORY = "keys of the history are amplified by their place among all tokens"
# Settings of a model's config with which its plan is wrong: name, value (True for any that is set) and reason.
UNLESS: dict[str, tuple[str, Any, str]] = {
    "HunyuanVideoTransformer3DModel": ("image_condition_type", "token_replace", FIRST_FRAME),
    "HeliosTransformer3DModel": ("is_amplify_history", True, HISTORY),
}


def plan_of(model: Any) -> Plan | None:
    """Return the plan of a transformer by its class: the places where tokens are cut into ranks' own, and gathered
    again.

    This project's plan precedes diffusers' own (`_cp_plan`). Return None if there is neither. Raise UserError for a
    model with a setting for which the plan is wrong.
    """
    name = known_name(model)
    if name in UNLESS:
        setting, value, reason = UNLESS[name]
        has = getattr(model.config, setting, None)
        if has == value or (value is True and has):
            raise UserError(f"{name} with {setting} {has} has no parallel form by its plan: {reason}")
    return PLANS.get(name, getattr(model, "_cp_plan", None))


def known_name(model: Any) -> str:
    """Return the name of a transformer's class in diffusers; "" if no run by the class's plan has been compared with a
    run in one process.

    PLANS and OWN list the compared classes. For a class that derives from diffusers' it is the nearest of these.
    """
    names = [kind.__name__ for kind in type(model).__mro__ if f"{kind.__module__}.".startswith("diffusers.")]
    return next((name for name in names if name in PLANS or name in OWN), "")


def is_proven(model: Any, plan: Plan) -> bool:
    """Return True if `plan` is the one with which results of this model's class were compared with a run in one
    process."""
    name = known_name(model)
    return bool(name) and plan == PLANS.get(name, getattr(model, "_cp_plan", None))
