"""Is it still right: checks of the user's code, before a run and during it."""
