"""The gradient noise scale: how many tokens an update takes before more of them stop paying (McCandlish et al. 2018).

B_simple = tr Σ / |G|², in tokens, from the norms of an update's own micro-batches: arXiv 1812.06162, appendix A.1.
"""

from collections.abc import Iterable
from math import isfinite


def estimate(micro_batch: int, tokens: int, mean_square: float, square: float) -> tuple[float, float]:
    """Unbiased |G|² and S = tr Σ · tokens of one update of `tokens` in micro-batches of `micro_batch` tokens.

    `mean_square` is the mean of |g_i|² over micro-batches, `square` the |g|² of their mean, before clipping. The two
    are noisy and may be negative: average each over updates, then divide.
    """
    g2 = (tokens * square - micro_batch * mean_square) / (tokens - micro_batch)
    s = (mean_square - square) / (1 / micro_batch - 1 / tokens)
    return g2, s


def noise_scale(g2: Iterable[float | None], s: Iterable[float | None]) -> float | None:
    """B_simple in tokens from many updates' estimates: the ratio of their means. None where it is not defined."""
    pairs = [(a, b) for a, b in zip(g2, s, strict=True) if a is not None and b is not None and isfinite(a + b)]
    mean_g2, mean_s = (sum(values) / len(pairs) for values in zip(*pairs, strict=True)) if pairs else (0.0, 0.0)
    return mean_s / mean_g2 if mean_g2 > 0 and mean_s > 0 else None
