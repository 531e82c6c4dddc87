"""What breaks a run, tried one by one through the command line: `make test-faults`. Each module here is a family."""
