"""Random walks of larger settings: two or three partitions, some hours, two of each layer, an
operator, maintenance.

`MODEL_WALKS` and `MODEL_SEED` say how many walks there are and where they begin; a failure prints
the seed of its walk, and `MODEL_WALKS=1 MODEL_SEED=<seed>` walks it again.
"""

import os

from budget import budget
from exploration import forget, walk
from settings import at_random

WALKS = int(os.environ.get("MODEL_WALKS") or budget(100, 400))
SEED = int(os.environ.get("MODEL_SEED", "1"))

# What a few hundred walks have to come across, so that it is known that they happen.
SEEN = (
    "is refused", "is killed at move", "is killed at accept", "publishes, and the answer is lost",
    "gives up its skip", "finds its offsets published", "has to ask again", "wants to skip",
    "wants to read", "another run published first", "its staged snapshot is missing",
    "the look-back is not what", "refuses 2026-11-21T0", "restates 2026-11-21T0",
    "operator publishes", "maintenance removes", "sees all hours fixed",
    "lies ahead of the position", "at last, and it lands", "at last, and it is refused",
    "moves a head in its way", "finds that it may still land", "asks for turn", "has the way",
    "sees the bound of turn", "takes back its turn", "publishes the dead letters",
    "is refused with the dead letters", "has something to finish", "records ['",
    "a task of it twice", "is killed at hear", "night makes all", "sees retain", "as lost",
    "sees compact", "sees end transaction", "sees rules that read every record",
    "snapshots of dead letters",
)  # fmt: skip


def test_random_walks_keep_main_exact() -> None:
    missed, steps = set(SEEN), 0
    for seed in range(SEED, SEED + WALKS):
        if seed % 20 == 0:
            forget()
        path = walk(*at_random(seed), seed)
        steps += len(path)
        missed -= {what for what in missed if any(what in step for step in path)}
    print(f"{WALKS} walks from seed {SEED}, {steps} steps")
    why = f"expected {WALKS} walks to come across all of it, found none with {missed}"
    assert not missed or WALKS < 400, why


def test_a_walk_is_the_same_again() -> None:
    assert walk(*at_random(SEED), SEED) == walk(*at_random(SEED), SEED)
