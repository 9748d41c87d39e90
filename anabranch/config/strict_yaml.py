"""YAML that refuses repeated keys; YAML alone would silently keep the last value."""

from __future__ import annotations

from typing import Any

import yaml

from anabranch.config.mistakes import RepeatedKey


class _Loader(yaml.SafeLoader):
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
