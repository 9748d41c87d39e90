"""Producers: what fills a topic in demos, tests and soaks."""
