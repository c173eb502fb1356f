"""Telemetry: recorded steps, their predictions, and the layers of each process."""
