"""Workers: each wraps one engine or scorer, without mathematics. rollouts/role_groups.py describes their operations."""
