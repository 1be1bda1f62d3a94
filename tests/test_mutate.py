"""The mutants of mutate.py (which CI does not run) still fit the code: each names a line that is there exactly once."""

import mutate
import pytest


def test_there_are_enough() -> None:
    assert len({mutant.name for mutant in mutate.MUTANTS}) == len(mutate.MUTANTS) >= 25


@pytest.mark.parametrize("mutant", mutate.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_matches_once(mutant: mutate.Mutant) -> None:
    text = (mutate.ROOT / "gdn_jax" / mutant.file).read_text()
    assert text.count(mutant.search) == 1 and mutant.replace not in (mutant.search, "")
    assert mutate.existing(mutant.tests) == mutant.tests
