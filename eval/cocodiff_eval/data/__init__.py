"""Volumes, slices and masks, in every format. Below: the words of `--format`, for those who may not import NumPy."""

SAME = "same"  # that of the input, TIFF for PNG
WRITTEN = ("tiff", "sequence", "zarr", "h5", "npy", "mrc")
