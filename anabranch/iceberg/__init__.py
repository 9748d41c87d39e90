"""Iceberg and its files: the only package that writes the tables. It knows an hour only as a
partition's value, and a layer only as a branch."""
