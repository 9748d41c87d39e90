"""Check the schema registry of a stream whose format needs one."""

from __future__ import annotations

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.config import Environment, Stream
from anabranch.kafka.schema_registry import open_registry
from anabranch.operations.doctor.finding import Finding, Issue, error, warning


def read(environment: Environment, stream: Stream) -> bool:
    """Return whether the registry has the stream's subject; True for a stream without a subject if
    the registry answers. Raises ConfigurationError when the server refuses or is not a registry,
    Transient when it is unreachable."""
    registry = open_registry(environment, stream)
    if stream.format.subject is not None or stream.subject_schema is not None:
        return registry.has_subject(stream.subject)
    # Any answer about an id shows that the registry is reachable.
    registry.schema(1)
    return True


def failed(stream: Stream, failure: AnabranchError) -> Finding:
    if isinstance(failure, ConfigurationError):
        remedy = "registry.url and the keys beside it in anabranch.yaml"
        return error(
            Issue.REGISTRY_RIGHTS, stream.name, "permission to read schemas", str(failure), remedy
        )
    remedy = "registry.url in anabranch.yaml, and the network to it"
    return error(
        Issue.REGISTRY_AWAY, stream.name, "an answer from the schema registry", str(failure), remedy
    )


def findings(stream: Stream, has_subject: bool) -> list[Finding]:
    if has_subject:
        return []
    remedy = f"format.subject in {stream.name}.yaml, or the first schema registered by a producer"
    return [
        warning(Issue.SUBJECT_MISSING, stream.name, f"subject {stream.subject}", "none", remedy)
    ]
