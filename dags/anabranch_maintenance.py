"""One DAG for each stream and each family of topics: it runs the daily maintenance. Wiring only."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow.sdk import DAG
from anabranch_operators import AnabranchOperator, FamilyOperator, default_args, families, streams

DOC = """\
`anabranch maintain {stream}`: expires snapshots, drops the speed layer's rows of hours that the
batch layer has served for long, and deletes unreferenced files. The ages are the stream's
(`maintain`). A list without deletions: `anabranch maintain {stream} --dry-run`.
"""


def maintenance_dag(name: str, is_family: bool) -> DAG:
    """Return the DAG of one stream, or of all streams of a family."""
    subject = f"each stream of family {name}" if is_family else name
    with DAG(
        dag_id=f"anabranch_maintenance__{name}",
        description=f"Deletes unreferenced files of {subject}.",
        doc_md=DOC.format(stream="STREAM" if is_family else name),
        schedule="40 2 * * *",
        start_date=datetime(2026, 1, 1, tzinfo=UTC),
        catchup=False,
        max_active_runs=1,
        default_args=default_args(name),
        tags=["anabranch", name],
    ) as dag:
        if is_family:
            FamilyOperator(task_id="maintain", family=name, arguments=["maintain", "STREAM"])
        else:
            AnabranchOperator(task_id="maintain", arguments=["maintain", name])
    return dag


for _name in streams():
    globals()[f"anabranch_maintenance__{_name}"] = maintenance_dag(_name, is_family=False)
for _name in families():
    globals()[f"anabranch_maintenance__{_name}"] = maintenance_dag(_name, is_family=True)
