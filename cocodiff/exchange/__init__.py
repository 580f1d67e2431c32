"""The messages of one rank in an attention call: encoded, packed, sent, received, put in place.

Strategies use `transfer.Transfer`; codecs derive from `codec.Codec` and `outgoing.EncodedCall`; `exchange.Exchange` is
one rank's end of an exchange. The rest is theirs.
"""
