"""A codec of the tests' own: q, k, v and the output travel in half precision."""

import torch

from cocodiff.exchange.codec import Codec
from cocodiff.exchange.outgoing import Encoded
from cocodiff.exchange.transfer import Transfer
from cocodiff.planner.costs import CODED, Costs


class HalfCosts(Costs):
    def sent_bytes(self, head_dim, itemsize, kind=CODED):
        return 2 * head_dim


class Half(Codec):
    def call(self, exchange, layout, layer_key):
        return HalfCall(exchange, layout, layer_key.kind)


class HalfCall(Transfer):
    dtype: torch.dtype

    def cell_bytes(self, x_BLHD):
        return super().cell_bytes(x_BLHD) * 2 // x_BLHD.element_size()

    def encode(self, tensors, rows, ranks):
        self.dtype = next(iter(tensors.values())).dtype
        return Encoded([x.half() for x in tensors.values()], self.layout)

    def decode(self, received, rows, ranks):
        return [x.to(self.dtype) for x in received.values()]
