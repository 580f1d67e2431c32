"""A coding of the tests' own: q, k, v and the output travel in half precision."""

import torch

from cocodiff.exchange.coding import Coding
from cocodiff.exchange.outgoing import CodedCall, Encoded
from cocodiff.planner.costs import Costs


class HalfCosts(Costs):
    @classmethod
    def head_bytes(cls, settings, head_dim, itemsize):
        return 2 * head_dim


class Half(Coding):
    def call(self, exchange, layout, site):
        return HalfCall(layout)


class HalfCall(CodedCall):
    dtype: torch.dtype

    def cell_bytes(self, x_BLHD):
        return super().cell_bytes(x_BLHD) * 2 // x_BLHD.element_size()

    def encode(self, tensors_BLHD):
        self.dtype = next(iter(tensors_BLHD.values())).dtype
        return Encoded([x_BLHD.half() for x_BLHD in tensors_BLHD.values()], self.layout)

    def decode(self, received_BSGW, coded, rows):
        return [x_BSGD.to(self.dtype) for x_BSGD in received_BSGW.values()]

    def encode_output(self, out_BTGD, rows):
        return out_BTGD.half()

    def decode_output(self, received_BLHW):
        return received_BLHW.to(self.dtype)
