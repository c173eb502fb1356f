"""A WireGuard mesh for workers of several networks: its rules, and its files."""
