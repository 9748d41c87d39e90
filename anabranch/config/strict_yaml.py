"""YAML in which a key given twice is an error; by itself the second silently replaces the first."""

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
    """The one document of `text`. Raises yaml.YAMLError, with line and column."""
    return yaml.load(text, Loader=_Loader)
