"""Faults injected into runs one by one through the command line: `make test-faults`. Each module is a family."""
