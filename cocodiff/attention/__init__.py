"""Attention over all ranks' tokens, as a model's processors ask for it.

Others use `strategy` (the interface: `LazyQKV`, `LayerKey`), `ulysses`, `ring` and `local` (which compute), and by the
tables of the registry `arrival`, `v_major`, `residual` and `lossless` (what travels in tensors' places).
"""
