"""Workers that only cost time, for the runtime on a virtual clock."""
