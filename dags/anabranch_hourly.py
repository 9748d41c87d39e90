"""One DAG a stream: each hour, once it has ended, is sealed, rebuilt by the batch layer, and merged. Wiring only.

Every task is one `anabranch` command, so that whatever a task does can be run by hand. `ANABRANCH_CONF` names the
configuration folder (default: `conf` beside `dags`), whose files under `streams/` are the streams; only their names are
read here. `ANABRANCH_COMMAND` is how the command is called (default `anabranch`), for one that lives in an environment
of its own.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, BaseOperator, CronDataIntervalTimetable
from airflow.sdk.exceptions import AirflowException, AirflowFailException

TRANSIENT = 75
LAST_LINES = 20
CONF = Path(os.environ.get("ANABRANCH_CONF") or Path(__file__).resolve().parents[1] / "conf")

DOC = """\
Each hour of the stream `{stream}`, in UTC, as soon as it has ended:

- **seal** decides the hour's cut. It fails and is tried again until the hour's grace has passed.
- **rebuild** reads the cut from Kafka, closes the balance, asks the quality gate, and publishes. Refused, it fails
  without another try and says why; the hour stays served as it was, and the next hour is not held back.
- **merge** repairs whatever is not served by its wanted layer, also after a refusal.
- **outcome** fails the run if any of the three failed.

Why an hour was refused: `anabranch hours {stream}`. To run it again: clear `rebuild` with its downstream tasks.
"""


class AnabranchOperator(BaseOperator):
    """Runs one `anabranch` command and streams its output into the task's log.

    Exit code 0 is success; 75 is transient, so the task fails and may be tried again; with any other code it fails for
    good. The error holds the last lines of the output.
    """

    template_fields: Sequence[str] = ("arguments",)

    def __init__(self, *, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> None:
        command = [*shlex.split(os.environ.get("ANABRANCH_COMMAND") or "anabranch"), *self.arguments]
        self.log.info("running %s", shlex.join(command))
        last: deque[str] = deque(maxlen=LAST_LINES)
        try:
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"ANABRANCH_CONF": str(CONF), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # so that on_kill reaches Spark's JVM too
            )
        except OSError as error:
            raise AirflowFailException(
                f"expected to run {command[0]}, found: {error} (set ANABRANCH_COMMAND)"
            ) from error
        with self._process as process:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                self.log.info("%s", last[-1])
        if process.returncode == 0:
            return
        message = "\n".join([f"{shlex.join(command)}: expected exit code 0, found {process.returncode}", *last])
        # A negative code is a signal (the machine ran out of memory, the task was stopped): as good as transient.
        if process.returncode == TRANSIENT or process.returncode < 0:
            raise AirflowException(message)
        raise AirflowFailException(message)

    def on_kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


def stream_dag(stream: str) -> DAG:
    """The DAG of one stream; its data interval is the hour."""
    hour = "{{ data_interval_start.strftime('%Y-%m-%dT%H') }}"
    with DAG(
        dag_id=f"anabranch_hourly__{stream}",
        description=f"Seals, rebuilds and merges each hour of {stream}.",
        doc_md=DOC.format(stream=stream),
        schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args={
            "depends_on_past": False,
            "retries": 8,
            "retry_delay": timedelta(minutes=1),
            "retry_exponential_backoff": 2.0,
            "max_retry_delay": timedelta(minutes=10),
        },
        tags=["anabranch", stream],
    ) as dag:
        seal = AnabranchOperator(task_id="seal", arguments=["batch", stream, "--hour", hour, "--seal-only"])
        rebuild = AnabranchOperator(task_id="rebuild", arguments=["batch", stream, "--hour", hour])
        merge = AnabranchOperator(task_id="merge", arguments=["merge", stream], trigger_rule="all_done")
        # A run's state is its last task's: without this one a refused hour whose merge succeeded would be green.
        outcome = EmptyOperator(task_id="outcome")
        seal >> rebuild >> merge >> outcome
        [seal, rebuild] >> outcome
    return dag


for _file in sorted((CONF / "streams").glob("*.yaml")):
    if not _file.stem.endswith(".expectations"):
        globals()[f"anabranch_hourly__{_file.stem}"] = stream_dag(_file.stem)
