"""Producers for demos, tests and soaks."""
