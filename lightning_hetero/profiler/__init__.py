"""The profiler: measures the speed of a model on its devices."""
