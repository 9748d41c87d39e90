"""`egress` of a stream's file: the destinations of its accepted hours."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from anabranch.config.base import Frozen
from anabranch.config.plain import parse_target

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/[^\s?#*]+")
_LOCAL = re.compile(r"file:///[^\s?#*]+")


def _root(value: str) -> str:
    if not any(kind.fullmatch(value) for kind in (_S3, _LOCAL)) or ".." in value.split("/"):
        raise ValueError("expected s3://BUCKET/FOLDER or file:///FOLDER")
    return value.rstrip("/")


class _Target(Frozen):
    name: Annotated[str, BeforeValidator(parse_target)]

    @property
    def place(self) -> str:
        """The destination's identity, by which duplicate targets are found."""
        raise NotImplementedError


class FolderTarget(_Target):
    """Folders of Parquet files, `ROOT/date=…/hour=…/`."""

    type: Literal["folder"]
    root: Annotated[str, AfterValidator(_root)]

    @property
    def place(self) -> str:
        return self.root


class TopicTarget(_Target):
    """Another topic of the same Kafka."""

    type: Literal["topic"]
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")

    @property
    def place(self) -> str:
        return self.topic


class SearchTarget(_Target):
    """An index of the environment's `search:`."""

    type: Literal["search"]
    index: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,199}$")

    @property
    def place(self) -> str:
        # Topic names have no colon.
        return f"index:{self.index}"


Target = Annotated[FolderTarget | TopicTarget | SearchTarget, Field(discriminator="type")]


def check_targets(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Check that no two targets share a name or a place, and that no place is within another.
    Raises ValueError."""
    for what, values in (
        ("name", [t.name for t in targets]),
        ("place", [t.place for t in targets]),
    ):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ValueError(f"expected each {what} once, found {twice!r} twice")
    places = [f"{t.place}/" for t in targets]
    for one in places:
        if inside := next(
            (other for other in places if other != one and other.startswith(one)), None
        ):
            raise ValueError(
                f"expected no target's folder within another's, found {inside} in {one}"
            )
    return targets
