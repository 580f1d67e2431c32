"""A model on many ranks: its sequences, guidance, steps and checks."""

from cocodiff.engine.engine import Engine, open_transport, parallelize

__all__ = ["Engine", "open_transport", "parallelize"]
