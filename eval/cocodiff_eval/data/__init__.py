"""The formats of volumes, slices and masks. The words of `--format` stand here, so that reading them imports no
NumPy."""

SAME = "same"  # the input's own format; TIFF if the input is PNG
WRITTEN = ("tiff", "sequence", "zarr", "h5", "npy", "mrc")  # formats that results can be written in
