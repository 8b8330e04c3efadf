"""The fault test in short: a kill at each kind of place. `make torture` is the long form."""

import pytest
from torture import PLACES, alone, torture

CASES = {  # the kills of one life after the other, each at a place and the number of times that it comes until then
    "any moment": [0.8],
    "the beginning": [("preparation: tokens half written", 1), ("config.json half written", 1),
                      ("in the first update", 1)],
    "checkpoints": [("checkpoint half written", 12), ("checkpoint: old one not dropped", 4)],
    "an update and the model": [("update: weights changed, no row", 150), ("model half written", 1)],
    "a row and the metadata": [("row half written", 200), ("run_meta.json written, not renamed", 1)],
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The folder of all lives, and what one comes to that is left alone."""
    folder = tmp_path_factory.mktemp("torture")
    return folder, alone(folder / "alone")


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_comes_to_the_same(expected, case):
    folder, left_alone = expected
    kills = [kill if isinstance(kill, float) else PLACES[kill[0]]._replace(number=kill[1]) for kill in CASES[case]]
    assert torture(folder / case, kills, left_alone).wrong == []
