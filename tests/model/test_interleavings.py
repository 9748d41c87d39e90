"""Every interleaving of small settings: whatever is paused or killed wherever, `main` is exact."""

import pytest
from budget import budget
from exploration import explore, settle, walk
from settings import LARGE, SETTINGS
from small_world import new_world

WALKS = budget(100, 300)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.full) if name in LARGE else name for name in SETTINGS],
)
def test_every_interleaving_keeps_main_exact(name: str) -> None:
    setting = SETTINGS[name]
    world = settle(new_world(**setting.world), *setting.before)
    explored = explore(world, setting.actors)
    moments, rests, longest = explored.moments, explored.rests, explored.longest
    print(f"{name}: {moments} moments, {rests} of rest, at most {longest} steps")
    for what in setting.sees.split("; "):
        why = f"expected {what!r} to happen, found only {sorted(explored.steps)}"
        assert explored.saw(what), why


@pytest.mark.parametrize("name", LARGE)
def test_random_walks_of_a_large_setting_keep_main_exact(name: str) -> None:
    setting = SETTINGS[name]
    world = settle(new_world(**setting.world), *setting.before)
    seen = set[str]()
    for seed in range(1, WALKS + 1):
        seen.update(walk(world, setting.actors, seed))
    sees = setting.sees.split("; ")
    happened = [what for what in sees if any(what in step for step in seen)]
    print(f"{name}: {WALKS} walks, {len(happened)} of {len(sees)}: {happened}")
    assert happened, f"expected one of {sees} to happen, found only {sorted(seen)}"
