"""The attention over all ranks' tokens, as a model's processors call it.

Others use `strategy` (the interface: `LazyQKV`, `LayerKey`), `ulysses`, `ring` and `local` (which compute). The
registry's tables name the codecs in `v_major`, `residual` and `lossless`, and displacement in `displaced`.
"""
