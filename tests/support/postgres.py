"""A PostgreSQL server for a catalog, which tests restart and whose commits they delay."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import programs
import psycopg2
from waiting import wait_for

from anabranch.dev.services.processes import HOST, free_port

USER, PASSWORD, DATABASE = "lake", "lake-local", "catalog"
_GATE = 4711  # the advisory lock that a held commit waits for


def find_server() -> Path:
    """Return the folder of initdb and postgres, installed if they are missing."""
    if folder := _installed():
        return folder
    if os.geteuid() == 0 and shutil.which("apt-get"):
        # Otherwise the package would create a cluster and start a server.
        conf = Path("/etc/postgresql-common/createcluster.conf")
        conf.parent.mkdir(parents=True, exist_ok=True)
        if not conf.exists():
            conf.write_text("create_main_cluster = false\n")
        programs.install("postgresql")
        if folder := _installed():
            return folder
    raise RuntimeError("expected initdb on the PATH, found none: install PostgreSQL")


def _installed() -> Path | None:
    found = Path("/usr/lib/postgresql").glob("*/bin/initdb")
    candidates = sorted(found, key=lambda p: int(p.parts[-3]))
    on_path = shutil.which("initdb")
    return candidates[-1].parent if candidates else Path(on_path).parent if on_path else None


@dataclass
class Postgres:
    """A server with its own user, port and folder."""

    binaries: Path
    folder: Path
    port: int
    owner: str | None
    fsync: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None)

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        command = [f"{self.binaries}/postgres", "-D", f"{self.folder}/data", "-p", str(self.port)]
        command += ["-c", f"listen_addresses={HOST}"]
        command += ["-c", f"unix_socket_directories={self.folder}"]
        command += ["-c", f"fsync={'on' if self.fsync else 'off'}"]
        with (self.folder / "postgres.log").open("ab") as log:
            how: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, cwd=self.folder, user=self.owner, **how)
        wait_for(self._answers, "PostgreSQL to answer", 60)

    def _answers(self) -> bool:
        log = (self.folder / "postgres.log").read_text()[-2000:]
        assert self.process is not None and self.process.poll() is None, f"it ended:\n{log}"
        try:
            self.connect("postgres").close()
        except psycopg2.OperationalError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """Stop it: SIGINT is a fast shutdown, SIGQUIT as if the machine failed."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(timeout=60)
            self.process = None

    def connect(self, database: str = DATABASE) -> Any:
        by = {"user": USER, "password": PASSWORD, "dbname": database}
        connection = psycopg2.connect(host=HOST, port=self.port, **by)
        connection.autocommit = True
        return connection

    def execute(
        self, sql: str, database: str = DATABASE, values: Sequence[Any] = ()
    ) -> list[tuple[Any, ...]]:
        with closing(self.connect(database)) as connection, connection.cursor() as cursor:
            cursor.execute(sql, values or None)
            return list(cursor.fetchall()) if cursor.description else []

    def guard_commits(self, spark: bool) -> None:
        """Make commits of Spark's staging (else of PyIceberg's publishes) wait in `holding_commits`: a
        deferred trigger runs within COMMIT, before which nothing is decided."""
        who = "=" if spark else "<>"
        self.execute(
            f"""
            CREATE OR REPLACE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
              IF current_setting('application_name') {who} 'PostgreSQL JDBC Driver' THEN
                PERFORM pg_advisory_xact_lock_shared({_GATE});
              END IF;
              RETURN NULL;
            END $$;
            DROP TRIGGER IF EXISTS at_commit ON iceberg_tables;
            CREATE CONSTRAINT TRIGGER at_commit AFTER UPDATE ON iceberg_tables DEFERRABLE INITIALLY DEFERRED
              FOR EACH ROW EXECUTE FUNCTION at_commit();
            """
        )

    @contextmanager
    def holding_commits(self) -> Iterator[None]:
        """Make guarded commits wait, within COMMIT, until the end of the `with`."""
        with closing(self.connect()) as holder:
            with holder.cursor() as cursor:
                cursor.execute(f"SELECT pg_advisory_lock({_GATE})")
            yield

    def waiting_commits(self) -> int:
        """Return the number of commits that wait at the gate now."""
        locks = f"pg_locks WHERE locktype = 'advisory' AND objid = {_GATE} AND NOT granted"
        return int(self.execute(f"SELECT count(*) FROM {locks}")[0][0])

    def waiting_updates(self) -> int:
        """Return the number of updates that wait for another transaction to end."""
        sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event IN ('transactionid', 'tuple')"
        return int(self.execute(sql)[0][0])


@contextmanager
def running_postgres(fsync: bool = False) -> Iterator[Postgres]:
    """Run a new server with an empty database within a `with`; PostgreSQL refuses root."""
    binaries = find_server()
    owner = "postgres" if os.geteuid() == 0 else None
    # Not in pytest's folders: only their owner may access them.
    folder = Path(tempfile.mkdtemp(prefix="anabranch-postgres-"))
    if owner is not None:
        shutil.chown(folder, owner)
    server = Postgres(binaries, folder, free_port(), owner, fsync)
    try:
        password = folder / "password"
        password.write_text(PASSWORD)
        if owner is not None:
            shutil.chown(password, owner)
        command = [binaries / "initdb", "-D", folder / "data", "-U", USER, "-A", "scram-sha-256"]
        command += ["--no-sync", f"--pwfile={password}"]
        programs.output_of(*command, cwd=folder, user=owner)
        server.start()
        server.execute(f"CREATE DATABASE {DATABASE}", "postgres")
        yield server
    finally:
        server.stop(signal.SIGQUIT)
        shutil.rmtree(folder, ignore_errors=True)
