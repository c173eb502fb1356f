"""Discovery: find workers on the local network."""
