"""Episodes that need no tools and no simulator, one file per kind."""
