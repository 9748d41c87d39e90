"""The random faults of a soak, in a stream's processes, services, clocks, files and records."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import psutil
from demo.story import Story, poll
from demo.workspace import Running, Workspace
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.transforms import BucketTransform

from anabranch.common.errors import ConfigurationError, Terminal, Transient
from anabranch.common.fail_points import FAIL_AT, PAUSE_AT, Step
from anabranch.dev import services
from anabranch.dev.producers.events import Sent
from anabranch.dev.producers.produce import STREAM
from anabranch.dev.services.processes import is_alive
from anabranch.iceberg.files import delete_files, find_lost_files
from anabranch.iceberg.manifests import files_by_branch
from anabranch.kafka.client import create_topic
from anabranch.offsets.hours import hours_between
from anabranch.protocol.state import State, load_state
from batch_layer.plan import waiting_hours
from soak import platform
from soak.backup import Backup
from soak.cutting_proxy import CuttingProxy
from soak.evolving import Evolving, columns_of
from soak.interference import SUPPORT, Interference
from soak.strange_stamps import send_strange

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from anabranch.job import Job

Service = Literal["kafka", "s3"]
Layer = Literal["speed", "batch"]
_Fault = tuple[Callable[[], None], Layer | None]

# The most seconds that a fault waits for a publish of the layer that it affects.
_PATIENCE = 120.0
_COMMAND_SECONDS = 1800.0
_STEPS: dict[Layer, list[Step]] = {
    "speed": [s for s in Step if s.label.startswith(("speed.", "commit.", "rollup."))],
    "batch": [s for s in Step if s.label.startswith(("batch.", "commit.", "ledger.", "seal."))],
}
# Seconds that a clock is ahead: tolerated values, and values that must stop a process that uses the
# clock for timestamps.
_TOLERATED = (-12.0, 12.0)
_WRONG = (-86_400.0, -600.0, -45.0, 45.0, 600.0, 3_600.0, 3 * 365 * 86_400.0)
_UNEXPECTED = 70
_WRONG_TOPIC = "named_by_mistake"
_PAUSED = f"pause point {Step.COMMIT_DOUBTED.label}: "


class Faults:
    """The processes, the faults so far, and their dice. `sent`: records that faults sent."""

    def __init__(
        self,
        story: Story,
        space: Workspace,
        job: Job,
        interference: Interference,
        proxies: dict[Service, CuttingProxy],
        seed: int,
        only: tuple[str, ...] = (),
    ) -> None:
        """Choose the faults that have one of the words `only` in their names; or all."""
        self._story, self._space, self._job = story, space, job
        self._interference, self._proxies = interference, proxies
        self._dice, self._seed = random.Random(seed), seed
        self._evolving = Evolving([columns_of(space.shipped(STREAM)["schema"])], self._dice)
        self._alive: dict[Layer, list[Running]] = {"speed": [], "batch": []}
        self._ended: list[tuple[str, Running]] = []
        self._done_before: dict[Layer, int] = {}
        bucket = space.services.home.path / "data" / "s3"
        self._backup = Backup(space.catalog_file, bucket, space.folder / "backup")
        self._allows_all = False
        self.sent = Sent(job.stream.topic)
        self.counts: Counter[str] = Counter()
        self._faults = [f for f in self._all() if not only or any(w in _name(f) for w in only)]

    def _all(self) -> list[_Fault]:
        """The faults, likelier ones more than once, each with the layer that must have progressed."""
        layers: tuple[Layer, ...] = ("speed", "batch")
        services: tuple[Service, ...] = ("kafka", "s3")
        faults: list[tuple[Callable[[], None], Layer | None, int]] = [
            (partial(self._kill_layer, "speed"), "speed", 2),
            (partial(self._fail, "speed"), "speed", 2),
            (self._second_speed, "speed", 1),
            (self._pause_speed, "speed", 1),
            (self._delete_checkpoints, "speed", 1),
            (partial(self._kill_layer, "batch"), "batch", 1),
            (partial(self._fail, "batch"), "batch", 2),
            (self._two_batches, "batch", 1),
            (self._restate, None, 1),
            (self._maintain, None, 1),
            (self._override, None, 2),
            (self._evolve, "speed", 2),
            (self._stamp_strangely, None, 2),
            (partial(self._land_late, "command"), None, 1),
            (self._maintain_by_platform, None, 2),
            (self._alter_by_another, None, 2),
            (self._partition_by_another, None, 1),
            (self._lose_file, None, 2),
            (self._pause_dag, "batch", 1),
            (self._name_wrong_topic, "speed", 1),
            (self._name_table_twice, None, 1),
            (self._allow_gaps, None, 1),
            (self._restart_kafka, None, 1),
            (self._take_backup, None, 1),
            (self._take_backup, "speed", 1),
            (self._restore_backup, "speed", 1),
        ]
        for service in services:
            of_service = ((self._hang, 1), (self._cut, 1), (self._cut_short, 2))
            faults += [(partial(fault, service), None, times) for fault, times in of_service]
        for layer in layers:
            in_doubt = ((self._die_in_doubt, 2), (self._pause_in_doubt, 1))
            faults += [(partial(fault, layer), layer, times) for fault, times in in_doubt]
            faults += [(partial(f, layer), None, 1) for f in (self._land_late, self._set_clock)]
        return [(fault, layer) for fault, layer, times in faults for _ in range(times)]

    def run(self, seconds: float) -> None:
        """Cause fault after fault until the time is over, and restart ended layers."""
        ends, number = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            # A fault's draws depend on the state; a new seed keeps them from the next fault.
            self._dice.seed(f"{self._seed} {number}")
            number += 1
            self._keep_alive()
            time.sleep(self._dice.uniform(0, 8))
            # After each fault that stops a process, two that stop none follow while it restarts.
            due = [f for f in self._faults if (f[1] is None) == (number % 3 != 0)]
            fault, layer = self._dice.choice(due or self._faults)
            if layer is not None:
                self._await_progress(layer)
            fault()

    def stop(self) -> None:
        """Kill all running processes, and end the interference."""
        self._kill("speed", "batch")
        self._interference.end()

    def exit_codes(self) -> Counter[str]:
        """Count the processes that were not killed by exit code."""
        ended = [(name, running.code) for name, running in self._ended if (running.code or 0) >= 0]
        return Counter(f"{name} ended with {code}" for name, code in ended)

    def require_explained(self) -> None:
        """Raise Terminal if a process ended with 70, which no fault here causes."""
        for name, running in self._ended:
            if running.code == _UNEXPECTED:
                end = f"the end of {running.log}:\n{running.log_tail(15)}"
                raise Terminal(f"{name}: expected no exit code {_UNEXPECTED}, found it; {end}")

    def _keep_alive(self) -> None:
        self._collect_ended()
        for layer, alive in self._alive.items():
            if not alive:
                self._start_layer(layer)

    def _collect_ended(self) -> None:
        for layer, alive in self._alive.items():
            self._ended += [(layer, running) for running in alive if running.code is not None]
            alive[:] = [running for running in alive if running.code is None]

    def _kill(self, *layers: Layer) -> None:
        for running in [running for layer in layers for running in self._alive[layer]]:
            running.kill()
        self._collect_ended()

    def _start_layer(self, layer: Layer, *arguments: str, **environment: str) -> Running:
        self._done_before[layer] = self._done(layer)
        self._alive[layer].append(self._start(layer, *arguments, **environment))
        return self._alive[layer][-1]

    def _start(self, command: str, *arguments: str, **environment: str) -> Running:
        meant = command if command in ("speed", "batch") else "command"
        environment |= self._interference.environment(meant)
        return self._space.start(command, STREAM, *arguments, **environment)

    def _finish(self, *arguments: str, codes: tuple[int, ...] = (0,)) -> int:
        """Run a command, again after a transient error. Raises Terminal for a code not in `codes`."""
        deadline = time.monotonic() + _COMMAND_SECONDS
        while True:
            running = self._start(*arguments)
            poll(lambda r=running: r.code, f"anabranch {arguments[0]} to end", _COMMAND_SECONDS)  # type: ignore[misc]
            if running.code in codes:
                return running.code
            if running.code != Transient.exit_code or time.monotonic() > deadline:
                running.require_alive()

    def _await_progress(self, layer: Layer) -> None:
        """Wait until a layer has made progress since its start, so that a fault has an effect."""
        deadline = time.monotonic() + _PATIENCE
        while self._done(layer) == self._done_before[layer] and time.monotonic() < deadline:
            self._keep_alive()
            time.sleep(0.5)

    def _done(self, layer: Layer) -> int:
        """Return a number that changes when a layer makes progress."""
        position, accepted = self._progress()
        ended = sum(name == "batch" and running.code == 0 for name, running in self._ended)
        return position if layer == "speed" else len(accepted) + ended

    def _report(self, kind: str, words: str) -> None:
        self.counts[kind] += 1
        moment = f"{self._story.seconds:5.0f} s"
        position, accepted = self._progress()
        self._story.say(f"{moment}  {words}; position {position:,}, {len(accepted)} hours accepted")

    def _progress(self) -> tuple[int, list[str]]:
        """Return the number of published offsets, and the accepted hours."""
        state = self._state()
        return sum(state.position.offsets.values()), sorted(state.accepted)

    def _state(self) -> State:
        def loaded() -> State | None:
            try:
                return load_state(self._job.lake, self._job.stream.table)
            except Transient:
                return None

        return poll(loaded, "the table to be read", _COMMAND_SECONDS)

    # The faults.
    def _kill_layer(self, layer: Layer) -> None:
        self._kill(layer)
        self._report(f"kill -9 {layer}", f"kill -9 for the {layer} layer")

    def _fail(self, layer: Layer) -> None:
        chosen = self._dice.choice(_STEPS[layer])
        is_in_doubt = chosen in (Step.COMMIT_DOUBTED, Step.COMMIT_FENCED)
        after = f"{Step.COMMIT_REQUEST_LOST.label}," if is_in_doubt else ""
        step = f"{after}{chosen.label}:{self._dice.randint(1, 3)}"
        self._kill(layer)
        self._start_layer(layer, **{FAIL_AT: step})
        self._report(f"fail point {layer}", f"the {layer} layer again, to die at {step}")
        time.sleep(self._dice.uniform(15, 25))

    def _second_speed(self) -> None:
        self._start_layer("speed")
        self._report("second speed", "a second speed layer beside the first")
        time.sleep(20)

    def _pause_speed(self) -> None:
        if not self._alive["speed"]:
            return
        hung = self._dice.choice(self._alive["speed"])
        hung.pause()
        other = self._start_layer("speed")
        self._report("SIGSTOP speed", "SIGSTOP for a speed layer, another takes over")
        time.sleep(self._dice.uniform(15, 25))
        hung.resume()
        time.sleep(5)
        other.kill()

    def _delete_checkpoints(self) -> None:
        for checkpoint in self._space.checkpoints():
            shutil.rmtree(checkpoint, ignore_errors=True)
        self._report("checkpoints deleted", "every checkpoint deleted, under running jobs")

    def _two_batches(self) -> None:
        self._start_layer("batch")
        self._report("two batch runs", "a second batch run beside the first")
        time.sleep(10)

    def _restate(self) -> None:
        _, accepted = self._progress()
        if not accepted:
            return
        hour = self._dice.choice(accepted)
        self._start_layer("batch", "--hour", hour, "--restate")
        self._report("restatement", f"hour {hour} restated")
        time.sleep(15)

    def _maintain(self) -> None:
        self._alive["batch"].append(self._start("maintain"))
        self._report("maintenance", "maintenance beside everybody")
        time.sleep(5)

    def _override(self) -> None:
        """Let the speed layer serve an hour, or remove such a choice."""
        state = self._state()
        given = sorted(hour for hour, layer in state.overrides.items() if layer == "speed")
        hours = given if given and self._dice.random() < 0.5 else sorted(state.accepted)
        if not hours:
            return
        hour = self._dice.choice(hours)
        layer = "auto" if hour in given else "speed"
        # Refused if the speed layer does not cover the hour.
        code = self._finish("override", hour, "--layer", layer, "--why", "soak", codes=(0, 1))
        words = f"hour {hour} to be served by {layer}, {'refused' if code else 'done'}"
        self._report(f"served by {layer}", words)

    def _evolve(self) -> None:
        """Change the stream's file while jobs run, then apply it."""
        words = self._evolving.step()
        self._space.set_stream(STREAM, schema=self._evolving.schema)
        self._apply()
        self._report("rolled back" if self._evolving.is_behind else "schema evolved", words)

    def _apply(self) -> None:
        self._finish("apply", *(["--rolled-back"] if self._evolving.is_behind else []))

    def _maintain_by_platform(self) -> None:
        """Run another program that maintains the tables while the jobs run."""
        count = self._dice.randint(1, len(platform.OPERATIONS))
        operations = self._dice.sample(platform.OPERATIONS, count)
        arguments = (str(self._space.conf), STREAM, *operations)
        module = {"module": "soak.platform", "PYTHONPATH": SUPPORT}
        running = self._space.start(*arguments, log="platform", **module)
        poll(lambda: running.code, "the other program to end", _COMMAND_SECONDS)
        if running.code:
            running.require_alive()
        end = running.printed().splitlines()[-1]
        self._report("maintained by others", f"another program ran {', '.join(operations)}: {end}")

    def _alter_by_another(self) -> None:
        """Let another program drop or rename a column while the jobs run; `apply` undoes it."""
        name = self._dice.choice(self._evolving.versions[self._evolving.at])[0]
        renamed = f"{name}_renamed" if self._dice.random() < 0.5 else None

        def alter(table: Table) -> None:
            with table.update_schema(allow_incompatible_changes=True) as update:
                update.rename_column(name, renamed) if renamed else update.delete_column(name)

        self._by_another(self._job.stream.table, alter)
        time.sleep(self._dice.uniform(0, 15))
        self._apply()
        words = f"renamed {name}" if renamed else f"dropped {name}"
        self._report("column altered", f"another program {words}, and apply brought it back")

    def _partition_by_another(self) -> None:
        """Let another program add a field to the default partition spec, or remove it."""
        column, stream = "kafka_offset", self._job.stream
        field = f"{column}_bucket"

        def partition(table: Table) -> None:
            with table.update_spec() as update:
                if any(f.name == field for f in table.spec().fields):
                    update.remove_field(field)
                else:
                    update.add_field(column, BucketTransform(4), field)

        for name in (stream.table, stream.dead_letters_table):
            self._by_another(name, partition)
        self._report("spec changed", f"another program added or removed partition field {field}")

    def _by_another(self, name: str, change: Callable[[Table], None]) -> None:
        """Change a table as another program does, again after a refusal by a job's commit."""

        def changed() -> bool | None:
            try:
                change(self._job.lake.catalog.load_table(name))
            except (CommitFailedException, ConnectionError, OSError):
                return None
            return True

        poll(changed, f"another program to change {name}", _PATIENCE)

    def _lose_file(self) -> None:
        """Delete a data file of an accepted hour, as a wrong bucket rule does, and restate it."""
        state = self._state()
        hours = [hour for hour in sorted(state.accepted) if state.served_by(hour) == "batch"]
        files = files_by_branch(state.table, hours)["batch"]
        if not files:
            return
        hour = self._dice.choice(sorted(files))
        path = self._dice.choice(sorted(files[hour]))
        delete_files(state.table.io, [path])

        def is_found() -> bool | None:
            self._finish("batch", "--hour", hour, "--restate")
            return None if find_lost_files(self._state().table, [hour]) else True

        poll(is_found, f"hour {hour} to be restated without {path}", _COMMAND_SECONDS)
        self._report("file lost", f"a data file of hour {hour} deleted, the hour restated")

    def _pause_dag(self) -> None:
        """End the batch layer, as a paused DAG does; later a run of the newest ended hour, as the
        DAG makes it, also rebuilds the hours before it."""
        self._kill("batch")
        time.sleep(self._dice.uniform(5, 20))
        timeline = self._state().timeline
        newest = hours_between(timeline.first, timeline.open)[-1:]
        if not newest:
            return
        self._finish("batch", "--hour", newest[0], "--backlog", "24")
        if left := [hour for hour in waiting_hours(self._state()) if hour < newest[0]]:
            raise Terminal(f"the DAG's run of {newest[0]} ended with 0: {left} still wait")
        self._report("DAG paused", f"no batch runs for a while, then the DAG's of {newest[0]}")

    def _name_wrong_topic(self) -> None:
        """Name another, empty topic in the stream's file and adopt it; then adopt the right one."""
        create_topic(self._job.environment.kafka, _WRONG_TOPIC, 1, {})
        for topic in (_WRONG_TOPIC, self._job.stream.topic):
            self._space.set_stream(STREAM, topic=topic)
            self._finish("adopt")
            if topic == _WRONG_TOPIC:
                self._keep_alive()
                time.sleep(self._dice.uniform(5, 20))
        self._report("wrong topic", "another topic named and adopted, and the right one again")

    def _name_table_twice(self) -> None:
        """Name the table in a second stream's file, and require that apply refuses it."""
        other = self._space.conf / "streams" / "copied.yaml"
        shutil.copy(self._space.conf / "streams" / f"{STREAM}.yaml", other)
        try:
            running = self._space.start("apply", "copied")
            poll(lambda: running.code, "anabranch apply to end", _COMMAND_SECONDS)
        finally:
            other.unlink()
        if running.code not in (ConfigurationError.exit_code, Transient.exit_code):
            expected = f"expected exit code {ConfigurationError.exit_code}, found {running.code}"
            end = f"the end of {running.log}:\n{running.log_tail(15)}"
            raise Terminal(f"apply of a second stream with the same table: {expected}; {end}")
        self._report("table named twice", "a second stream's file with the same table, refused")

    def _allow_gaps(self) -> None:
        """Allow all gaps, or only the shipped ones: Kafka has all records."""
        shipped = self._space.shipped(STREAM)["batch"]
        self._allows_all = not self._allows_all
        every = ["control", "aborted", "compacted", "retention"]
        gaps = every if self._allows_all else shipped["allow_gaps"]
        self._space.set_stream(STREAM, batch=shipped | {"allow_gaps": gaps})
        self._report("allow_gaps changed", f"allow_gaps: {', '.join(gaps)}")
        self._restate()

    def _restart_kafka(self) -> None:
        """Restart the broker as for an upgrade: with SIGTERM, for a controlled shutdown."""
        pid = self._pid("kafka")
        os.kill(pid, signal.SIGTERM)

        def has_ended() -> bool | None:
            return None if psutil.pid_exists(pid) and is_alive(psutil.Process(pid)) else True

        poll(has_ended, "Kafka to end", 120)
        self._start_services()
        self._report("kafka restarted", "Kafka ended by SIGTERM, and started again")

    def _take_backup(self) -> None:
        """Take a backup while the jobs are paused, like a snapshot of their volumes."""
        self._collect_ended()
        alive = [running for of_layer in self._alive.values() for running in of_layer]
        for running in alive:
            running.pause()
        try:
            self._backup.take()
        finally:
            for running in alive:
                if running.code is None:
                    running.resume()
        self._report("backup", "catalog and bucket copied")

    def _restore_backup(self) -> None:
        """Restore the backup, without jobs or pending requests, which would change it."""
        if not self._backup.is_taken:
            return
        self._kill("speed", "batch")
        self._interference.drop_requests()
        time.sleep(2)
        self._backup.restore()
        # The restored table may have fewer columns than the stream's file.
        self._evolving.at = len(self._evolving.versions) - 1
        self._space.set_stream(STREAM, schema=self._evolving.schema)
        self._finish("apply")
        self._report("restored", "catalog and bucket set back to the backup")

    def _stamp_strangely(self) -> None:
        before = self.sent.acknowledged
        count, seed = self._dice.randint(5, 15), self._seed * 1_000 + self.counts.total()
        send_strange(self._job, count, seed, self.sent)
        sent = self.sent.acknowledged - before
        self._report("strange timestamps", f"{sent} records with strange timestamps")

    def _set_clock(self, who: str) -> None:
        if self._dice.random() < 0.3:
            seconds = self._dice.choice(_TOLERATED)
            self._interference.set_clock(who, seconds)
            self._report(f"clock of {who} set", f"the clock of {who} {seconds:+,.0f} s from now on")
            return
        seconds = self._dice.choice(_WRONG)
        self._interference.set_clock(who, seconds)
        time.sleep(self._dice.uniform(5, 25))
        self._interference.set_clock(who, 0)
        self._report(f"clock of {who} jumps", f"its clock {seconds:+,.0f} s, and right again")

    def _land_late(self, who: str) -> None:
        after = [
            self._dice.choice((None, self._dice.uniform(0, 2), self._dice.uniform(2, 60)))
            for _ in range(self._dice.randint(1, 3))
        ]
        self._interference.lose_requests(who, after)
        delays = ", ".join("never" if seconds is None else f"{seconds:.1f} s" for seconds in after)
        words = f"the next requests of {who} to the catalog lost, to land after: {delays}"
        self._report("late landings", words)
        time.sleep(self._dice.uniform(5, 15))

    def _die_in_doubt(self, layer: Layer) -> None:
        """Let a publish succeed after its publisher has died and another has taken over."""
        _, words = self._start_in_doubt(layer, FAIL_AT)
        self._report("late, and dead", f"{words}, and to die in doubt")
        time.sleep(self._dice.uniform(15, 25))

    def _pause_in_doubt(self, layer: Layer) -> None:
        """Pause a publisher before it checks its publish's outcome, while others go on."""
        hung, words = self._start_in_doubt(layer, PAUSE_AT)
        deadline = time.monotonic() + _PATIENCE
        paused = False
        while not paused and hung.code is None and time.monotonic() < deadline:
            time.sleep(0.5)
            paused = _PAUSED in "".join(hung.log_lines())
        found = "paused in doubt" if paused else "in no doubt yet"
        self._report("late, and paused", f"{words}, {found}")
        other = self._start_layer(layer)
        time.sleep(self._dice.uniform(20, 40))
        if hung.code is None:
            hung.resume()
        time.sleep(5)
        other.kill()

    def _start_in_doubt(self, layer: Layer, ends: str) -> tuple[Running, str]:
        """Restart a layer, with its next request to the catalog lost and executed late. When it
        checks the outcome, it is killed or paused (`ends`: FAIL_AT or PAUSE_AT). Return the process
        and a description."""
        self._kill(layer)
        seconds = self._dice.uniform(0, 60)
        self._interference.lose_requests(layer, [seconds])
        started = self._start_layer(layer, **{ends: Step.COMMIT_DOUBTED.label})
        words = f"the {layer} layer again, to lose a request that lands after {seconds:.0f} s"
        return started, words

    def _cut_short(self, service: Service) -> None:
        proxy, chance = self._proxies[service], self._dice.choice((0.02, 0.1, 0.3))
        bodies, answers = proxy.bodies, proxy.answers
        with proxy.cutting(chance):
            time.sleep(self._dice.uniform(5, 15))
        cut = f"{proxy.bodies - bodies} bodies and {proxy.answers - answers} answers"
        self._report(f"{service} cut short", f"{cut} of {service} cut short")

    def _cut(self, service: Service) -> None:
        os.kill(self._pid(service), signal.SIGKILL)
        seconds = self._dice.uniform(0, 10)
        time.sleep(seconds)
        self._start_services()
        words = f"{service} killed with its connections, started after {seconds:.0f} s"
        self._report(f"{service} killed", words)

    def _start_services(self) -> None:
        running, port = self._space.services, self._proxies["kafka"].port
        key, secret = running.access_key, running.secret_key
        services.up(running.home, access_key=key, secret_key=secret, advertised_port=port)

    def _pid(self, service: str) -> int:
        states = services.status(self._space.services.home)
        pid = next(state.pid for state in states if state.service == service)
        assert pid is not None, f"{service} is not alive"
        return pid

    def _hang(self, service: Service) -> None:
        pid = self._pid(service)
        seconds = self._dice.uniform(3, 10)
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        self._report(f"{service} hangs", f"{service} answered no request for {seconds:.0f} s")


def _name(fault: _Fault) -> str:
    """Return the fault's method and what it is of, such as `_kill_layer speed`."""
    method = fault[0]
    if isinstance(method, partial):
        return " ".join([method.func.__name__, *method.args])
    return method.__name__
