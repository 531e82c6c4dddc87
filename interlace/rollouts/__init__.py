"""Production of one sample: the engine pool, its drivers, sessions, episodes and chat rendering."""
