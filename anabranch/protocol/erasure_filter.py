"""The filter of erased records that a layer leaves out: the hashes of the erasures that cover its
offsets, by secret keys, and the places of erased dead letters of its hours."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.config import Environment, Stream
from anabranch.offsets.hours import hour_of
from anabranch.offsets.position import Ranges
from anabranch.protocol.erasure import lacks_places, places_of
from anabranch.protocol.ledger import Ledger, with_waiting
from anabranch.protocol.registers import Erasure, Erasures
from anabranch.protocol.state import State

_BYTES = 16


@dataclass(frozen=True)
class Key:
    """A secret key of the configuration. Its id does not reveal it.

    A hash is an HMAC-SHA256 of column and value, truncated to 128 bits: without the key, values
    cannot be tried against it.
    """

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
        """Return the id of an erasure of values. `number` counts repeated requests, from 1."""
        message = "\0".join((column, *hashes, *([str(number)] if number else []))).encode()
        return hmac.new(self.secret, message, hashlib.sha256).hexdigest()[:_BYTES]

    def __repr__(self) -> str:
        return f"Key({self.id})"


_REPAIR = (
    "was the ledger dropped or set back? Erased records would come back: run `anabranch erase` "
    "with the same values, which records it again, or roll the ledger back to a snapshot with it"
)


@dataclass(frozen=True)
class Request:
    """The request of an erasure in the ledger: its column, the keyed hashes of its values, and the
    id of their key. `source`: the source of the column's values (`source_of`)."""

    column: str
    key: str
    hashes: frozenset[str]
    source: str


@dataclass(frozen=True)
class HashedValues:
    """Hashes of erased values of a column, and the offset ranges in which they are erased."""

    column: str
    key: Key
    hashes: frozenset[str]
    ranges: Ranges

    def matches(self, value: str) -> bool:
        """Whether records with this value, as a string, are erased."""
        return self.key.hash(self.column, value) in self.hashes


@dataclass(frozen=True)
class HourFilter:
    """The records to leave out of an hour, by value and by place (partition, offset)."""

    hour: str
    values: tuple[HashedValues, ...]
    places: frozenset[tuple[int, int]]


@dataclass(frozen=True)
class ErasureFilter:
    """The records to leave out, by hour."""

    hours: tuple[HourFilter, ...]


def load_filter(
    environment: Environment,
    stream: Stream,
    ledger: Ledger,
    state: State,
    topic_id: str,
    by_hour: Mapping[str, Ranges],
) -> ErasureFilter | None:
    """Return the filter for offsets of one log, by hour; None if no erasure covers them. It has the
    erasures of `state`, whose marks the staged rows get. Raises ConfigurationError if the key of an
    erasure is missing or the source of its column changed, Terminal if the ledger lacks its hashes,
    Transient."""
    covering = {h: state.erasures.covering(h, topic_id, ranges) for h, ranges in by_hour.items()}
    wanted = {one.id: one for erasures in covering.values() for one in erasures}
    if not wanted:
        return None
    keys, requests = keys_of(environment), load_requests(ledger, list(wanted.values()))
    _require_sources(environment, stream, requests)
    history = ledger.history([h for h, erasures in covering.items() if erasures])

    for hour, erasures in covering.items():
        for one in erasures:
            if lacks_places(with_waiting(state, hour, history), one, hour):
                raise Terminal(
                    f"ledger {ledger.name}: expected {one.places[hour]} places of dead letters of "
                    f"erasure {one.id} in hour {hour}, found fewer; {_REPAIR}"
                )

    def values(one: Erasure, hour: str) -> HashedValues:
        request = requests[one.id]
        # An error, not an empty filter: erased records would come back as rows.
        if (key := keys.get(request.key)) is None:
            raise ConfigurationError(
                f"erasure.key: expected the key {request.key} of erasure {one.id}, found "
                f"{', '.join(keys) or 'none'}; add the former key to `erasure.key` in "
                "conf/anabranch.yaml: without it, erased records would come back"
            )
        return HashedValues(
            one.column, key, request.hashes, one.covered(hour, topic_id, by_hour[hour])
        )

    return ErasureFilter(
        tuple(
            HourFilter(
                hour,
                tuple(values(one, hour) for one in erasures),
                # Decision 51: places that still wait for their ledger row count too, else their
                # dead letters would be staged again.
                frozenset(places_of(with_waiting(state, hour, history)).get(hour, ())),
            )
            for hour, erasures in covering.items()
            if erasures
        )
    )


def source_of(environment: Environment, stream: Stream, column: str) -> str:
    """Return the source of a column in the stream's file, and the id of the secret if the column is
    a keyed hash. Both determine its values."""
    source, secret = stream.source_of(column), environment.masking_secret
    is_masked = any(one.masks for one in stream.select or () if one.name == column)
    return f"{source} by secret {Key(secret).id}" if is_masked and secret is not None else source


def require_sources(
    environment: Environment, stream: Stream, ledger: Ledger, erasures: Erasures
) -> None:
    """Raise ConfigurationError if the source of an erasure's column changed since its request: its
    hashes are of the former values. Raises Terminal and Transient as `load_requests`."""
    _require_sources(environment, stream, load_requests(ledger, erasures.all))


def _require_sources(
    environment: Environment, stream: Stream, requests: Mapping[str, Request]
) -> None:
    for id, request in requests.items():
        now = source_of(environment, stream, request.column)
        if request.source != now:
            raise ConfigurationError(
                f"stream {stream.name}: select: {request.column}: expected {request.source}, as "
                f"when erasure {id} was requested, found {now}: other values have other hashes, "
                "so erased records would come back; restore it until `anabranch erasures "
                f"{stream.name}` no longer lists the erasure, and select the new values "
                "under another name"
            )


def keys_of(environment: Environment) -> dict[str, Key]:
    """Return the keys of the configuration by id, the current one first."""
    if environment.erasure is None:
        return {}
    keys = (Key(secret.get_secret_value().encode()) for secret in environment.erasure.key)
    return {key.id: key for key in keys}


_REQUESTS: dict[tuple[str, str], Request] = {}


def load_requests(ledger: Ledger, erasures: Sequence[Erasure]) -> dict[str, Request]:
    """Return the requests of these erasures by id. A process reads each once: it never changes.
    Raises Terminal if the ledger lacks one, Transient."""
    missing = [one for one in erasures if (ledger.name, one.id) not in _REQUESTS]
    if missing:
        rows = ledger.requests({hour_of(one.at) for one in missing})
        found = {row.erasure["id"]: row.erasure for row in rows if row.erasure is not None}
        for one in missing:
            if one.id not in found:
                raise Terminal(
                    f"ledger {ledger.name}: expected the request of erasure {one.id} of "
                    f"{one.at:%F %T} UTC, found none; {_REPAIR}"
                )
            said = found[one.id]
            hashes = frozenset(said["hashes"])
            _REQUESTS[ledger.name, one.id] = Request(
                said["column"], said["key"], hashes, said["source"]
            )
    return {one.id: _REQUESTS[ledger.name, one.id] for one in erasures}
