"""A transformer of no family, with joint and cross attention in the ways that plans have to know."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.models.plan import Cut, Gather

PLAN = {
    "": {"hidden_states": Cut(1, tokens="video"), "text": Cut(1, tokens="text"), "mask": Cut(1)},
    "proj_out": Gather(1),
}


class Plain:
    """What makes a module one that attends."""


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.processor = heads, kv_heads, Plain()
        each = width // heads
        self.to_q, self.to_out = nn.Linear(width, width), nn.Linear(width, width)
        self.to_k, self.to_v = nn.Linear(width, kv_heads * each), nn.Linear(width, kv_heads * each)

    def forward(self, x, others=None, mask=None, kind=""):
        others = x if others is None else others
        q = self.to_q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = (to(others).unflatten(2, (self.kv_heads, -1)).transpose(1, 2) for to in (self.to_k, self.to_v))
        if kind == "by hand":
            k, v = (y.repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
            return self.to_out(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        if kind == "causal":
            mask = None
        more = {"is_causal": kind == "causal", "enable_gqa": True, "scale": 0.3}  # the usual one is 0.5
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Planned(nn.Module):
    def __init__(self, width=24, heads=6, kv_heads=6):
        super().__init__()
        self.config = type("Config", (), {"num_attention_heads": heads, "attention_head_dim": width // heads})
        self.joint, self.cross = Attention(width, heads, kv_heads), Attention(width, heads, heads)
        self.proj_out = nn.Linear(width, width)

    def forward(self, hidden_states, text, speech, timestep, mask=None, kind=""):
        x = torch.cat([text, hidden_states * timestep.view(-1, 1, 1)], dim=1)
        seen = None
        if mask is not None:
            seen = torch.cat([mask, mask.new_ones(hidden_states.shape[:2])], dim=1)[:, None, None]
        if kind == "added":
            seen = seen.float()
        elif kind == "by query":
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(7)
        elif kind == "by head":
            seen = seen & (torch.arange(6).view(-1, 1, 1) + torch.arange(x.shape[1]) > 2)
        x = x + self.joint(x, mask=seen, kind=kind)
        if seen is not None and not kind:  # a second mask in one call: the other row's
            x = x + self.joint(x, mask=seen.flip(0))
        x = x + self.cross(x, others=speech)
        return self.proj_out(x[:, text.shape[1] :])


def toy_inputs(mask, tokens=26):
    generator = torch.Generator().manual_seed(tokens)
    call = {name: torch.randn(2, n, 24, generator=generator) for name, n in (("hidden_states", tokens), ("text", 5))}
    call |= {"speech": torch.randn(2, 9, 24, generator=generator), "timestep": torch.tensor([0.5, 0.5])}
    return call | ({"mask": torch.tensor([[True, True, False, True, False], [True] * 5])} if mask else {})
