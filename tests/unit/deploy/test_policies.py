"""The policies of deploy/ for AWS."""

import json
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


@pytest.mark.parametrize("role", ["jobs", "apply", "reader", "egress", "maintain"])
def test_the_policies_of_a_role_can_be_joined(role: str) -> None:
    """IAM refuses a policy with two statements of one name."""
    files = [DEPLOY / service / f"{role}.json" for service in ("s3", "glue", "msk")]
    files += [DEPLOY / "glue/jobs.json"] if not files[1].exists() else []
    present = [json.loads(file.read_text()) for file in files if file.exists()]
    names = [statement["Sid"] for policy in present for statement in policy["Statement"]]
    assert len(names) == len(set(names)) > 2
