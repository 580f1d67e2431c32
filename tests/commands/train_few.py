"""`cocodiff` where training keeps checkpoints early and judges few patches: in this process, or as a program."""

from __future__ import annotations

from cocodiff_eval.harness import training

from cocodiff.cli.main import main as cocodiff

FEWER = {"HELD_OUT": 6, "JUDGED": 2, "JUDGED_STEPS": 2, "LEAST_APART": 4}


def main() -> int:
    for name, value in (FEWER | {"HELD_OUT": 34}).items():  # the loss is taken of 32 at a time
        setattr(training, name, value)
    return cocodiff()
