"""Kafka offsets and ingest hours: positions, where hours end, and both in SQL."""
