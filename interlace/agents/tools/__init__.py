"""Tools that a model can call: Python functions, classes with state, MCP servers. Built-ins are found by name."""
