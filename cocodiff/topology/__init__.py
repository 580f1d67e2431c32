"""The division of ranks, tokens and heads, and the physical links between ranks, as pure data.

Others use `axes` (replicas, guidance, ring and Ulysses), `layout` (segments of tokens, and shares of them), `links` and
`routes`.
"""
