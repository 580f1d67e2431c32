"""The subcommands of the harness."""
