"""The messages of one rank in an attention call: tensors are encoded, packed, sent, received and put in place.

Strategies use `transfer.Transfer`; codecs derive from `codec.Codec` and from it; `exchange.Exchange` is one rank's end
of an exchange. The other modules are used only by these.
"""
