"""Volumes, slices and masks, in every format."""
