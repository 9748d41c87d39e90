"""A TCP proxy of a service that delays, cuts and throttles connections: Toxiproxy's server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import go_tools
import requests
from servers import serving

from anabranch.dev.services.processes import HOST, free_port


@dataclass(frozen=True)
class Proxy:
    """The proxy of one service, on its own port."""

    api: int
    name: str
    port: int

    def cut(self) -> None:
        """Close every connection and refuse new ones."""
        _call(self.api, "POST", f"/proxies/{self.name}", {"enabled": False})

    def restore(self) -> None:
        """Remove all faults: new connections are accepted, and nothing is delayed or lost."""
        for toxic in _call(self.api, "GET", f"/proxies/{self.name}/toxics"):
            _call(self.api, "DELETE", f"/proxies/{self.name}/toxics/{toxic['name']}")
        _call(self.api, "POST", f"/proxies/{self.name}", {"enabled": True})

    def slow(self, milliseconds: int) -> None:
        """Delay every response by this time, plus or minus a fifth."""
        self._add("latency", "downstream", latency=milliseconds, jitter=milliseconds // 5)

    def throttle(self, kilobytes_per_second: int) -> None:
        self._add("bandwidth", "downstream", rate=kilobytes_per_second)
        self._add("bandwidth", "upstream", rate=kilobytes_per_second)

    def lose_answers(self) -> None:
        """Forward requests, and drop the responses; connections stay open."""
        self._add("timeout", "downstream", timeout=0)

    def _add(self, kind: str, stream: str, **attributes: int) -> None:
        toxic: dict[str, Any] = {"name": f"{kind}_{stream}", "type": kind, "stream": stream}
        toxic["attributes"] = attributes
        _call(self.api, "POST", f"/proxies/{self.name}/toxics", toxic)


@dataclass(frozen=True)
class Toxiproxy:
    """A running server."""

    api: int

    def proxy(self, name: str, upstream_port: int, port: int | None = None) -> Proxy:
        """Create a proxy on `port`, or on any free port."""
        port = port or free_port(upstream_port)
        ends = {"listen": f"{HOST}:{port}", "upstream": f"{HOST}:{upstream_port}"}
        _call(self.api, "POST", "/proxies", {"name": name, "enabled": True, **ends})
        return Proxy(self.api, name, port)

    def remove(self, proxy: Proxy) -> None:
        _call(self.api, "DELETE", f"/proxies/{proxy.name}")


@contextmanager
def running_toxiproxy(folder: Path) -> Iterator[Toxiproxy]:
    """Run a server on a free port within a `with`."""
    server, port = go_tools.ensure(go_tools.TOXIPROXY), free_port()
    command = [str(server), "-host", HOST, "-port", str(port)]

    def answers() -> bool:
        _call(port, "GET", "/proxies")
        return True

    with serving(command, folder / "toxiproxy.log", answers, 30, {"LOG_LEVEL": "warn"}):
        yield Toxiproxy(port)


def _call(api: int, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    answer = requests.request(method, f"http://{HOST}:{api}{path}", json=body, timeout=10)
    assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
    return answer.json() if answer.content else None
