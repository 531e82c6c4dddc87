"""The live page of runs: a local server that reads the files of their folders."""
