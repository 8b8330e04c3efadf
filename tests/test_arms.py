"""Arms beyond the plain ones, as runs: one that decides on its way, one given by hand, one that is new."""

from dataclasses import replace

import pytest

from lib import schedule
from lib.check import BadInput
from lib.noise import noise_scale
from lib.plan import WINDOW, common_past
from lib.schedule import Stage
from lib.sweep import sweep
from lib.train import resolve, train


def quiet(line):
    pass


@pytest.fixture
def adaptive(tiny):
    return tiny(schedule="adaptive", tokens_per_step=64, max_tokens_per_step=512, token_budget=64 * 400, lr=0.02,
                checkpoint_every=640, skip_validation=True)


def decisions(rows, budget, base, largest):
    """Where T doubles, from the rows alone: by the noise scale over the last twentieth of the budget."""
    made, begins = [(0.0, base)], rows.tokens - rows.tokens_per_step
    for begin in begins[1:]:
        start, size = made[-1]
        window = (begins < begin) & (rows.tokens > begin - WINDOW * budget + 1e-6)
        if 2 * size > largest or begin / budget < start + WINDOW:
            continue
        scale = noise_scale(rows.noise_g2[window], rows.noise_s[window])
        if scale is not None and scale > 2 * size:
            made.append((begin / budget, 2 * size))
    return made


def test_the_adaptive_arm_doubles_where_its_noise_scale_has_passed_twice_t(adaptive):
    run = train(adaptive, quiet)
    meta, rows = run.meta, run.metrics()
    expected = decisions(rows, adaptive.token_budget, 64, 512)
    assert 2 <= len(expected) <= 4
    assert [(stage["boundary"], stage["tokens_per_step"]) for stage in meta["stages"]] == expected
    assert meta["tokens_per_step"] == [size for _, size in expected]
    multipliers = [stage["lr_multiplier"] for stage in meta["stages"]]
    assert multipliers == pytest.approx([2 ** (i / 2) for i in range(len(expected))])
    assert rows.groupby("stage").tokens_per_step.unique().map(list).tolist() == [[size] for _, size in expected]
    for stage in meta["stages"]:
        assert stage["start_tokens"] == pytest.approx(stage["boundary"] * adaptive.token_budget)
    assert meta["arm"] == "adaptive 64 to 512"


@pytest.mark.parametrize("update", [1, 30, 70])
def test_an_adaptive_run_is_resumed_exactly(adaptive, tmp_path, ctrl_c, same_run, update):
    straight = train(replace(adaptive, runs=str(tmp_path / "straight")), quiet)
    with ctrl_c(update):
        train(adaptive, quiet)
    same_run(train(adaptive, quiet), straight)


def test_a_branch_of_an_adaptive_run_goes_on_as_it_did(adaptive, same_run):
    straight = train(adaptive, quiet)
    at = int(straight.meta["stages"][1]["end_tokens"])
    child = train(replace(adaptive, branch_from=straight.name, branch_at=at), quiet)
    same_run(child, straight, aside=["parent", "stream"])
    fresh = train(replace(adaptive, branch_from=straight.name, branch_at=at, max_tokens_per_step=256), quiet)
    assert fresh.meta["stages"][0]["tokens_per_step"] == 64


def test_an_adaptive_run_takes_its_own_time_on_a_time_budget(adaptive, costs):
    timed = replace(adaptive, token_budget=None, time_budget=4.0, clock="modelled")
    meta = train(timed, quiet).meta
    assert len(meta["stages"]) > 1
    assert all(stage["start_seconds"] == pytest.approx(4 * stage["boundary"], abs=0.1) for stage in meta["stages"])


def test_a_micro_batch_alone_is_split_for_the_adaptive_arm(adaptive, tiny):
    config = replace(adaptive, tokens_per_step=32, max_tokens_per_step=256, noise_every=2)
    assert len(train(config, quiet).meta["stages"]) > 1
    with pytest.raises(BadInput, match="noise_every = 0: must be set where T is a single micro-batch"):
        replace(config, noise_every=0)


def test_what_an_adaptive_run_shares_with_another_is_not_foreseen(adaptive, tiny):
    constant = tiny(tokens_per_step=64, token_budget=64 * 400, lr=0.02, skip_validation=True)
    a, b = (resolve(config).config for config in (adaptive, constant))
    assert common_past(a, b, None) == common_past(a, replace(a, max_tokens_per_step=256), None) == 0
    assert common_past(a, replace(a, checkpoint_every=0), None) == a.token_budget


def test_stages_by_hand_train_as_the_schedule_they_copy(tiny):
    thirds = tiny(schedule="dividers", batch_dividers=[4, 1], stage_length=[0.5], skip_validation=True)
    copied = tiny(schedule="stages", stages=[[0, 96], [1920, 384]], skip_validation=True)
    one, other = sweep([thirds, copied], "copies")
    assert one.meta["sha256"] == other.meta["sha256"]


@pytest.mark.parametrize("rule", ["sde-power", "none"])
def test_seesaw_trains_under_other_rules(tiny, rule):
    config = tiny(schedule="seesaw", alpha=2.0, tokens_per_step=96, max_tokens_per_step=384, scaling_rule=rule,
                  wd_rule="per-token", skip_validation=True)
    stages = train(config, quiet).meta["stages"]
    assert [stage["tokens_per_step"] for stage in stages][:4] == [96, 192, 384, 384]
    assert [stage["level"] for stage in stages] == [2.0**-i for i in range(10)]
    assert config.arm.startswith("seesaw 96 to 384 by 2, ")


def test_a_new_arm_is_a_function_of_a_few_lines(tiny, monkeypatch):
    def there_and_back(config):
        """Large, small, large again."""
        large = config.tokens_per_step
        small = large // 4
        return [Stage(0.0, large), Stage(0.25, small, small / large), Stage(0.75, large)]

    monkeypatch.setitem(schedule.SCHEDULES, "there_and_back", there_and_back)
    run = train(tiny(schedule="there_and_back"), quiet)
    assert run.meta["status"] == "finished"
    assert run.meta["arm"] == "there_and_back 384 · 96 · 384 at 0.25, 0.75"
    assert [stage["tokens_per_step"] for stage in run.meta["stages"]] == [384, 96, 384]
    with pytest.raises(BadInput, match=r"schedule = 'nowhere': must be one of constant, .*, there_and_back"):
        tiny(schedule="nowhere")
