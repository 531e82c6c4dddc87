"""Command line, one file per command. Modules that are slow to import are imported when a command runs."""
