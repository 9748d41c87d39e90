"""A client of the schema registry: schemas and subjects by id, over Confluent's REST API.

The API: https://docs.confluent.io/platform/current/schema-registry/develop/api.html. The schema of
an id never changes, so schemas are cached. Missing ones are requested again, since they may be
added. Each context of a registry has ids of its own; a subject such as `:.eu:orders-value` names
its context, and other subjects are those of the default context.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from anabranch import config
from anabranch.common import http
from anabranch.common.errors import ConfigurationError, Transient

if TYPE_CHECKING:
    import requests

LOG = logging.getLogger(__name__)

LARGEST_ID = 2**31 - 1
"""The largest id: ids are 32-bit signed integers, never negative."""

_SECONDS = 15.0
_NOT_FOUND = (40401, 40402, 40403)  # no such subject, version, schema
_QUALIFIED = re.compile(r":(\.[^:]+):")
_MEDIA_TYPES = "application/vnd.schemaregistry.v1+json, application/json"


References = tuple[tuple[str, str], ...]
"""The names and texts of the schemas to which one refers, each after those to which it refers
itself."""


@dataclass(frozen=True)
class RegisteredSchema:
    """A schema of the registry; `type` is AVRO, JSON or PROTOBUF."""

    id: int
    type: str
    text: str
    references: References = ()


@dataclass(frozen=True)
class SubjectVersion:
    """The latest version of a subject; `type` is AVRO, JSON or PROTOBUF."""

    subject: str
    version: int
    type: str
    text: str
    references: References = ()


class SchemaRegistryClient:
    """A client of a schema registry; if one server does not answer, the next is asked. Methods
    raise Transient if none answers, ConfigurationError if the registry refuses."""

    def __init__(self, settings: config.Registry) -> None:
        self._settings = settings
        credentials: tuple[str, str] | str | None = None
        if settings.token is not None:
            credentials = f"Bearer {settings.token.get_secret_value()}"
        if settings.user is not None:
            password = settings.password.get_secret_value() if settings.password is not None else ""
            credentials = (settings.user, password)
        self._session = http.open_session("registry.url", credentials)
        # Of the session, they would give way to REQUESTS_CA_BUNDLE.
        self._tls = {"cert": settings.certificate} | (
            {"verify": settings.ca} if settings.ca else {}
        )
        self._session.headers["Accept"] = _MEDIA_TYPES
        self._urls = deque(settings.url.split(","))
        self._schemas: dict[tuple[int, str], RegisteredSchema] = {}
        self._subjects: dict[tuple[int, str], frozenset[str]] = {}
        self._versions: dict[tuple[str, int], Mapping[str, Any]] = {}

    def schema(self, schema_id: int, subject: str | None = None) -> RegisteredSchema | None:
        """Return the schema of an id, in the context of `subject`; None without it."""
        context = _context(subject)
        if (schema_id, context) not in self._schemas:
            path = f"schemas/ids/{schema_id}" + (f"?{_of(subject)}" if context else "")
            answer = self._get(path) if 0 <= schema_id <= LARGEST_ID else None
            if answer is None:
                return None
            text = answer.get("schema") if isinstance(answer, dict) else None
            if not isinstance(text, str):
                raise self._unexpected(path, "no schema")
            kind = answer.get("schemaType") or "AVRO"
            self._schemas[schema_id, context] = RegisteredSchema(
                schema_id, kind, text, self._references(path, answer, context)
            )
            LOG.info("schema registry: schema id %d is %s", schema_id, kind)
        return self._schemas[schema_id, context]

    def belongs(self, schema_id: int, subject: str) -> bool:
        """Return whether a version of the subject, even a deleted one, has this schema id in the
        subject's context."""
        key = schema_id, _context(subject)
        if subject not in self._subjects.get(key, ()):
            self._subjects[key] = self.subjects(schema_id, subject)
        return subject in self._subjects[key]

    def subjects(self, schema_id: int, of: str | None = None) -> frozenset[str]:
        """Return the subjects of which a version, even a deleted one, has this schema id, in the
        context of subject `of`."""
        path = f"schemas/ids/{schema_id}/versions?deleted=true"
        path += f"&{_of(of)}" if _context(of) else ""
        versions = self._get(path) or []
        if not isinstance(versions, list) or not all(
            isinstance(v, dict) and "subject" in v for v in versions
        ):
            raise self._unexpected(path, "no list of versions")
        return frozenset(str(version["subject"]) for version in versions)

    def has_subject(self, subject: str) -> bool:
        """Return whether the registry has a version of the subject."""
        return self._get(f"subjects/{quote(subject, safe='')}/versions") is not None

    def latest(self, subject: str) -> SubjectVersion | None:
        """Return the latest version of a subject; None if the registry has none."""
        path = f"subjects/{quote(subject, safe='')}/versions/latest"
        answer = self._get(path)
        if answer is None:
            return None
        text, version = (
            answer.get(key) if isinstance(answer, dict) else None for key in ("schema", "version")
        )
        if not isinstance(text, str) or not isinstance(version, int):
            raise self._unexpected(path, "no version of a subject")
        kind = answer.get("schemaType") or "AVRO"
        references = self._references(path, answer, _context(subject))
        return SubjectVersion(subject, version, kind, text, references)

    def _references(self, path: str, answer: Mapping[str, Any], context: str) -> References:
        """Return the schemas to which an answer's refers, by default in its own context."""
        texts: dict[str, str] = {}
        seen: set[str] = set()

        def collect(references: Any) -> None:
            try:
                found = [(str(r["name"]), str(r["subject"]), int(r["version"])) for r in references]
            except (KeyError, TypeError, ValueError):
                raise self._unexpected(
                    path, "references without name, subject and version"
                ) from None
            for name, subject, version in found:
                if name not in seen:
                    seen.add(name)
                    is_plain = context and not _context(subject)
                    of = self._version(f":{context}:{subject}" if is_plain else subject, version)
                    collect(of.get("references") or ())
                    texts[name] = of["schema"]

        collect(answer.get("references") or ())
        return tuple(texts.items())

    def _version(self, subject: str, version: int) -> Mapping[str, Any]:
        """Return a version of a subject, even a deleted one. It never changes."""
        if (subject, version) not in self._versions:
            path = f"subjects/{quote(subject, safe='')}/versions/{version}?deleted=true"
            answer = self._get(path)
            if not isinstance(answer, dict) or not isinstance(answer.get("schema"), str):
                raise self._unexpected(path, "no version of a subject")
            self._versions[subject, version] = answer
        return self._versions[subject, version]

    def _get(self, path: str) -> Any:
        """Return the JSON of the answer; None if the registry itself answers "not found"."""
        for _ in range(len(self._urls) - 1):
            try:
                return self._get_here(path)
            except Transient as error:
                LOG.warning("schema registry: asking the next server: %s", error)
                self._urls.rotate(-1)
        return self._get_here(path)

    def _get_here(self, path: str) -> Any:
        url = f"{self._urls[0]}/{path}"
        doing, check_ca = (
            f"ask the schema registry for {url}",
            "its certificate, registry.ca and registry.certificate, then start it again",
        )
        answer = http.request(
            self._session, "GET", url, doing, "registry.url", check_ca, _SECONDS, **self._tls
        )
        status, body = answer.status_code, _json(answer)
        if status == 200 and body is not None:
            return body
        message = body.get("message") if isinstance(body, dict) else None
        status_line = f"{status} {message or answer.reason or ''}".strip()[:300]
        # A 404 without the registry's error code (a proxy, a wrong path) is not about a schema.
        if status == 404 and isinstance(body, dict) and body.get("error_code") in _NOT_FOUND:
            return None
        check = (
            "registry.user and registry.password, or registry.token, and the rights, then start it "
            "again"
        )
        http.check_answer(status, status_line, doing, check)
        raise self._unexpected(path, status_line)

    def _unexpected(self, path: str, actual: str) -> ConfigurationError:
        return ConfigurationError(
            f"ask the schema registry for {self._urls[0]}/{path}: expected the answer of a "
            f"schema registry's REST API, found {actual}; check registry.url, then start it again"
        )


def open_registry(environment: config.Environment, stream: config.Stream) -> SchemaRegistryClient:
    """Return a client of the environment's registry. Raises ConfigurationError if none is set."""
    if environment.registry is None:
        raise ConfigurationError(
            "anabranch.yaml: registry: expected the url of a schema registry, which format "
            f"{stream.format.type} of stream {stream.name} needs, found none"
        )
    return SchemaRegistryClient(environment.registry)


def _context(subject: str | None) -> str:
    """Return the context that a subject names, such as `.eu`; empty for the default one. Pure."""
    match = _QUALIFIED.match(subject or "")
    return match[1] if match is not None else ""


def _of(subject: str | None) -> str:
    return f"subject={quote(subject or '', safe='')}"


def _json(answer: requests.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        return None
