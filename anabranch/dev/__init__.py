"""Anabranch on one machine: a Kafka broker, an S3 server and producers.

Not for production. Only `anabranch dev`, examples and tests use it.
"""
