"""Predictions of a run's memory, bytes and time, and the choice of its mesh, codec and partition."""
