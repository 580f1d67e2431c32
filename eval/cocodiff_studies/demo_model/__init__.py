"""How the embedded model was made: synthetic slices, training and evaluation."""
