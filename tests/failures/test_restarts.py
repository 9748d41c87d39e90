"""The speed job starts from the table alone: its checkpoint gone, its trigger or code changed."""

import random
import shutil
from pathlib import Path

from commands import ROOT, Command, started
from world import Make

SLOW = {"trigger": "1 second", "max_offsets_per_trigger": 40}


def checkpoints(command: Command) -> list[Path]:
    return sorted(command.temporary.glob("anabranch-checkpoint-*"))


def test_a_checkpoint_deleted_between_any_two_micro_batches_changes_nothing(world: Make) -> None:
    one = world(speed=SLOW, create=2)
    sent, deleted, before = 400, 0, 0
    one.send_now(sent, "e")
    dice = random.Random(1)

    def delete() -> bool:
        """Under the running query, at any moment of the second, once for each micro-batch: it writes
        on in a new folder, or starts again from the table. Whether that was enough."""
        nonlocal sent, deleted, before
        if one.published > before and dice.random() < 0.3:
            before = one.published
            for checkpoint in checkpoints(speed):
                shutil.rmtree(checkpoint, ignore_errors=True)
                deleted += 1
        if one.published > sent - 200:
            one.send_now(200, f"more-{sent}")
            sent += 200
        return deleted >= 3 and "try 1 failed: publish a micro-batch" in speed.log

    with started(one, "speed", one.name) as speed:
        # The hazard: a query lost its checkpoint as it wrote it.
        speed.until(delete, "a micro-batch to fail")
        speed.until(lambda: one.published == sent, "the job to go on")
        assert speed.terminate() == 0
    assert one.contents() == one.acknowledged()


def test_another_trigger_and_code_continue_at_the_position(world: Make, tmp_path: Path) -> None:
    one = world(speed=SLOW, create=2)
    one.send_now(200, "e")
    with started(one, "speed", one.name) as speed:
        speed.until(lambda: one.published > 0, "a first micro-batch")
    assert 0 < one.published < 200 and checkpoints(speed)
    one.configure(speed={"trigger": "3 seconds", "max_offsets_per_trigger": 70})
    changed = changed_code(tmp_path)
    with started(one, "speed", one.name, code=changed, PYTHONPATH=str(changed)) as speed:
        speed.until(lambda: one.published == 200, "the changed job to go on")
        # The hazard: another plan than the one that the old checkpoint, which is still there, was
        # written for.
        assert "changed code" in speed.log
        assert len(checkpoints(speed)) == 2
        assert speed.terminate() == 0
    assert one.contents() == one.acknowledged()


def changed_code(folder: Path) -> Path:
    """A copy of the project whose stream's plan has a shuffle, which no checkpoint survives."""
    copy = folder / "changed"
    for name in ("anabranch", "speed_layer", "batch_layer", "serving_layer", "conf"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    source = copy / "speed_layer" / "job.py"
    text = source.read_text("utf-8")
    assert text.count("        frame = read_stream(") == 1
    behind = "        def publish_batch("
    assert text.count(behind) == 1
    added = '        frame = frame.repartition(3)\n        LOG.info("changed code")\n'
    source.write_text(text.replace(behind, added + behind), "utf-8")
    return copy
