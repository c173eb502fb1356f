"""Who starts workers."""
