"""What goes where: makes plans. Knows no worker and no torch."""
