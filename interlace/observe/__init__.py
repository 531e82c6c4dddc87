"""Records of a run and their display: run folder, metrics, transcripts, progress, tables, checkpoints, Ctrl-C."""
