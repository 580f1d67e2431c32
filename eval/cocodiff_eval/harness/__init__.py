"""The jobs: slices, volumes, sweeps, images, training."""
