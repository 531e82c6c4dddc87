"""Imported last by a fork server: its processes leave the objects of its modules out of the search for cycles.

A search in such a process would take time, and would copy the memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
