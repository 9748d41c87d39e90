"""A test that failed while an hour ended runs once more, with the services of its run."""

from pathlib import Path

import pytest
import steadiness

pytest_plugins = ("pytester",)

CONFTEST = """
import itertools
import pytest
import steadiness

hours = map(str, itertools.count())
steadiness.this_hour = lambda: next(hours)
started = itertools.count()

@pytest.fixture(scope="session")
def environment():
    assert next(started) == 0, "the services cannot be started twice"
    yield
    print("services ended")

@pytest.fixture(scope="module")
def hour():
    return next(hours)
"""

TESTS = """
first, last = [], []

def test_first(environment, hour):
    first.append(hour)
    assert len(set(first)) > {times}

def test_last(environment, hour):
    last.append(hour)
    assert len(set(last)) > {times}
"""


@pytest.mark.parametrize(("times", "failed"), [(1, 0), (2, 2)])
def test_a_failed_test_is_repeated_once_with_the_services_of_its_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, times: int, failed: int
) -> None:
    """The last test too, although pytest ends fixtures of the session with it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(steadiness.__file__).parent))
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS.format(times=times))
    result = pytester.runpytest_subprocess("-p", "steadiness", "-p", "no:cacheprovider", "-s")
    result.assert_outcomes(passed=2 - failed, failed=failed)
    assert result.stdout.str().count("services ended") == 1
    assert result.stderr.str().count("run once more") == 2
