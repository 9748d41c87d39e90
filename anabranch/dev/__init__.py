"""A whole Anabranch on one machine: pinned jars, a real Kafka broker, a real S3 server.

Nothing here runs in production, and nothing outside this package needs it.
"""
