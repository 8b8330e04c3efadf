"""Tables and sentences of a report."""

from collections.abc import Sequence

import pandas as pd
import torch
from IPython.display import Markdown, display

from lib import stats
from lib.machine import environment

WORDS = {
    "budget_kind": "budget in", "budget": "budget", "arm": "arm", "lr": "lr", "validation_loss": "validation loss, nat",
    "validation_loss_sd": "sd", "validation_bits_per_byte": "bits per byte", "validation_bits_per_byte_sd": "sd of bits",
    "n": "n", "unfinished": "unfinished", "steps": "updates", "tokens": "tokens", "elapsed_seconds": "seconds",
    "tokens_per_second": "tokens/s", "final_lr": "lr at the end", "at_edge": "at the grid's edge", "tried": "rates tried",
}
FORMATS = {
    "budget": "{:,g}", "lr": "{:.4g}", "validation_loss": "{:.4f}", "validation_loss_sd": "{:.4f}",
    "validation_bits_per_byte": "{:.4f}", "validation_bits_per_byte_sd": "{:.4f}", "steps": "{:,.0f}",
    "tokens": "{:,.0f}", "elapsed_seconds": "{:,.1f}", "tokens_per_second": "{:,.0f}", "final_lr": "{:.2g}",
}


def table(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame as text for readers: column names in words with their units, numbers with fitting digits."""
    shown = frame.copy()
    for name, form in FORMATS.items():
        if name in shown:
            shown[name] = [form.format(value) if pd.notna(value) else "–" for value in shown[name]]
    return shown.rename(columns=WORDS).set_index(WORDS[frame.columns[0]] if frame.columns[0] in WORDS else
                                                frame.columns[0])


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
