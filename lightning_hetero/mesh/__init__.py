"""Networks apart: WireGuard files for machines in different places."""
