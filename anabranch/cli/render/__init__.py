"""Texts of the commands' views, by subject."""
