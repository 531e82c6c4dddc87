"""Episodes of a robot, one file per kind; a recipe names the file."""
