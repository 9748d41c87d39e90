"""The S3 server of `anabranch dev`: S3Proxy over a local folder."""

from __future__ import annotations

import http.client
import os
from collections.abc import Sequence
from pathlib import Path

import psutil

from anabranch.dev.services.processes import HOST, Daemon, properties_text, write_private
from anabranch.spark.jars import jvm_folder

READY_SECONDS = 60.0


def server_properties(port: int, access_key: str, secret_key: str, data: Path) -> dict[str, object]:
    """Return the properties of S3Proxy; each bucket is a folder of `data`."""
    return {
        "s3proxy.endpoint": f"http://{HOST}:{port}",
        "s3proxy.authorization": "aws-v2-or-v4",
        "s3proxy.identity": access_key,
        "s3proxy.credential": secret_key,
        "jclouds.provider": "filesystem-nio2",
        "jclouds.filesystem.basedir": data,
    }


def properties_file(daemon: Daemon) -> Path:
    return daemon.home / "run" / "s3.properties"


def settings(daemon: Daemon, port: int, access_key: str, secret_key: str) -> str:
    """Return the properties file for these arguments, which shows if a server has others."""
    return properties_text(
        server_properties(port, access_key, secret_key, daemon.home / "data" / "s3")
    )


def start(
    daemon: Daemon, java: Path, jars: Sequence[Path], port: int, access_key: str, secret_key: str
) -> psutil.Process:
    """Start the server. It is ready once `answers` is True."""
    (daemon.home / "data" / "s3").mkdir(parents=True, exist_ok=True)
    properties = properties_file(daemon)
    write_private(properties, settings(daemon, port, access_key, secret_key))
    environment = {**os.environ, "CLASSPATH": os.pathsep.join(map(str, jars))}
    jvm = [
        str(java),
        "-Xmx256m",
        "-Djava.awt.headless=true",
        "-XX:+ExitOnOutOfMemoryError",
        daemon.marker(port),
    ]
    jvm.append(f"-Dlogback.configurationFile={(jvm_folder() / 'logback-s3proxy.xml').as_uri()}")
    return daemon.start(
        [*jvm, "org.gaul.s3proxy.Main", "--properties", str(properties)], port, environment
    )


def answers(port: int) -> bool:
    """Return whether a server answers as S3: it refuses an unsigned request with an XML error."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/")
        response = connection.getresponse()
        return response.status == 403 and b"<Code>AccessDenied</Code>" in response.read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
