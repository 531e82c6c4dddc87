"""Traces of a run, kept and shown: run folder, metrics, transcripts, progress, tables, checkpoints, Ctrl-C."""
