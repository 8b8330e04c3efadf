"""Tables and sentences say what the numbers say."""

import numpy as np
import pandas as pd

from lib import report
from lib.stats import compare, summary


def runs():
    rows = [{"budget_kind": "tokens", "arm": arm, "lr": 0.0012345, "seed": seed, "status": "finished",
             "validation_loss": 4 + seed / 10, "validation_bits_per_byte": 2.0, "steps": 1080, "tokens": 1_105_920,
             "elapsed_seconds": 36.0, "tokens_per_second": 30_000.4, "final_lr": 1e-9}
            for arm in ("constant 1,024", "dividers 12,4,1") for seed in (0, 1, 2)]
    return pd.DataFrame(rows)


def test_a_table_has_words_units_and_spread():
    shown = report.table(summary(runs()))
    assert list(shown.columns) == ["lr", "validation loss, nat", "bits per byte", "n", "updates", "tokens", "seconds",
                                   "tokens/s", "lr at the end"]
    assert shown.loc[("tokens", "constant 1,024"), "validation loss, nat"] == "4.1000 ± 0.1000"
    assert shown.loc[("tokens", "dividers 12,4,1"), "tokens"] == "1,105,920"


def test_what_groups_the_rows_names_them():
    by = ["lr_schedule", "branch_at", "arm"]
    shown = report.table(summary(runs().assign(lr_schedule=["cosine"] * 3 + ["constant"] * 3, branch_at=8192), by))
    assert list(shown.index.names) == ["lr curve", "branched at, tokens", "arm"]
    assert shown.index.tolist() == [("cosine", "8,192", "constant 1,024"), ("constant", "8,192", "dividers 12,4,1")]


def test_what_failed_is_seen_and_a_missing_number_is_a_dash():
    failed = runs()
    failed.loc[failed.arm == "constant 1,024", ["status", "validation_loss"]] = ["diverged", np.nan]
    shown = report.table(summary(failed))
    assert shown["unfinished"].tolist() == ["3 diverged", "–"]
    assert shown["validation loss, nat"].iloc[0] == "–"


def test_verdicts_keep_the_signs():
    losses = pd.Series([4.0, 4.1, 4.2, 4.3])
    shown = report.verdicts({"a": compare(losses - [0.5, 0.51, 0.49, 0.5], losses, margin=0.02)})
    assert shown.loc["a", "difference, nat"] == "−0.5000"
    assert shown.loc["a", "verdict"] == "better"
    assert shown.loc["a", "95 % interval"].startswith("−0.5")


def test_a_result_is_bold_and_ends_with_one_stop(monkeypatch):
    shown = []
    monkeypatch.setattr(report, "display", shown.append)
    report.result("One thing.", "another")
    assert shown[0].data == "**Result:** One thing. another."


def test_lists_in_words():
    assert report.listed(["a"]) == "a"
    assert report.listed(["a", "b"]) == "a and b"
    assert report.listed(["a", "b", "c"]) == "a, b and c"
    assert report.listed([]) == ""
