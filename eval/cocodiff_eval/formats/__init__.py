"""File formats of slices and masks: one file a format, and one table of them."""
