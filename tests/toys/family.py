"""A model family of the tests' own, all that is to be written for one: an adapter and a record."""

from diffusers.models.attention_processor import AttnProcessor2_0

from cocodiff.attention.strategy import LazyQKV
from cocodiff.models.adapter import IMAGE, TEXT, Adapter, AttentionProcessor
from cocodiff.models.family import Family
from cocodiff.models.plan import Cut, Gather
from cocodiff.models.streams import Stream, Streams

TOKENS = {
    "": {"hidden_states": Cut(tokens=IMAGE), "encoder_hidden_states": Cut(tokens=TEXT)},
    "proj_out": Gather(tokens=IMAGE),
}


class ToyAdapter(Adapter):
    plan = TOKENS

    def processors(self):
        return {AttnProcessor2_0: ToyProcessor}


class ToyProcessor(AttentionProcessor):
    def __call__(self, attn, x_BLC, **_):
        streams = Streams([Stream(x_BLC, attn.to_q, attn.to_k, attn.to_v)], attn.heads, self.kernels)
        qkv = LazyQKV(streams.q, streams.k, streams.v, self.host.segments, attn.heads)
        return attn.to_out[0](self.attend(qkv).flatten(-2))


FAMILY = Family("toys.transformer.ToyTransformer", ToyAdapter(), text_tokens=5, branches=2)
