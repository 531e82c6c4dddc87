"""A worker in a separate process: messages, memory that processes share, and both ends of the connection."""
