"""A REST catalog that vends temporary keys of S3, and an S3 that expects them, in front of real
servers.

The catalog adds keys that live `lifetime` seconds to loads and creations of tables whose client
asks for them (`X-Iceberg-Access-Delegation`), and renews them for Iceberg's Java client. Its bearer
tokens live `bearer_lifetime` seconds. S3 refuses requests without a session token, and with one
that has expired. The keys are those of the S3 behind, which ignores session tokens.
"""

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flaky_s3 import FlakyS3, Handler, running_flaky_s3, serving
from rest_catalog import running_rest_catalog
from s3_proxy import running_s3_proxy

from anabranch.config import S3
from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from anabranch.dev.services.processes import HOST
from anabranch.iceberg.s3 import ObjectStore

SECRET = "client-secret-of-the-test"


@dataclass
class Vending:
    """A running catalog and S3. `asked`: the requests of the catalog, by kind and client. `table_buckets`: S3
    refuses lists, deletes and requests of a bucket, as Amazon S3 Tables. `drops_refs`: the catalog
    accepts other branches than `main` and drops them, as Nessie 0.99. `read_only`: it changes
    nothing."""

    s3: FlakyS3
    upstream_port: int
    lifetime: float
    bearer_lifetime: float
    port: int = 0
    table_buckets: bool = False
    drops_refs: bool = False
    read_only: bool = False
    asked: Counter[tuple[str, str]] = field(default_factory=Counter)
    keys: dict[str, float] = field(default_factory=dict)
    bearers: dict[str, float] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def catalog(self) -> dict[str, Any]:
        """The section `catalog` of a configuration, without the warehouse."""
        properties = {"credential": f"anabranch:{SECRET}"}
        properties |= {"oauth2-server-uri": f"{self.url}/v1/oauth/tokens"}
        return {"type": "rest", "uri": self.url, "properties": properties}

    def vend(self) -> dict[str, str]:
        """Return new keys, as properties of a table."""
        token = uuid.uuid4().hex
        self.keys[token] = end = time.time() + self.lifetime
        keys = {"s3.access-key-id": ACCESS_KEY, "s3.secret-access-key": SECRET_KEY}
        session = {"s3.session-token-expires-at-ms": str(int(1000 * end))}
        return keys | session | {"s3.session-token": token}

    def refuse(self, method: str, path: str, token: str) -> str | None:
        """Return the status with which S3 refuses a request."""
        if token not in self.keys:
            return "403"
        if self.keys[token] < time.time():
            return "400"
        is_of_bucket = path.partition("?")[0].strip("/").count("/") == 0
        return "405" if self.table_buckets and (is_of_bucket or method == "DELETE") else None


class _Catalog(Handler):
    vending: Vending
    # The content is read here; the server behind knows no bearer tokens.
    dropped = Handler.dropped | {"accept-encoding", "authorization"}

    def _serve(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        if path.endswith("/oauth/tokens"):
            return self._give_bearer(body)
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.vending.bearers.get(bearer, 0) < time.time():
            self._count("401")
            error = {"message": "expired", "type": "NotAuthorizedException", "code": 401}
            return self._answer_json(401, {"error": error})
        if path.endswith("/credentials"):
            self._count("credentials")
            given = [{"prefix": "s3://", "config": self.vending.vend()}]
            return self._answer_json(200, {"storage-credentials": given})
        if self.vending.read_only and self.command != "GET":
            error = {"message": "may read", "type": "ForbiddenException", "code": 403}
            return self._answer_json(403, {"error": error})
        if self.vending.drops_refs and self.command == "POST":
            body = _without_branches(body)
        response, content = self.forward(body)
        # A staged creation has keys too, and no location of metadata yet (Iceberg's REST API).
        is_load = response.status == 200 and re.search(rb'"metadata"\s*:\s*\{', content)
        self._count("load" if is_load else "other")
        wanted = self.headers.get("X-Iceberg-Access-Delegation", "")
        if is_load and "vended-credentials" in wanted:
            table = json.loads(content)
            renewal = {"client.refresh-credentials-endpoint": f"{path.lstrip('/')}/credentials"}
            more = renewal if self.command == "GET" else {}
            table["config"] = table.get("config", {}) | self.vending.vend() | more
            content = json.dumps(table).encode()
        kind = response.getheader("Content-Type", "application/json")
        self._answer(response.status, [("Content-Type", kind)], content)

    def _give_bearer(self, body: bytes) -> None:
        form = {name: values[0] for name, values in parse_qs(body.decode()).items()}
        self._count("token")
        # Java exchanges an older token, and sends the secret in a header.
        is_basic = "Basic" in self.headers.get("Authorization", "")
        has_secret = is_basic or form.get("client_secret") == SECRET
        if not has_secret and form.get("subject_token") not in self.vending.bearers:
            error = {"error": "invalid_client", "error_description": "wrong secret"}
            return self._answer_json(401, error)
        bearer, lifetime = uuid.uuid4().hex, self.vending.bearer_lifetime
        self.vending.bearers[bearer] = time.time() + lifetime
        answer = {"access_token": bearer, "token_type": "bearer", "expires_in": int(lifetime)}
        answer |= {"issued_token_type": "urn:ietf:params:oauth:token-type:access_token"}
        return self._answer_json(200, answer)

    def _answer_json(self, status: int, answer: object) -> None:
        kind = [("Content-Type", "application/json")]
        self._answer(status, kind, json.dumps(answer).encode())

    def _count(self, kind: str) -> None:
        self.vending.asked[kind, self.headers.get("User-Agent", "").partition("/")[0]] += 1

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve


def _without_branches(body: bytes) -> bytes:
    """Return the request of a commit without the updates that set another ref than `main`."""
    request = json.loads(body or b"{}")
    if "updates" in request:
        request["updates"] = [
            update
            for update in request["updates"]
            if update.get("action") != "set-snapshot-ref" or update["ref-name"] == "main"
        ]
    return json.dumps(request).encode()


@contextmanager
def running_vending(folder: Path, lifetime: float, bearer_lifetime: float) -> Iterator[Vending]:
    """Run both within a `with`, in front of a new REST catalog and an S3 with the bucket `lake`."""
    with running_s3_proxy(folder) as s3_port:
        behind = f"http://{HOST}:{s3_port}"
        keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}
        ObjectStore(S3.model_validate({"endpoint": behind, **keys})).ensure_bucket("lake")
        with (
            running_rest_catalog(folder, "s3://lake/warehouse", behind) as rest,
            running_flaky_s3(s3_port, seed=1) as s3,
        ):
            upstream = urlsplit(rest.url).port
            assert upstream is not None
            vending = Vending(s3, upstream, lifetime, bearer_lifetime)
            s3.refuse = vending.refuse
            # `front`: the server to which the handler forwards.
            handler = type("_Own", (_Catalog,), {"vending": vending, "front": vending})
            with serving(handler) as vending.port:
                yield vending
