"""Search over schedules: candidates, bounds, and their scores on the virtual clock."""
