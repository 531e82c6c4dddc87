"""The commands as functions of a program or a notebook, with the same names and options."""
