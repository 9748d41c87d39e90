"""A whole Anabranch on one machine: a real Kafka broker, a real S3 server, producers and demos.

Nothing here runs in production, and only `anabranch dev` needs it.
"""
