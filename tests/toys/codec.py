"""Two codecs of the tests' own: one sends tensors in half precision, the other their change since the last call so."""

import torch

from cocodiff.attention.stateful import End, StatefulCall, StatefulCodec
from cocodiff.exchange.codec import CODED, Codec
from cocodiff.exchange.outgoing import Encoded
from cocodiff.exchange.transfer import Transfer


class HalfCall(Transfer):
    dtype: torch.dtype

    def cell_bytes(self, x_BLHD):
        return super().cell_bytes(x_BLHD) * 2 // x_BLHD.element_size()

    def encode(self, tensors, rows, ranks):
        self.dtype = next(iter(tensors.values())).dtype
        return Encoded([x.half() for x in tensors.values()], self.layout)

    def decode(self, received, rows, ranks):
        return [x.to(self.dtype) for x in received.values()]


class Half(Codec):
    transfer = HalfCall

    def sent_bytes(self, head_dim, itemsize, kind=CODED):
        return 2 * head_dim


class ChangeCall(StatefulCall):
    """Both ends add what was sent to the values that they keep."""

    def cell_bytes(self, x_BLHD):
        return len(x_BLHD) * 2 * x_BLHD.shape[-1]

    def begin(self, like_BLHD):
        super().begin(like_BLHD)
        self.dtype = like_BLHD.dtype

    def kept(self, ends, name, x_BTHD, length):
        if name not in ends:
            B, _, H, D = x_BTHD.shape
            ends[name] = End([x_BTHD.new_zeros(B, length, H, D, dtype=self.dtype)])
        return ends[name].newest(self.number)

    def encode(self, tensors, rows, ranks):
        found = []
        for name, x_BTHD in tensors.items():
            kept_BTHD = self.kept(self.state.sent, name, x_BTHD, self.sent_rows(name))[:, rows]
            found.append((x_BTHD - kept_BTHD).half())
            kept_BTHD += found[-1]
        return Encoded(found, self.layout)

    def decode(self, received, rows, ranks):
        found = []
        for name, x_BSGD in received.items():
            found.append(self.kept(self.state.received, name, x_BSGD, x_BSGD.shape[1]))
            found[-1][:, rows] += x_BSGD[:, rows]
        return found


class Change(StatefulCodec):
    transfer = ChangeCall

    def sent_bytes(self, head_dim, itemsize, kind=CODED):
        return 2 * head_dim
