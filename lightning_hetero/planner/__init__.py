"""Who gets what. Pure: knows no worker and no torch."""
