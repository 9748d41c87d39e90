"""YAML that refuses repeated keys; YAML alone would silently keep the last value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from anabranch.common.errors import ConfigurationError
from anabranch.config.mistakes import RepeatedKey, explain_yaml


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            # PyYAML raises Python's own errors for a scalar such as the date 2026-11-31.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"no valid {kind}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in known:
                    raise RepeatedKey(None, None, f"the key {key.value!r} twice", key.start_mark)
                known.add(key.value)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Load the single document in `text`. Raises yaml.YAMLError, with line and column."""
    return yaml.load(text, Loader=_Loader)


def load_mapping(path: Path, expected: str) -> dict[str, Any]:
    """Read a file of keys, `expected` in messages. Raises ConfigurationError."""
    try:
        data = load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        # The error and its text contain lines of the file, which may be secret: neither is passed
        # on.
        raise ConfigurationError(
            f"{path}: expected {expected}, found: {explain_yaml(error)}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: expected {expected}, found: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return data
