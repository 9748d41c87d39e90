"""Operations that change published data: maintenance, retention, erasure, import."""
