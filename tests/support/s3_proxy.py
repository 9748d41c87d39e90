"""An S3Proxy of a test's own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from servers import serving

from anabranch.dev.services import ACCESS_KEY, SECRET_KEY, s3_server
from anabranch.dev.services.processes import free_port, properties_text
from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import require_java


@contextmanager
def running_s3_proxy(folder: Path) -> Iterator[int]:
    """A fresh server with the local keys for the length of a `with`; its port. It ignores a session token, which its
    keys do not have."""
    port, file = free_port(), folder / "s3.properties"
    (folder / "data").mkdir()
    properties = s3_server.server_properties(port, ACCESS_KEY, SECRET_KEY, folder / "data")
    properties["s3proxy.ignore-unknown-headers"] = "true"
    file.write_text(properties_text(properties), encoding="utf-8")
    java = [str(require_java().executable), "-Xmx256m", "-Djava.awt.headless=true"]
    classes = {"CLASSPATH": os.pathsep.join(map(str, ensure_jars().s3))}
    command = [*java, "org.gaul.s3proxy.Main", "--properties", str(file)]
    with serving(command, folder / "s3proxy.log", lambda: s3_server.answers(port), environment=classes):
        yield port
