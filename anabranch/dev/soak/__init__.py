"""The soak: everything together, broken at random (`python -m anabranch.dev.soak`)."""
