"""What a program calls: the commands as functions, with the same names and options."""
