"""The command line, one file a command. What is slow to import is imported when a command runs."""
