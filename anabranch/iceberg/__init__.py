"""Iceberg and its files: what may write the tables. Knows no hours and no layers beyond the names of branches."""
