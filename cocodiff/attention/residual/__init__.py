"""The residual codec: tensors travel as their differences from a prediction. Its face is `coding.Residual`."""
