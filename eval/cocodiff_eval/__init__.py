"""Restoring microtomography slices: reading and masking them, running a model over them, measuring, reporting."""
