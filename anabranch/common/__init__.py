"""Errors, logs, output, retries and files, for all packages. Knows no Kafka, Spark or Iceberg."""
