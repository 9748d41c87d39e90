"""docs/tutorial.md, command by command, in a folder of its own with real services."""

import sys
from pathlib import Path

import pytest
import tutorial_page


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_commands_of_the_tutorial_give_what_it_says(tmp_path: Path) -> None:
    tutorial_page.follow(Path(sys.executable).parent, tmp_path)
