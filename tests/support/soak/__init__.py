"""The soak test: all jobs together, with random faults (`python -m soak`)."""
