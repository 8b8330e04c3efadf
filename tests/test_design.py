"""The designer: every schedule from its suggestions, each mistake beside its field, the file that it saves."""

import pytest
import yaml

from lib.check import BadInput
from lib.clock import Costs
from lib.config import OF_SCHEDULES, ROOT, RunConfig, read_arguments
from lib.design import UNITS, draft, duration, in_words, save, shown, suggested, typed_value
from lib.schedule import SCHEDULES

SCALES = sorted((ROOT / "params").glob("*/09_explore.yaml"))


@pytest.fixture
def base(tiny):
    return tiny(warmup_fraction=0.05)


def typed(base, **changes):
    return suggested(base) | changes


@pytest.mark.parametrize("path", SCALES, ids=lambda path: path.parent.name)
def test_every_schedule_starts_from_numbers_that_run(path):
    values = yaml.safe_load(path.read_text())
    base = RunConfig(**{name: value for name, value in values.items() if name in RunConfig.__dataclass_fields__})
    for name in SCHEDULES:
        for timed in (False, name == "stages"):  # in seconds too, but for the starts of stages, which are in tokens
            found = draft(base, typed(base, schedule=name), timed)
            assert found.problems == ({"stages": found.problems.get("stages")} if timed else {})
    for name in {*SCHEDULES} - {"stages"}:
        assert draft(base, typed(base, schedule=name), timed=True).config.time_budget == 60


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_field_is_shown_where_the_schedule_uses_it(base, name):
    """Changing what is shown changes the run; what is hidden may hold anything."""
    fields = shown(name, timed=False)
    assert {field for field, owners in OF_SCHEDULES.items() if name in owners} <= {*fields}
    nonsense = {field: "nonsense" for field in UNITS if field not in fields}
    assert draft(base, typed(base, schedule=name, **nonsense), False) == draft(base, typed(base, schedule=name), False)
    for field in fields:
        if field not in ("schedule", "lr_schedule", "scaling_rule"):
            assert [*draft(base, typed(base, schedule=name, **{field: "nonsense"}), False).problems] == [field]


@pytest.mark.parametrize(("schedule", "field", "text", "message"), [
    ("constant", "tokens_per_step", "400", "must be a multiple of device_token_capacity 32; the nearest is 416"),
    ("constant", "tokens_per_step", "", "must be a number"),
    ("constant", "tokens_per_step", "384.5", "must be a whole number"),
    ("constant", "token_budget", "1,000,000", "must be a number"),
    ("constant", "token_budget", "100", "must hold at least one update of 384 tokens"),
    ("constant", "lr", "nan", "must be a finite number"),
    ("constant", "lr", "-1", "must be positive"),
    ("constant", "min_lr", "1", "must not be above lr 0.01"),
    ("late_switch", "switch_at", "75 %", "must be a number"),
    ("late_switch", "switch_at", "1", "must lie between 0 and 1"),
    ("late_switch", "small_tokens_per_step", "33", "must be a positive multiple of device_token_capacity 32"),
    ("dividers", "batch_dividers", "4, two", "must be a number"),
    ("dividers", "batch_dividers", "[4, 2", "must be a list"),
    ("dividers", "stage_length", "0.5", "must give 2 lengths for 3 batch_dividers"),
    ("seesaw", "alpha", "1", "must lie between 1.01 and 100"),
    ("seesaw", "lr_schedule", "constant", "must fall, for seesaw to cut it"),
    ("adaptive", "max_tokens_per_step", "96", "must be a multiple of device_token_capacity 32, and at least"),
    ("stages", "stages", "[5, 64]", "must start at 0"),
    ("stages", "stages", "0, 64", "must be a list"),
])
def test_a_mistake_is_explained_beside_its_field(base, schedule, field, text, message):
    found = draft(base, typed(base, schedule=schedule, **{field: text}), timed=False)
    assert found.config is None
    assert [*found.problems] == [field]
    assert found.problems[field].startswith(message)


def test_every_mistake_is_told_at_once(base):
    found = draft(base, typed(base, lr="fast", seed="first"), timed=False)
    assert found.problems == {"lr": "must be a number", "seed": "must be a number"}


def test_a_mistake_of_no_field_is_told_whole(base):
    object.__setattr__(base, "heads", 3)
    assert draft(base, typed(base), timed=False).problems == {
        "": "heads = 3: must divide hidden_size 16 into heads of an even size, which RoPE rotates in pairs"}


@pytest.mark.parametrize(("name", "text", "value"), [
    ("token_budget", "1e6", 1_000_000), ("token_budget", " 1_000_000 ", 1_000_000), ("lr", "6e-4", 6e-4),
    ("batch_dividers", "12, 4, 1", (12, 4, 1)), ("batch_dividers", "[4, 1]", (4, 1)), ("batch_dividers", "2", (2,)),
    ("stages", "[0, 64], [4_608, 768]", ((0, 64), (4608, 768))), ("stages", "[[0, 64], [10, 96]]", ((0, 64), (10, 96))),
    ("stages", "[0, 64]", ((0, 64),)), ("stages", "[[0, 64]]", ((0, 64),)), ("stages", "", ()),
])
def test_what_is_typed(name, text, value):
    assert typed_value(name, text) == value


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_saved_is_what_was_designed(base, tmp_path, schedule):
    config = draft(base, typed(base, schedule=schedule), timed=False).config
    path = save(config, str(tmp_path / "new" / "arm.yaml"), "An arm.")
    assert read_arguments(RunConfig, [str(path)]) == config
    assert path.read_text().startswith("# An arm.\n")


def test_nothing_is_written_over(base, tmp_path, contents):
    (tmp_path / "there.yaml").write_text("mine")
    (tmp_path / "link.yaml").symlink_to(tmp_path / "nowhere.yaml")
    (tmp_path / "file").touch()
    before = contents(tmp_path)
    for name, message in (("there.yaml", "is there already"), ("link.yaml", "is there already"),
                          ("arm.txt", "must end in .yaml"), ("file/arm.yaml", "must be a file that can be written")):
        with pytest.raises(BadInput, match=message) as error:
            save(base, str(tmp_path / name))
        assert str(error.value).startswith("file = ")
    assert contents(tmp_path) == before


def test_what_a_schedule_comes_to_in_words(base):
    costs = Costs(micro_batch_seconds=2.0, update_seconds=1.0)
    assert in_words(base, None, 10**6) == "constant 384: 10 updates, 3,840 tokens"
    nine = duration(9 * (12 * 2 + 1))  # the first one comes before the clock
    assert in_words(base, costs, 10**6) == f"constant 384: 10 updates, 3,840 tokens, about {nine} on this machine"
    assert in_words(base, None, 2000).endswith("; the stream's 2,000 tokens end it before")
    timed = draft(base, typed(base), timed=True).config
    assert in_words(timed, None, 10**6) == "constant 384: as many updates as 60 s hold"
    assert in_words(timed, costs, 10**6) == "constant 384: 4 updates, 1,536 tokens, about 1 min 15 s on this machine"


@pytest.mark.parametrize(("seconds", "words"), [
    (0, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min 0 s"), (185, "3 min 5 s"), (7800, "2 h 10 min"),
    (3 * 86400 + 4 * 3600, "3 d 4 h")])
def test_durations(seconds, words):
    assert duration(seconds) == words
