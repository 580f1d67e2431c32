"""A slice restored by a pipeline, coarse to fine, and by methods without a model."""
