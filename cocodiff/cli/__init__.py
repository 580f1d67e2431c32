"""The command line: a module for each subcommand, found by `dispatch`."""
