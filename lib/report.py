"""Tables and sentences of a report."""

from collections.abc import Sequence

import pandas as pd
from IPython.display import Markdown, display
from pandas.io.formats.style import Styler

from lib import stats
from lib.machine import environment, pick_device

# Column names in words, in the order of a table, with the format of their numbers.
COLUMNS = {
    "budget_kind": ("budget in", "{}"),
    "lr_schedule": ("lr curve", "{}"),
    "branch_at": ("branched at, tokens", "{:,.0f}"),
    "arm": ("arm", "{}"),
    "lr": ("lr", "{:.4g}"),
    "own": ("own best lr", "{:.4g}"),
    "rule": ("lr by the rule", "{:.4g}"),
    "validation_loss": ("validation loss, nat", "{:.4f}"),
    "validation_bits_per_byte": ("bits per byte", "{:.4f}"),
    "n": ("n", "{}"),
    "unfinished": ("unfinished", "{}"),
    "steps": ("updates", "{:,.0f}"),
    "tokens": ("tokens", "{:,.0f}"),
    "elapsed_seconds": ("seconds", "{:,.1f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "final_lr": ("lr at the end", "{:.2g}"),
    "tried": ("rates tried", "{}"),
    "at_edge": ("at the grid's edge", "{}"),
}
KEYS = [COLUMNS[name][0] for name in ("budget_kind", "lr_schedule", "branch_at", "arm")]  # what names a row


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text for readers: columns in words with units, means with their sd, arms as the rows' names."""
    shown = pd.DataFrame(index=frame.index)
    for name, (words, form) in COLUMNS.items():
        if name not in frame or (name == "unfinished" and not any(frame[name])):
            continue
        shown[words] = [form.format(value) if pd.notna(value) and value != "" else "–" for value in frame[name]]
        if f"{name}_sd" in frame:
            shown[words] += [f" ± {form.format(sd)}" if pd.notna(sd) else "" for sd in frame[f"{name}_sd"]]
    return shown.set_index([name for name in KEYS if name in shown])


def texts(frame: pd.DataFrame) -> Styler:
    """The frame with its texts whole for readers: line breaks are kept, and nothing in them is markup or a formula."""
    return (frame.style.format(escape="html").format_index(escape="html").set_uuid("texts")
            .set_table_attributes('class="tex2jax_ignore mathjax_ignore"')
            .set_properties(**{"white-space": "pre-wrap", "text-align": "left", "vertical-align": "top"}))


def verdicts(comparisons: dict[str, stats.Comparison], unit: str = "nat") -> pd.DataFrame:
    """One row a comparison: the paired difference, its interval, p and the verdict."""
    rows = {
        name.replace("\n", " "): {
            f"difference, {unit}": stats.signed(c.difference, 4),
            f"{100 * c.confidence:g} % interval": " to ".join(stats.signed(end, 4) for end in c.interval),
            "n": c.n,
            "p": f"{c.p_value:.2g}",
            "margin": f"±{c.margin:g}",
            "verdict": c.verdict,
        }
        for name, c in comparisons.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").replace({"+nan": "–", "+nan to +nan": "–", "nan": "–"})


def result(*sentences: str) -> None:
    """Display sentences computed from the data as the bold result of a section."""
    display(Markdown("**Result:** " + " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)))


def facts(values: dict[str, object]) -> None:
    """Display names and values as a small table."""
    display(pd.DataFrame({"": [str(value) for value in values.values()]}, index=list(values)))


def noise(runs: pd.DataFrame) -> None:
    """Display how far apart two runs of one arm are that differ by seed only, under each budget."""
    for kind, group in runs.groupby("budget_kind"):
        floor = stats.noise_floor(group.pivot(index=["arm", "lr"], columns="seed", values="validation_loss"))
        by = f"{floor:.4f} nat (standard deviation)" if floor == floor else "what a single seed cannot tell"
        print(f"Budget in {kind}: two runs that differ by seed only differ by {by}.")


def provenance(runs: pd.DataFrame | None = None) -> None:
    """Display the versions, device, threads and commit of this report, and those its runs were made with."""
    here = environment(pick_device("auto"))
    made = [tuple(where.items()) for where in runs["environment"]] if runs is not None else []
    columns = {"this report": here} | {f"{made.count(where)} runs": dict(where) for where in dict.fromkeys(made)}
    display(pd.DataFrame(columns).fillna("–").astype(str))


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
