"""Predicts the time and bytes of runs: the strategies themselves are recorded on a machine that is only described."""
