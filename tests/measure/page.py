"""How long the status page takes to its first byte, with 50 streams of five years of hours: `make
bench WHAT=page`.

The streams' own threads read meanwhile, each from a lake in a folder, and Kafka is a stand-in.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path

import uvicorn
from pages import HOSTS, five_years, named, new_page, show
from proofs import HOUR, job, new_proof
from report_hours import a_full_hour, kafka

from anabranch.operations.page.server import listen

STREAMS, REQUESTS = 50, 200


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, listen("127.0.0.1", 0) as socket:
        one = new_proof(Path(folder))
        a_full_hour(one)
        full = replace(job(one), kafka=kafka())
        names = [f"stream_{i:02}" for i in range(STREAMS)]
        page = new_page(full, *(named(full, name) for name in names))
        server = uvicorn.Server(
            uvicorn.Config(page.app(HOSTS), log_config=None, lifespan="on", ws="none")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        paths = (
            "/",
            "/streams/stream_01",
            "/streams/stream_01?month=2024-02",
            f"/streams/events/hours/{HOUR}",
        )
        print(f"{'path':34} {'bytes':>8} {'median ms':>10} {'99 % ms':>8} {'most ms':>8}")
        for path in paths:
            taken, size = [], 0
            for _ in range(REQUESTS):
                # The threads read of the small lake, so that what is shown is put back for each
                # request.
                now = datetime.now(UTC)
                show(page, now, *(five_years(name, now) for name in names))
                seconds, size = _first_byte(socket.getsockname()[1], path)
                taken.append(1000 * seconds)
            quantile = statistics.quantiles(taken, n=100)[98]
            print(
                f"{path:34} {size:8,} {statistics.median(taken):10.1f} {quantile:8.1f} "
                f"{max(taken):8.1f}"
            )
        server.should_exit = True
        thread.join()


def _first_byte(port: int, path: str) -> tuple[float, int]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    began = time.perf_counter()
    connection.request("GET", path)
    answer = connection.getresponse()
    seconds = time.perf_counter() - began
    size = len(answer.read())
    assert answer.status == 200
    connection.close()
    return seconds, size


if __name__ == "__main__":
    main()
