"""One DAG for each stream: it checks every five minutes whether the speed layer keeps up. Wiring
only.

If the stream's file has the command `airflow.speed_restart`, the DAG runs it to restart a late
speed layer. Two speed layers at once are safe, since only one of them publishes. Without the
command, the run fails and triggers its alerts.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from anabranch_operators import WatchOperator, default_args, settings, streams

DOC = """\
Fails, or runs `airflow.speed_restart`, when records of `{stream}` wait and the speed layer has
published nothing for `airflow.speed_late_after` ({late}). The hours are served by the batch layer
meanwhile. Its progress: `anabranch status {stream}`.
"""

for _stream in streams():
    _settings = settings(_stream).get("airflow", {})
    _late = str(_settings.get("speed_late_after", "10 minutes"))
    with DAG(
        dag_id=f"anabranch_speed_watch__{_stream}",
        description=f"Checks that the speed layer of {_stream} keeps up.",
        doc_md=DOC.format(stream=_stream, late=_late),
        schedule="*/5 * * * *",
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args=default_args(_stream) | {"retries": 1, "retry_delay": timedelta(seconds=30)},
        tags=["anabranch", _stream],
    ) as _dag:
        _restart = _settings.get("speed_restart")
        _watch = WatchOperator(
            task_id="watch",
            arguments=["status", _stream, "--late-after", _late],
            restarts=bool(_restart),
        )
        if _restart:
            _watch >> BashOperator(task_id="restart", bash_command=f"{_restart}\n")
    globals()[_dag.dag_id] = _dag
