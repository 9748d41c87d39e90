"""What every part uses: errors, logs, output, retries, files. Knows no Kafka, no Spark and no
Iceberg."""
