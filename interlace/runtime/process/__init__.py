"""A worker in a process of its own: messages, memory that processes share, and the two ends of the connection."""
