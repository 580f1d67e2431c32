"""How the embedded model was made: synthetic slices and training."""
