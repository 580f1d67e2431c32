"""The subcommands of the inpainting harness."""
