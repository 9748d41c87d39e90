"""Hook of mkdocs.yml: a link to a file outside of docs/ becomes its text, since the site does not
contain the file."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)[^)]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page without links to files outside of docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def text_only(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        return f"{match[1]} (`{path[3:]}`)" if path.startswith("../") else match[0]

    return _LINK.sub(text_only, markdown)
