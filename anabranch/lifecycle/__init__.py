"""What changes published data: maintenance, retention, erasure, import."""
