"""The jobs on models: restoring slices and volumes, sweeps, generating images, training."""
