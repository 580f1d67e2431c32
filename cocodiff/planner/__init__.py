"""Predicts memory, bytes and time of runs, and answers what a run leaves open: its mesh, its codec, its partition."""
