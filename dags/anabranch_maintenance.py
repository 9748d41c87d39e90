"""One DAG for each stream: daily maintenance deletes unreferenced files. Wiring only."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG
from anabranch_operators import AnabranchOperator, default_args, streams

DOC = """\
`anabranch maintain {stream}`: expires snapshots, drops the speed layer's rows of hours that the batch layer has served
for long, and deletes unreferenced files. The ages are the stream's (`maintain`). A list without deletions:
`anabranch maintain {stream} --dry-run`.
"""

for _stream in streams():
    with DAG(
        dag_id=f"anabranch_maintenance__{_stream}",
        description=f"Deletes unreferenced files of {_stream}.",
        doc_md=DOC.format(stream=_stream),
        schedule="40 2 * * *",
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args=default_args(_stream),
        tags=["anabranch", _stream],
    ) as _dag:
        AnabranchOperator(task_id="maintain", arguments=["maintain", _stream])
    globals()[_dag.dag_id] = _dag
