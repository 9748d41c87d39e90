"""`egress` of a stream's file: the destinations of its accepted hours."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from anabranch.config.base import Frozen
from anabranch.config.plain import parse_target

_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/[^\s?#*]+")
_LOCAL = re.compile(r"file:///[^\s?#*]+")

Kind = Literal["root", "topic", "index"]
KINDS: tuple[Kind, ...] = ("root", "topic", "index")


def _root(value: str) -> str:
    if not any(kind.fullmatch(value) for kind in (_S3, _LOCAL)) or ".." in value.split("/"):
        raise ValueError("expected s3://BUCKET/FOLDER or file:///FOLDER")
    return value.rstrip("/")


class Target(Frozen):
    """A destination: folders of Parquet files, another topic, or an index of a search cluster."""

    name: Annotated[str, BeforeValidator(parse_target)] = Field(
        description="The target's name.", examples=["export"]
    )
    root: Annotated[str, AfterValidator(_root)] | None = Field(
        default=None,
        description="The folder of its Parquet files, `ROOT/date=…/hour=…/`: "
        "`s3://BUCKET/FOLDER` or `file:///FOLDER`.",
        examples=["s3://exports/orders"],
    )
    topic: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,249}$",
        description="Instead of `root`: another topic of the same Kafka.",
        examples=["orders_accepted"],
    )
    index: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9][a-z0-9._-]{0,199}$",
        description="Instead of `root`: an index of the environment's `search`.",
        examples=["orders"],
    )

    @model_validator(mode="after")
    def _one_place(self) -> Target:
        if len([kind for kind in KINDS if getattr(self, kind) is not None]) != 1:
            raise ValueError("expected one of root, topic and index")
        return self

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def place(self) -> str:
        """The folder, topic or index."""
        place: str = getattr(self, self.kind)
        return place


def check_targets(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Check that no two targets share a name or a place, and that no place is within another.
    Raises ValueError."""
    for what, values in (
        ("name", [("name", t.name) for t in targets]),
        ("place", [(str(t.kind), t.place) for t in targets]),
    ):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ValueError(f"expected each {what} once, found {twice[1]!r} twice")
    places = [f"{t.place}/" for t in targets]
    for one in places:
        if inside := next(
            (other for other in places if other != one and other.startswith(one)), None
        ):
            raise ValueError(
                f"expected no target's folder within another's, found {inside} in {one}"
            )
    return targets
