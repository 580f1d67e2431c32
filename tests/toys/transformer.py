"""A transformer as a library would have it: attention layers over one sequence of text then image rows."""

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.attention_processor import Attention


class ToyTransformer(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, num_attention_heads: int = 6, attention_head_dim: int = 4, num_layers: int = 2):
        super().__init__()
        width = num_attention_heads * attention_head_dim
        plain = {"heads": num_attention_heads, "dim_head": attention_head_dim}
        self.layers = torch.nn.ModuleList(Attention(width, **plain) for _ in range(num_layers))
        self.proj_out = torch.nn.Linear(width, 4)

    def forward(self, hidden_states, encoder_hidden_states, timestep=None):
        x_BLC = torch.cat([encoder_hidden_states, hidden_states], 1)
        for layer in self.layers:
            x_BLC = x_BLC + layer(x_BLC)
        return self.proj_out(x_BLC[:, encoder_hidden_states.shape[1] :])
