"""What a run leaves behind and shows: run folder, metrics, transcripts, progress, tables, checkpoints, Ctrl-C."""
