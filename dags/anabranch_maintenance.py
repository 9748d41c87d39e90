"""One DAG for each stream and each family of topics: it runs the daily maintenance. Wiring only."""

from __future__ import annotations

from airflow.sdk import DAG
from anabranch_operators import AnabranchOperator, FamilyOperator, reports_mistake
from anabranch_streams import Stream, dag_options, files

DOC = """\
`anabranch maintain {stream}`: expires snapshots, drops the speed layer's rows of hours that the
batch layer has served for long, and deletes unreferenced files. The ages are the stream's
(`maintain`). A list without deletions: `anabranch maintain {stream} --dry-run`.
"""


def maintenance_dag(stream: Stream) -> DAG:
    name = stream.name
    with DAG(
        dag_id=f"anabranch_maintenance__{name}",
        description=f"Deletes unreferenced files of {name}.",
        doc_md=DOC.format(stream="STREAM" if stream.is_family else name),
        schedule="40 2 * * *",
        **dag_options(name, stream),
    ) as dag:
        if reports_mistake(stream):
            return dag
        if stream.is_family:
            FamilyOperator(task_id="maintain", family=name, arguments=["maintain", "STREAM"])
        else:
            AnabranchOperator(task_id="maintain", arguments=["maintain", name])
    return dag


for _stream in files():
    globals()[f"anabranch_maintenance__{_stream.name}"] = maintenance_dag(_stream)
