"""Runs of a scheduler, as they are given to the batch job."""

import pytest
from click.testing import CliRunner

from anabranch.cli import main
from anabranch.lineage import parse_run

ID = "019aa2f0-0000-7000-8000-000000000001"


@pytest.mark.parametrize("text", ["", "a/b", f"/b/{ID}", "a/b/1", f"a//{ID}"])
def test_an_invalid_run_of_a_scheduler_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAMESPACE/JOB/RUN ID"):
        parse_run(text)


def test_the_namespace_of_a_run_may_have_slashes() -> None:
    assert parse_run(f"team/a/dag.task/{ID}") == ("team/a", "dag.task", ID)


@pytest.mark.parametrize("option", ["--parent-run", "--root-run"])
def test_a_wrong_parent_is_wrong_usage_before_anything_is_begun(option: str) -> None:
    done = CliRunner().invoke(main, ["batch", "events", option, "airflow/task"])
    assert done.exit_code == 2
    expected = f"{option}: expected NAMESPACE/JOB/RUN ID, the id a UUID, found 'airflow/task'"
    assert expected in done.output
