"""The soak: everything together, broken at random (`python -m soak`)."""
