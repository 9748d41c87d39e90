"""HDFS by WebHDFS: the REST API of a name node, of HttpFS and of gateways such as Knox. Requires no
Hadoop installation."""

from __future__ import annotations

from typing import IO, Any
from urllib.parse import quote, urlsplit

import requests
from requests.auth import HTTPBasicAuth

from anabranch import config
from anabranch.common import http
from anabranch.common.errors import ConfigurationError, Transient

_SECONDS = (5.0, 120.0)  # seconds to connect, to answer
_FORBIDDEN, _NOT_FOUND = 403, 404
# Transient causes of a 403: the other name node is the active one, or it has just started.
_TRANSIENT_CAUSES = ("StandbyException", "RetriableException", "SafeModeException")


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


class WebHdfs:
    """Files of HDFS by their paths. Each call raises Transient when HDFS is unreachable or not
    ready, and ConfigurationError when it refuses."""

    def __init__(self, settings: config.Hdfs) -> None:
        self._url = f"{settings.url.rstrip('/')}/webhdfs/v1"
        self._user = {"user.name": settings.user}
        self._session = requests.Session()
        self._origin, self._auth = _origin(settings.url), None
        if settings.password is not None:
            self._auth = HTTPBasicAuth(settings.user, settings.password.get_secret_value())
            self._user = {}
        self._ca = settings.ca

    def close(self) -> None:
        self._session.close()

    def read(self, path: str) -> bytes | None:
        """Return a small file, whole; None if it does not exist."""
        doing = f"read hdfs://{path}"
        answer = self._ask("GET", path, "OPEN", doing)
        if answer.status_code == 307:
            answer = self._request("GET", answer.headers["Location"], doing)
        return None if answer.status_code == _NOT_FOUND else answer.content

    def write(self, path: str, body: bytes | IO[bytes]) -> None:
        """Write a file, and create its parent folders; readers can see it while it grows."""
        doing = f"write hdfs://{path}"
        answer = self._ask("PUT", path, "CREATE", doing, overwrite="true")
        if answer.status_code != 307:
            raise self._unexpected(doing, answer)
        answer = self._request("PUT", answer.headers["Location"], doing, body)
        if answer.status_code != 201:
            raise self._unexpected(doing, answer)

    def rename(self, path: str, to: str, overwrite: bool = False) -> bool:
        """Rename a file atomically; return False if it does not exist or, without `overwrite`, if
        the new name is taken."""
        options = {"renameoptions": "OVERWRITE"} if overwrite else {}
        answer = self._ask(
            "PUT", path, "RENAME", f"rename hdfs://{path}", destination=to, **options
        )
        if answer.status_code == _NOT_FOUND:
            return False
        return overwrite or bool(answer.json()["boolean"])

    def set_once(self, path: str, name: str, value: str) -> str | None:
        """Set an extended attribute that a file does not have, atomically, and return its value
        now, whichever process set it. None if the file does not exist, or has been replaced
        since."""
        doing = f"set {name} of hdfs://{path}"
        of_name = {"xattr.name": name}
        to_set = {"xattr.value": value, "flag": "CREATE"}
        self._ask("PUT", path, "SETXATTR", doing, allowed="already exists", **of_name, **to_set)
        answer = self._ask(
            "GET", path, "GETXATTRS", doing, encoding="TEXT", allowed="XAttrNotFound", **of_name
        )
        if answer.status_code in (_NOT_FOUND, _FORBIDDEN):
            return None
        (attribute,) = answer.json()["XAttrs"]
        return str(attribute["value"]).strip('"')

    def names(self, folder: str) -> frozenset[str]:
        """Return the names in a folder; empty if it does not exist."""
        answer = self._ask("GET", folder, "LISTSTATUS", f"list hdfs://{folder}")
        if answer.status_code == _NOT_FOUND:
            return frozenset()
        return frozenset(one["pathSuffix"] for one in answer.json()["FileStatuses"]["FileStatus"])

    def delete(self, path: str) -> None:
        """Delete a file; one that is already gone is ignored."""
        self._ask("DELETE", path, "DELETE", f"delete hdfs://{path}")

    def _ask(
        self,
        method: str,
        path: str,
        operation: str,
        doing: str,
        allowed: str | None = None,
        **parameters: str,
    ) -> requests.Response:
        """Return the name node's answer: 404 if the file does not exist, 403 for a refusal whose
        text contains `allowed`."""
        asked = {"op": operation, **self._user, **parameters}
        return self._request(
            method, f"{self._url}{quote(path, safe='/=')}", doing, parameters=asked, allowed=allowed
        )

    def _request(
        self,
        method: str,
        url: str,
        doing: str,
        body: bytes | IO[bytes] | None = None,
        parameters: Any = None,
        allowed: str | None = None,
    ) -> requests.Response:
        headers = {"Content-Type": "application/octet-stream"} if body is not None else {}
        if self._origin[0] == "https" and _origin(url)[0] != "https":
            raise ConfigurationError(
                f"{doing}: expected a redirect within https, found one to "
                f"{_origin(url)[0]}://{_origin(url)[1]}; make HDFS answer by https "
                "(dfs.http.policy HTTPS_ONLY), or set hdfs.url to a gateway that does"
            )
        # A redirect comes from the server: the password is sent only to the configured host. Other
        # requests get no credentials, not even from this machine's .netrc.
        is_ours = self._auth is not None and _origin(url) == self._origin
        auth = self._auth if is_ours else lambda prepared: prepared
        # `verify` of the request, since REQUESTS_CA_BUNDLE takes precedence over a session's
        # setting.
        options = {
            "params": parameters,
            "data": body,
            "headers": headers,
            "timeout": _SECONDS,
            "verify": self._ca,
        }
        answer = http.request(
            self._session, method, url, doing, "hdfs.url", "hdfs.ca", auth=auth, **options
        )
        status, text = answer.status_code, answer.text[:300] if answer.status_code >= 400 else ""
        if any(name in text for name in _TRANSIENT_CAUSES):
            raise Transient(f"{doing}: {status} {text} (transient, try again)")
        if status == _FORBIDDEN and allowed is not None and allowed in text:
            return answer
        check = "hdfs.user, hdfs.password and the rights of the folder"
        http.check_answer(status, f"{status} {text}", doing, check)
        if status >= 400 and not (status == _NOT_FOUND and "FileNotFoundException" in answer.text):
            raise self._unexpected(doing, answer)
        return answer

    def _unexpected(self, doing: str, answer: requests.Response) -> ConfigurationError:
        found = f"{answer.status_code} {answer.text[:300]}"
        return ConfigurationError(
            f"{doing}: expected the answer of WebHDFS, found {found}; check hdfs.url"
        )
