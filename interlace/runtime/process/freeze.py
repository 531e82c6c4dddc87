"""Imported last by a fork server, and by nothing else: its processes leave its objects out of the search for cycles.

A search in such a process would take time, and would copy the memory that it shares with the server.
"""

from interlace.core.heap import freeze_heap

freeze_heap()
