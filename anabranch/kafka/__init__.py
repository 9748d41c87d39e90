"""Kafka: client, security, records as Spark DataFrames, and the schema registry."""
