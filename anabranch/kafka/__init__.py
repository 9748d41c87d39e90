"""Kafka: its client, its security, its records as Spark frames, and the schema registry beside
it."""
