"""`make demo` with another master and another catalog: the same story, to the same exact end."""

import os
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from cluster import running_cluster
from postgres import PASSWORD, Postgres, running_postgres
from waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1500


@pytest.mark.timeout(SECONDS + 300)
def test_the_demo_runs_on_a_cluster_and_in_postgresql(tmp_path: Path) -> None:
    out = tmp_path / "demo.log"
    with running_postgres() as postgres, running_cluster() as cluster, out.open("wb") as log:
        catalog = f"postgresql+psycopg2://lake:{PASSWORD}@127.0.0.1:{postgres.port}/catalog"
        demo = subprocess.Popen(
            ["make", "--no-print-directory", "demo", f"MASTER={cluster.master}", f"CATALOG={catalog}"],
            cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
            env=os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "150"},
        )  # fmt: skip
        try:
            seen: set[int] = set()
            wait_for(
                lambda: seen.add(tables(postgres)) or demo.poll() is not None,
                "the demo to end",
                SECONDS,
            )
        finally:
            if demo.poll() is None:
                # Ctrl-C: it stops what it has started.
                os.killpg(demo.pid, signal.SIGINT)
                demo.wait(120)
        output = out.read_text(encoding="utf-8", errors="replace")
        assert demo.returncode == 0, output[-6000:]
        assert "Exact, after" in output
        # Killed or stopped, its jobs were all on the cluster, and left nothing there.
        jobs = Counter(app["name"] for app in cluster.view()["completedapps"])
        assert jobs == {"anabranch speed game_events": 3, "anabranch batch game_events": 2}, output
        assert {app["cores"] for app in cluster.view()["completedapps"]} <= {0, 1}
        wait_for(lambda: cluster.cores_used() == 0, "the cores to be let go")
        # Its tables were in the catalog, and are not any more.
        assert max(seen) == 3
        assert tables(postgres) == 0
    assert output.count("the JVM and its Python") == 2
    # What the README shows: one screen.
    assert len(output.splitlines()) <= 65
    assert not list(tmp_path.glob("anabranch-demo-*"))


def tables(postgres: Postgres) -> int:
    """The number of tables in the catalog; none before its own tables are created."""
    exists = postgres.execute("SELECT to_regclass('iceberg_tables') IS NOT NULL")
    if exists != [(True,)]:
        return 0
    return int(postgres.execute("SELECT count(*) FROM iceberg_tables")[0][0])
