"""Anabranch: Kafka to one exact Iceberg table through two arms."""

__version__ = "0.1.0"
