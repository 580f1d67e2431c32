"""Studies that the library does not use: emulated machines, the papers' figures, and the embedded model's training
data."""
