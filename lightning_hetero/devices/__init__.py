"""What computes: memory, copies and the description of a device."""
