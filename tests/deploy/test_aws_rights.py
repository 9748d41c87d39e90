"""Each component with a key that may do what deploy/s3 and deploy/glue say, and less."""

import json
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from aws import Aws, running_aws
from botocore.exceptions import ClientError
from commands import run
from world import World, past_hour, spread

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# The policies of Glue for those of S3.
GLUE = {"apply": "apply", "reader": "reader"}
ASKING = (
    ["hours"], ["history", "--hour", "HOUR"], ["status"], ["explain", "HOUR"], ["audit"],
    ["explain", "HOUR", "--rows"], ["dead-letters"],
)  # fmt: skip


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[Aws]:
    with running_aws(tmp_path) as server:
        yield server


class Lake:
    """A stream whose commands reach S3 and Glue with one of the policies' keys."""

    def __init__(
        self, aws: Aws, environment: dict[str, Any], folder: Path, variables: pytest.MonkeyPatch
    ) -> None:
        self._variables = variables
        self.aws = aws
        # AWS judges a look at a bucket as s3:ListBucket, moto by a name of its own; and the
        # deletion of several objects by each of them, moto by the bucket.
        names = {
            '"s3:ListBucket"': '["s3:ListBucket", "s3:HeadBucket"]',
            '"arn:aws:s3:::EXPORTS/STREAM/*"': '["arn:aws:s3:::exports/events/*", "arn:aws:s3:::exports"]',
            "BUCKET": "lake",
            "EXPORTS": "exports",
        }
        policies = {}
        for file in sorted((DEPLOY / "s3").glob("*.json")):
            policy = json.loads(
                reduce(lambda text, name: text.replace(name, names[name]), names, file.read_text())
            )
            glue = (DEPLOY / "glue" / f"{GLUE.get(file.stem, 'jobs')}.json").read_text()
            # Moto judges the actions of Glue, not its resources.
            policy["Statement"] += [s | {"Resource": "*"} for s in json.loads(glue)["Statement"]]
            policies[file.stem] = json.dumps(policy)
        everything = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": ["s3:*", "glue:*"], "Resource": "*"}],
        }
        policies |= {"everything": json.dumps(everything)}
        self.keys = {name: aws.user(name, policy) for name, policy in policies.items()}
        catalog = {"name": "lake", "type": "glue", "warehouse": "s3://lake/warehouse"}
        glue_settings = {"properties": {"glue.endpoint": aws.url}}
        settings = environment | {"catalog": catalog | glue_settings}
        self._use("apply")
        self.one = World(folder / "conf", settings | {"s3": self._s3("apply")}, None)  # type: ignore[arg-type]

    def _s3(self, name: str) -> dict[str, Any]:
        access, secret = self.keys[name]
        return {"endpoint": self.aws.url, "access_key": access, "secret_key": secret}

    def _use(self, name: str) -> None:
        """Glue takes the keys of the environment."""
        access, secret = self.keys[name]
        self._variables.setenv("AWS_ACCESS_KEY_ID", access)
        self._variables.setenv("AWS_SECRET_ACCESS_KEY", secret)

    def with_key(self, name: str) -> World:
        self._use(name)
        self.one.set_environment(s3=self._s3(name))
        return self.one

    def s3(self, name: str) -> Any:
        return self.aws.client("s3", self.keys[name])

    def objects(self, bucket: str = "lake") -> list[str]:
        listed = self.s3("everything").get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [entry["Key"] for page in listed for entry in page.get("Contents", [])]


@pytest.mark.timeout(1200)
def test_each_component_does_its_work_with_its_policy_and_a_reader_publishes_nothing(
    aws: Aws, environment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, hour = Lake(aws, environment, tmp_path, monkeypatch), past_hour(1)
    aws.enforce()
    one = lake.with_key("apply")
    one.topic()
    one.send(spread(hour, 20, "e"))
    run(one, "apply", one.name)
    encrypted = {"Rules": [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms"}}]}
    everything = lake.s3("everything")
    everything.put_bucket_encryption(Bucket="lake", ServerSideEncryptionConfiguration=encrypted)
    made = set(lake.objects())
    other = {"DatabaseName": one.name, "TableInput": {"Name": "other"}}
    with pytest.raises(ClientError, match="glue:CreateTable"):
        aws.client("glue", lake.keys["jobs"]).create_table(**other)

    # A key that may only read: both jobs end at once, say why, and leave nothing.
    lake.with_key("reader")
    for command in (["speed", one.name, "--available-now"], ["batch", one.name]):
        output = run(one, *command, expect=2)
        assert "what the bucket's policy allows them" in output, output
    assert set(lake.objects()) == made
    assert one.published == 0 and not one.state.accepted

    # The jobs with theirs.
    lake.with_key("jobs")
    run(one, "speed", one.name, "--available-now")
    assert one.contents() == one.acknowledged()
    run(one, "batch", one.name)
    assert one.state.served_by(hour) == "batch"
    assert one.contents() == one.acknowledged()
    run(one, "merge", one.name)
    run(one, "override", one.name, hour, "--layer", "speed", "--why", "to see")

    # A user that only reads.
    lake.with_key("reader")
    for question in ASKING:
        words = [hour if word == "HOUR" else word for word in question[1:]]
        run(one, question[0], one.name, *words)
    run(one, "query", f"SELECT count(*) FROM {one.job.stream.table}")

    # Egress, to a bucket of its own; the jobs could not write there.
    lake.s3("everything").create_bucket(Bucket="exports")
    one.configure(egress=[{"name": "export", "root": "s3://exports/events"}])
    lake.with_key("apply")
    run(one, "apply", one.name)
    lake.with_key("jobs")
    assert "what the bucket's policy allows them" in run(one, "egress", one.name, expect=2)
    lake.with_key("egress")
    run(one, "egress", one.name)
    run(one, "override", one.name, hour, "--layer", "auto", "--why", "seen")
    run(one, "egress", one.name)
    exported = lake.objects("exports")
    assert sum(key.endswith("/_SUCCESS") for key in exported) == 1
    assert sum(key.endswith(".parquet") for key in exported) == 1

    # Maintenance deletes rows; the jobs could not.
    lake.with_key("maintain")
    one.configure(maintain={"speed_hours": "0 seconds"})
    run(one, "maintain", one.name)
    assert one.contents() == one.acknowledged()
    data = next(key for key in lake.objects() if key.endswith(".parquet"))
    with pytest.raises(ClientError, match="AccessDenied"):
        lake.s3("jobs").delete_object(Bucket="lake", Key=data)
    with pytest.raises(ClientError, match="AccessDenied"):
        lake.s3("jobs").put_object(Bucket="lake", Key="elsewhere/file", Body=b"")

    # Objects written after the bucket's encryption was set are encrypted, whichever client wrote
    # them.
    written = set(lake.objects()) - made
    assert any(key.endswith(".metadata.json") for key in written)
    assert any(key.endswith(".parquet") for key in written)
    for key in written:
        head = everything.head_object(Bucket="lake", Key=key)
        assert head["ServerSideEncryption"] == "aws:kms", key
    one.kafka.close()
