"""The process on a device."""
