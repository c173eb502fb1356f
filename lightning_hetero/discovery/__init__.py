"""Where workers are."""
