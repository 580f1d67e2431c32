"""The restoration of a slice, by a pipeline from coarse to fine, and by methods without a model."""
