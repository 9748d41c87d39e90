"""The demo of `make demo`, and its parts that tests and benchmarks use: workspace, story, audit."""
