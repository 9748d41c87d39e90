"""Temporary keys of S3 that a catalog vends with each load of a table. They are renewed by another
load, in every process that uses the table's files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Protocol

from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from anabranch.common.errors import AnabranchError
from anabranch.common.remote_errors import explained_errors
from anabranch.iceberg.catalog_settings import limit_rest_waits

LOG = logging.getLogger(__name__)

KEY_NAMES = ("s3.access-key-id", "s3.secret-access-key", "s3.session-token")
_END = "s3.session-token-expires-at-ms"

# Keys are renewed this time before their end, as by Iceberg's Java client; shorter ones at half of
# their life.
_AHEAD_SECONDS = 300.0
# The assumed life of keys whose end the catalog does not give.
_UNKNOWN_SECONDS = 600.0
_AGAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Keys:
    """Temporary keys of S3, and the seconds of this machine's clock between which they are used
    without a renewal. After `end` S3 refuses them."""

    access: str
    secret: str = field(repr=False)
    token: str = field(repr=False)
    renewal: float = float("inf")
    end: float = float("inf")

    def current(self) -> Keys:
        """Return these keys, which nothing renews."""
        return self

    def expire(self) -> None:
        """Do nothing: there are no others."""

    def as_properties(self) -> dict[str, str]:
        """Return PyIceberg's properties of the keys."""
        keys = dict(zip(KEY_NAMES, (self.access, self.secret, self.token), strict=True))
        return keys if self.end == float("inf") else keys | {_END: str(int(1000 * self.end))}


def keys_in(properties: Mapping[str, str], now: float) -> Keys | None:
    """Return the temporary keys of a file access's properties at `now`, None without any. Pure."""
    if not all(name in properties for name in KEY_NAMES):
        return None
    millis = properties.get(_END)
    end = float(millis) / 1000 if millis is not None else now + _UNKNOWN_SECONDS
    renewal = end - min(_AHEAD_SECONDS, max(0.0, end - now) / 2)
    access, secret, token = (properties[name] for name in KEY_NAMES)
    return Keys(access, secret, token, renewal, end)


class KeySource(Protocol):
    """A source of temporary keys of S3."""

    def current(self) -> Keys:
        """Return keys that are valid now. Raises as `Lake.load` if they have to be renewed."""

    def expire(self) -> None:
        """Never use the current keys again: S3 has refused them."""


@dataclass(frozen=True)
class Vendor(KeySource):
    """The catalog and the table whose load has new keys. Picklable; it contains the catalog's
    secrets, as the settings of Spark's executors do."""

    catalog: str
    properties: tuple[tuple[str, str], ...] = field(repr=False)
    table: tuple[str, ...]

    def offer(self, properties: Mapping[str, str]) -> None:
        """Use the keys in the properties of a new load from now on, unless those of an earlier load
        are not to be renewed yet: new keys need new connections."""
        if (keys := keys_in(properties, time.time())) is not None:
            self._newest.offer(keys)

    def current(self) -> Keys:
        return self._newest.current()

    def expire(self) -> None:
        self._newest.expire()

    @property
    def _newest(self) -> _Newest:
        # A forked process must not use its parent's connections.
        return _newest_of(os.getpid(), self)


def vendor_of(table: Table) -> Vendor | None:
    """Return the vendor of a loaded table's keys; None if they are the configuration's own."""
    own, loaded = table.catalog.properties, table.io.properties
    token = KEY_NAMES[-1]
    if loaded.get(token) in (None, own.get(token)):
        return None
    vendor = Vendor(table.catalog.name, tuple(sorted(own.items())), tuple(table.name()))
    vendor._newest.catalog = table.catalog
    vendor.offer(loaded)
    return vendor


class _Newest:
    """The newest keys of one table in this process. Thread-safe."""

    def __init__(self, vendor: Vendor) -> None:
        self.catalog: Catalog | None = None
        self._vendor, self._lock = vendor, Lock()
        self._keys: Keys | None = None
        self._refused = ""
        self._asked = 0.0

    def offer(self, keys: Keys) -> None:
        with self._lock:
            is_due = self._keys is None or time.time() >= self._keys.renewal
            if is_due and keys.token != self._refused:
                self._keys = keys

    def current(self) -> Keys:
        if (keys := self._keys) is not None and time.time() < keys.renewal:
            return keys
        with self._lock:
            keys, now = self._keys, time.time()
            if keys is not None and (
                now < keys.renewal or (now < keys.end and now - self._asked < _AGAIN_SECONDS)
            ):
                return keys
            self._asked = now
            try:
                self._keys = self._load()
            except AnabranchError as error:
                if keys is None or now >= keys.end:
                    raise
                LOG.debug("%s; using the former keys", error)
                return keys
            return self._keys

    def expire(self) -> None:
        with self._lock:
            if self._keys is not None:
                self._refused, self._keys = self._keys.token, None

    def _load(self) -> Keys:
        name = ".".join(self._vendor.table)
        with explained_errors(f"renew the keys of S3 for table {name}"):
            if self.catalog is None:
                limit_rest_waits()
                self.catalog = load_catalog(self._vendor.catalog, **dict(self._vendor.properties))
            io: FileIO = self.catalog.load_table(self._vendor.table).io
            found = keys_in(io.properties, time.time())
            if found is None:
                raise ValueError("the catalog vends no keys any more")
            return found


@lru_cache(maxsize=1 << 12)
def _newest_of(process: int, vendor: Vendor) -> _Newest:
    return _Newest(vendor)
