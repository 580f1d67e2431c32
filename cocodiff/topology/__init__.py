"""How ranks of a machine are divided, who has which tokens and heads, and what links can carry, as pure data.

Others use `axes` (replicas, guidance, ring and Ulysses), `layout` (segments of tokens, and shares of them), `links` and
`routes`.
"""
