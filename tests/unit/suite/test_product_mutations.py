"""The faults of `make test-mutations` still fit: each changes a text that is there once."""

import pytest
from mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_fault_changes_one_place_of_the_product(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    found = text.count(mutation.right)
    assert found == 1, f"{mutation.file}: expected once {mutation.right!r}, found it {found} times"
    assert mutation.wrong not in text
    for nearest in mutation.nearest:
        file, _, named = nearest.partition("::")
        assert f"def {named or 'test_'}" in (ROOT / file).read_text(encoding="utf-8"), nearest
