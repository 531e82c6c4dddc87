"""HTTP server of sessions: serves the policy to agents that know only an address and a key."""
