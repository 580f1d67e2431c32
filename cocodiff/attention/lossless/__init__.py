"""The lossless codec: tensors travel as their differences from a prediction, in full. Its face is `coding.Lossless`."""
