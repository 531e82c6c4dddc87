"""The HTTP server of sessions: agents that know an address and a key alone are served by the policy."""
