"""Keyed hashes of erased values, with secrets of the configuration.

A hash is an HMAC-SHA256 of column and value, truncated to 128 bits: without the key, values cannot
be tried against it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

_BYTES = 16


@dataclass(frozen=True)
class Key:
    """A secret key. Its id does not reveal it."""

    secret: bytes

    @property
    def id(self) -> str:
        """The id of the key in the ledger."""
        return hmac.new(self.secret, b"id of a key of erasures", hashlib.sha256).hexdigest()[
            :_BYTES
        ]

    def hash(self, column: str, value: str) -> str:
        """Return the hash of a value of a column, as 32 hex digits."""
        message = f"{column}\0{value}".encode()
        return hmac.new(self.secret, message, hashlib.sha256).digest()[:_BYTES].hex()

    def hashes(self, column: str, values: Iterable[str]) -> tuple[str, ...]:
        """Return the hashes of values, each once, in an order that does not reveal the values'."""
        return tuple(sorted({self.hash(column, value) for value in values}))

    def id_of(self, column: str, hashes: Iterable[str], number: int = 0) -> str:
        """Return the id of the erasure of these values. `number` counts repeated requests, from
        1."""
        message = "\0".join((column, *hashes, *([str(number)] if number else []))).encode()
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()[:_BYTES]

    def __repr__(self) -> str:
        return f"Key({self.id})"
