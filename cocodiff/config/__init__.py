"""What all rooms know: settings, machine descriptions, errors, files, and the tables of what a name stands for."""
