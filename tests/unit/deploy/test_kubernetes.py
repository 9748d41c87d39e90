"""deploy/kubernetes, against Kubernetes' own schemas and our configuration and commands."""

import copy
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from anabranch import cli, config
from anabranch.spark.settings import exposed_keys, session_settings
from anabranch.spark.submit import submit_command

FOLDER = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
DOCUMENTS: list[Any] = [
    one for file in FILES for one in yaml.safe_load_all(file.read_text("utf-8"))
]
# The newest, and the oldest that is still kept up when this is written.
VERSIONS = ("1.37", "1.34")


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in DOCUMENTS if one["kind"] == kind}


SPECS = {
    name: one["spec"] for kind in ("Deployment", "CronJob") for name, one in named(kind).items()
}
JOBS = {name: spec.get("jobTemplate", {"spec": spec})["spec"] for name, spec in SPECS.items()}
PODS: dict[str, Any] = {name: job["template"]["spec"] for name, job in JOBS.items()}
CONTAINERS = [
    (pod, one) for pod in PODS.values() for one in pod.get("initContainers", []) + pod["containers"]
]
JOBS_PAGE = (FOLDER.parents[1] / "docs" / "how-to" / "deploy" / "jobs.md").read_text("utf-8")
CONF = named("ConfigMap")["anabranch-conf"]["data"]["anabranch.yaml"]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_each_object_is_of_its_schema(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


def test_an_unknown_key_is_found() -> None:
    wrong = copy.deepcopy(named("Deployment")["anabranch-speed-game-events"])
    wrong["spec"]["template"]["spec"]["containers"][0]["argz"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="argz"):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_every_command_of_ours_exists() -> None:
    named_ones = set[str]()
    for arguments in (one["args"] for _, one in CONTAINERS):
        of_shell = arguments[0] == "sh" and re.findall(r"anabranch [^;|]+", arguments[2])
        for command in map(shlex.split, of_shell or [shlex.join(arguments)]):
            assert command[0] == "anabranch"
            cli.main.commands[command[1]].make_context(command[1], list(command[2:]))
            named_ones.add(command[1])
    assert named_ones == {"apply", "speed", "batch", "page"}


def test_the_page_answers_its_service_its_pod_and_its_probes() -> None:
    [(pod, page)] = [(pod, one) for pod, one in CONTAINERS if one["name"] == "page"]
    words = page["args"]
    answered = {words[i + 1] for i, word in enumerate(words) if word == "--allow-host"}
    service = named("Service")["anabranch-page"]
    assert answered == {"anabranch-page", "anabranch-page.$(POD_NAMESPACE).svc", "$(POD_IP)"}
    [port] = page["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = named("Deployment")["anabranch-page"]["spec"]["template"]["metadata"]
    assert service["spec"]["selector"].items() <= labels["labels"].items()
    assert labels["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    for probe in ("readinessProbe", "livenessProbe"):
        [header] = page[probe]["httpGet"]["httpHeaders"]
        assert (header["name"], header["value"]) == ("Host", "localhost")
    assert pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize(
    ("exit_code", "starts"), [(0, True), (1, True), (2, True), (75, False), (70, False)]
)
def test_one_wrong_file_does_not_stop_a_group(exit_code: int, starts: bool, tmp_path: Path) -> None:
    """Runs the container's shell with a command that ends with this exit code."""
    applies = [one["args"] for _, one in CONTAINERS if one["name"] == "apply"]
    [shell] = [arguments for arguments in applies if arguments[0] == "sh"]
    program = tmp_path / "anabranch"
    program.write_text(f'#!/bin/sh\ncase "$1" in apply) exit {exit_code};; esac\nexit 99\n')
    program.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert (subprocess.run(shell, env=path, check=False).returncode == 0) is starts


def test_each_name_of_a_container_exists_and_it_runs_without_rights() -> None:
    for pod, one in CONTAINERS:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        }  # fmt: skip
        [written] = [volume["name"] for volume in pod["volumes"] if "emptyDir" in volume]
        assert {m["name"]: m["mountPath"] for m in one["volumeMounts"]}[written] == "/tmp"
    named_there = re.findall(r"kubectl create (?:configmap|secret generic) ([a-z-]+)", JOBS_PAGE)
    made = {"anabranch-conf", *named_there}
    for pod in PODS.values():
        assert pod["serviceAccountName"] in named("ServiceAccount")
        of_names = [v for v in pod["volumes"] if "emptyDir" not in v]
        used = {v.get("configMap", {}).get("name") or v["secret"]["secretName"] for v in of_names}
        assert used <= made
    for pod, one in CONTAINERS:
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in one["volumeMounts"]} == volumes
    subjects = [s for one in named("RoleBinding").values() for s in one["subjects"]]
    assert {s["name"] for s in subjects} == {pod["serviceAccountName"] for pod in PODS.values()}


@pytest.mark.parametrize(
    "speed",
    [one for _, one in CONTAINERS if "speed" in one["args"]],
    ids=lambda one: one["args"][2].strip("-"),
)
def test_the_speed_layers_probes_read_the_jobs_file(speed: dict[str, Any]) -> None:
    file = speed["args"][speed["args"].index("--health") + 1]
    assert file.startswith("/tmp/")
    named_probes = ("startupProbe", "livenessProbe", "readinessProbe")
    probes = {name: speed[name]["exec"]["command"] for name in named_probes}
    for command in probes.values():
        assert command[:3] == ["anabranch", "health", file]
        cli.main.commands["health"].make_context("health", list(command[2:]))
    # A restart by the kubelet must not be what fails the next liveness probe.
    liveness = {name for name, command in probes.items() if "--liveness" in command}
    assert liveness == {"startupProbe", "livenessProbe"}


def test_no_secret_is_in_a_file_and_every_container_gets_what_the_configuration_reads() -> None:
    assert not named("Secret")
    secrets = [line for line in CONF.splitlines() if re.search("password:|uri:", line)]
    assert secrets and all(re.search(r"\$\{[A-Z_]+\}", line) for line in secrets)
    read = set(re.findall(r"\$\{([A-Z_]+)", CONF))
    # Names of what Kubernetes knows; the rest is of the Secret that jobs.md makes.
    of_pod = {name for name in read if name.startswith("POD_")}
    of_secret = set(re.findall(r"--from-literal=([A-Z_]+)", JOBS_PAGE))
    assert (of_pod, of_secret) == (read - of_secret, read - of_pod)
    for _, one in CONTAINERS:
        assert {v["name"] for v in one["env"]} == of_pod | {"ANABRANCH_CONF"}
        assert one["envFrom"] == [{"secretRef": {"name": "anabranch"}}]


def test_the_configuration_makes_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in re.findall(r"\$\{([A-Z_]+)", CONF):
        monkeypatch.setenv(name, name.lower())
    (tmp_path / "anabranch.yaml").write_text(CONF)
    environment = config.load_environment(tmp_path)
    command, process = submit_command(environment, "speed_layer", ["--stream", "game_events"])
    given = [command[i + 1] for i, word in enumerate(command) if word == "--conf"]
    settings = dict(one.split("=", 1) for one in given)
    assert command[command.index("--master") + 1] == "k8s://https://kubernetes.default.svc"
    assert settings["spark.driver.host"] == "pod_ip"
    assert settings["spark.kubernetes.driver.pod.name"] == "pod_name"
    account = settings["spark.kubernetes.authenticate.executor.serviceAccountName"]
    assert account in named("ServiceAccount")
    assert "SPARK_LOCAL_IP" not in process
    # The password is in the environment, and nowhere on a command line.
    assert not [word for word in command if "password" in word]
    assert exposed_keys(environment.spark.master, session_settings(environment)) == ()
    # Executors decode records with the packages of their driver, and speak Java's serialisation.
    assert {settings["spark.kubernetes.container.image"]} == {one["image"] for _, one in CONTAINERS}
    # Kafka's certificate is where the configuration looks for it, on both.
    mounts = [mount for _, one in CONTAINERS for mount in one["volumeMounts"]]
    [mounted] = {mount["mountPath"] for mount in mounts if mount["name"] == "kafka"}
    # Its key has the word secret in it, so it is not on the command line: the session sets it.
    found = session_settings(environment)["spark.kubernetes.executor.secrets.anabranch-kafka"]
    assert found == mounted
    assert environment.kafka.security is not None
    assert Path(environment.kafka.security.truststore or "").parent == Path(mounted)


@pytest.mark.parametrize("name", named("CronJob"))
def test_a_batch_run_that_was_refused_is_not_tried_again(name: str) -> None:
    [rule] = named("CronJob")[name]["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [1, 2, 70]
    assert rule["onExitCodes"]["containerName"] in {one["name"] for one in PODS[name]["containers"]}


def test_the_program_of_an_executor_passes_what_spark_gives_it(tmp_path: Path) -> None:
    for name, body in (("python", "echo /site/pyspark"), ("java", 'printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    given = {
        "DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.1:7078", "EXECUTOR_ID": "1", "EXECUTOR_CORES": "2",
        "EXECUTOR_MEMORY": "1024m", "APPLICATION_ID": "spark-1", "EXECUTOR_POD_IP": "10.0.0.2",
        "EXECUTOR_POD_NAME": "exec-1", "RESOURCE_PROFILE_ID": "0", "JAVA_OPT_0": "-Da=one two", "JAVA_OPT_1": "-Db=$HOME",
    }  # fmt: skip
    env = {f"SPARK_{name}": value for name, value in given.items()}
    env |= {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert subprocess.check_output([FOLDER / "executor"], env=env, text=True).splitlines() == [
        "-Da=one two", "-Db=$HOME", "-Xms1024m", "-Xmx1024m", "-cp", "/site/pyspark/jars/*",
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        "--driver-url", given["DRIVER_URL"], "--executor-id", "1", "--cores", "2", "--app-id", "spark-1",
        "--hostname", "10.0.0.2", "--resourceProfileId", "0", "--podName", "exec-1",
    ]  # fmt: skip


@pytest.mark.parametrize("file", ["Dockerfile", "anabranch/starter_files/Dockerfile"])
def test_the_image_has_the_program_of_an_executor(file: str) -> None:
    text = (FOLDER.parents[1] / file).read_text("utf-8")
    assert "COPY --chmod=755 deploy/kubernetes/executor /usr/local/bin/executor\n" in text
