"""Anabranch on one machine: a Kafka broker, an S3 server, producers and demos.

Not for production. Only `anabranch dev` and the demos use it.
"""
