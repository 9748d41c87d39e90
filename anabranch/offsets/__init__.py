"""Kafka offsets and ingest hours: positions, the ends of hours, and offset ranges in SQL."""
