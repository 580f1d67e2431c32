"""Studies, which the library does not use: emulated machines, the paper's figures, the embedded model's making."""
