"""A separate S3Proxy for a test, with HTTP, or TLS and a certificate of a private authority."""

import http.client
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from authority import STORE_PASSWORD, Authority
from servers import serving

from anabranch.dev.services import ACCESS_KEY, SECRET_KEY, s3_server
from anabranch.dev.services.processes import HOST, free_port, properties_text
from anabranch.spark.jars import ensure_jars, jvm_folder
from anabranch.spark.java import require_java


@contextmanager
def running_s3_proxy(folder: Path, authority: Authority | None = None) -> Iterator[int]:
    """Run a new server with the local keys within a `with`; it ignores session tokens. Its port."""
    port, file = free_port(), folder / "s3.properties"
    (folder / "data").mkdir()
    properties = s3_server.server_properties(port, ACCESS_KEY, SECRET_KEY, folder / "data")
    properties["s3proxy.ignore-unknown-headers"] = "true"
    if authority is not None:
        del properties["s3proxy.endpoint"]
        properties |= {
            "s3proxy.secure-endpoint": f"https://{HOST}:{port}",
            "s3proxy.keystore-path": authority.keystore(folder / "s3.p12"),
            "s3proxy.keystore-password": STORE_PASSWORD,
        }
    file.write_text(properties_text(properties), "utf-8")

    def answers() -> bool:
        if authority is None:
            return s3_server.answers(port)
        trusting = ssl.create_default_context(cafile=authority.file)
        connection = http.client.HTTPSConnection(HOST, port, timeout=10, context=trusting)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 403
        finally:
            connection.close()

    logging = f"-Dlogback.configurationFile={jvm_folder() / 'logback-s3proxy.xml'}"
    java = [str(require_java()), "-Xmx256m", "-Djava.awt.headless=true", logging]
    classes = {"CLASSPATH": os.pathsep.join(map(str, ensure_jars().s3))}
    command = [*java, "org.gaul.s3proxy.Main", "--properties", str(file)]
    with serving(command, folder / "s3proxy.log", answers, environment=classes):
        yield port
