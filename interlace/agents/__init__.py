"""Language agents: tools, the sandbox, the server for external programs, and episodes of several turns."""
