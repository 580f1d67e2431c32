"""The settings, machine descriptions, errors, small files and tables of names that every other package uses."""
