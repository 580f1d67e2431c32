"""The command line. `main` finds a subcommand's module by its name, here or in other packages."""
