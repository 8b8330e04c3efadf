"""Tables and sentences of a report."""

from collections.abc import Sequence

import pandas as pd
import torch
from IPython.display import Markdown, display

from lib import stats
from lib.machine import environment

# Column names in words, in the order of a table, with the format of their numbers.
COLUMNS = {
    "budget_kind": ("budget in", "{}"),
    "budget": ("budget", "{:,g}"),
    "arm": ("arm", "{}"),
    "lr": ("lr", "{:.4g}"),
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


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text for readers: columns in words with units, means with their sd, arms as the rows' names."""
    shown = pd.DataFrame(index=frame.index)
    for name, (words, form) in COLUMNS.items():
        if name not in frame or (name == "unfinished" and not frame[name].any()):
            continue
        shown[words] = [form.format(value) if pd.notna(value) else "–" for value in frame[name]]
        if f"{name}_sd" in frame:
            shown[words] += [f" ± {form.format(sd)}" if pd.notna(sd) else "" for sd in frame[f"{name}_sd"]]
    return shown.set_index([name for name in ("budget in", "arm") if name in shown])


def verdicts(comparisons: dict[str, stats.Comparison]) -> pd.DataFrame:
    """One row a comparison: the paired difference, its interval, p and the verdict."""
    rows = {
        name: {
            "difference, nat": stats.signed(c.difference, 4),
            f"{100 * c.confidence:g} % interval": " to ".join(stats.signed(end, 4) for end in c.interval),
            "n": c.n,
            "p": f"{c.p_value:.2g}",
            "margin": f"±{c.margin:g}",
            "verdict": c.verdict,
        }
        for name, c in comparisons.items()
    }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("comparison")


def result(*sentences: str) -> None:
    """Display sentences computed from the data as the bold result of a section."""
    display(Markdown("**Result:** " + " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)))


def facts(values: dict[str, object]) -> None:
    """Display names and values as a small table."""
    display(pd.DataFrame({"": [str(value) for value in values.values()]}, index=list(values)))


def provenance(device: torch.device) -> None:
    """Display the versions, the device, the threads and the commit behind this report."""
    facts(environment(device))


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
