"""Erasure: find and remove records by the values of a column."""
