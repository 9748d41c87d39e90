"""Iceberg and its files: the only package that writes the tables. It has no hours, and of layers
only the names of branches."""
