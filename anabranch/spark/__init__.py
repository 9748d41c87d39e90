"""Spark: its settings, sessions and jars, and the commands that become jobs."""
