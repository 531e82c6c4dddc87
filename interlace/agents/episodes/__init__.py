"""Episodes of an agent, one file per kind; a recipe names the file."""
