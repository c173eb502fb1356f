"""The plan of a run: chosen by measurements, and changed between steps."""
