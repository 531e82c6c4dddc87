"""Workers: each wraps one engine or scorer, without mathematics."""
