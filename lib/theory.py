"""The functional scaling law of batch sizes at a constant learning rate, its best schedules, and its fit to runs.

Wang et al. 2026, *Fast Catch-Up, Late Switching* (arXiv 2602.14208). With t the intrinsic time, `rate` an update:

    loss(t) = floor + amplitude · (t + 1)^-s + noise · ∫₀ᵗ K(t − τ) / b(τ) dτ,    K(u) = (u + 1)^-(2 − 1/β)

The first term is signal, what more updates learn; the second is the noise of past updates of b tokens, which fades.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from scipy.optimize import brentq, minimize, minimize_scalar, nnls
from scipy.signal import fftconvolve

from lib.check import require

BINS = 40  # of equal tokens, that a curve is averaged in before it is fitted
BOUNDS = {"s": (0.02, 3.0), "beta": (1.02, 20.0), "rate": (1e-4, 10.0)}  # of a fit


@dataclass(frozen=True)
class Law:
    """The law's constants; losses in nats, `noise` in nats · tokens, `rate` in intrinsic time an update."""

    floor: float
    amplitude: float
    s: float
    beta: float
    noise: float
    rate: float

    def __post_init__(self):
        for name in ("s", "rate"):
            require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in ("amplitude", "noise"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        require(self.beta > 1, "beta", self.beta, "must be above 1")

    @property
    def hard(self) -> bool:
        """Whether s ≤ 1 − 1/β: then the best schedule stays at the smallest batch for most tokens."""
        return self.s <= 1 - 1 / self.beta

    def faded(self, time) -> np.ndarray:
        """∫₀ᵗ K: the noise of all updates within this time before the end, at one token an update."""
        power = 1 - 1 / self.beta
        return (1 - (np.asarray(time, float) + 1) ** -power) / power


def simulate(law: Law, batch: Sequence[float]) -> np.ndarray:
    """Loss after every update of a run whose updates take `batch` [N] tokens."""
    signal, noise = terms(law, np.asarray(batch, float))
    return law.floor + law.amplitude * signal + law.noise * noise


def terms(law: Law, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two terms without their factors, after every update [N]."""
    time = law.rate * np.arange(len(batch) + 1)
    return (time[1:] + 1) ** -law.s, fftconvolve(np.diff(law.faded(time)), 1 / batch)[: len(batch)]


def final(law: Law, stages: Sequence[tuple[float, float]]) -> float:
    """Loss at the end of a run of stages (tokens per step, tokens), which need be no whole updates: the closed form."""
    sizes, tokens = np.asarray(stages, float).T
    spans = law.rate * tokens / sizes
    left = np.append(np.cumsum(spans[::-1])[::-1], 0.0)  # time from each stage's beginning to the end
    noise = -np.diff(law.faded(left)) / sizes
    return law.floor + law.amplitude * (left[0] + 1) ** -law.s + law.noise * float(noise.sum())


def along(law: Law, stages: Sequence[tuple[float, float]], places: Sequence[float]) -> np.ndarray:
    """Loss where such a run has taken so many tokens, at these places [P]."""
    sizes, tokens = np.asarray(stages, float).T
    bounds, times = (np.append(0.0, np.cumsum(part)) for part in (tokens, law.rate * tokens / sizes))
    now = np.interp(places, bounds, times)
    since = np.clip(now[:, None] - times, 0, None)  # each stage's beginning and end
    noise = -np.diff(law.faded(since), axis=1) @ (1 / sizes)
    return law.floor + law.amplitude * (now + 1) ** -law.s + law.noise * noise


def switch_losses(law: Law, small: float, large: float, budget: float, fractions: Sequence[float]) -> np.ndarray:
    """Loss at the end of runs that switch from small to large tokens per step at these fractions of the budget."""
    return np.array([final(law, [(small, at * budget), (large, (1 - at) * budget)]) for at in fractions])


def best_switch(law: Law, small: float, large: float, budget: float) -> float:
    """The fraction of the budget at which to switch: 0 is constant large, 1 constant small.

    It is looked for on a grid that is as fine in the tokens that are left as in those before, then between its points.
    """
    share = np.geomspace(1e-6, 0.5, 200)
    grid = np.concatenate([[0.0], share, 1 - share[::-1], [1.0]])
    place = int(np.argmin(switch_losses(law, small, large, budget, grid)))
    low, high = grid[max(place - 1, 0)], grid[min(place + 1, len(grid) - 1)]
    found = minimize_scalar(lambda at: switch_losses(law, small, large, budget, [at])[0], (low, high), (low, high),
                            method="bounded", options={"xatol": 1e-9})
    return min((float(found.x), low, high), key=lambda at: switch_losses(law, small, large, budget, [at])[0])


def optimal(law: Law, budget: float, smallest: float, largest: float = np.inf, parts: int = 200
            ) -> list[tuple[float, float]]:
    """The best schedule of a token budget with T between these bounds, as stages (tokens per step, tokens).

    For a run of so much time, ∫K/b is least at ∫b = budget where b ∝ √K(time left), clipped to the bounds; how much
    time, decides between signal and noise. `parts` are stages, finer toward the end.
    """
    least, most = law.rate * budget / largest, law.rate * budget / smallest
    times = np.geomspace(max(least, most * 1e-4), most, 60)
    best = min(range(len(times)), key=lambda i: final(law, spread(law, times[i], budget, smallest, largest, parts)))
    around = times[max(best - 1, 0)], times[min(best + 1, len(times) - 1)]
    found = minimize_scalar(lambda time: final(law, spread(law, time, budget, smallest, largest, parts)),
                            bounds=around, method="bounded")
    return min((spread(law, time, budget, smallest, largest, parts) for time in (found.x, *around)),
               key=lambda stages: final(law, stages))


def spread(law: Law, time: float, budget: float, smallest: float, largest: float, parts: int
           ) -> list[tuple[float, float]]:
    """The budget over so much intrinsic time, with the least noise at its end."""
    left = np.concatenate([[0.0], np.geomspace(min(0.1, time / parts), time, parts)])[::-1]  # time to the end
    spans = -np.diff(left)
    root = np.sqrt(-np.diff(law.faded(left)) / spans)  # of the kernel's mean in each part

    def sizes(factor: float) -> np.ndarray:
        return np.clip(np.exp(factor) * root, smallest, largest)

    def over(factor: float) -> float:
        return float(sizes(factor) @ spans) / law.rate - budget

    low, high = np.log(smallest / root.max()), np.log(min(largest, 1e3 * law.rate * budget / time) / root.min())
    factor = low if over(low) >= 0 else high if over(high) <= 0 else brentq(over, low, high, xtol=1e-12)
    tokens = sizes(factor) * spans / law.rate
    return [*zip(sizes(factor).tolist(), (tokens * budget / tokens.sum()).tolist(), strict=True)]


def rivals(law: Law, budget: float, smallest: float, largest: float) -> dict[str, list[tuple[float, float]]]:
    """The best schedule with T between these bounds, the constants at them, and the best constant between."""
    sizes = np.geomspace(smallest, largest, 100)
    best = sizes[np.argmin([final(law, [(size, budget)]) for size in sizes])]
    stages = {"best schedule": optimal(law, budget, smallest, largest, 60)}
    return stages | {f"constant {size:,.0f}": [(float(size), float(budget))] for size in (smallest, best, largest)}


def in_words(law: Law, schedules: dict[str, Sequence[tuple[float, float]]]) -> str:
    """What the best schedule gains over the best constant T, and where it begins to grow."""
    ends = {name: final(law, stages) for name, stages in schedules.items()}
    best = ends.pop("best schedule")
    constant = min(ends, key=ends.get)
    sizes, tokens = np.transpose(schedules["best schedule"])
    at_least = tokens[sizes <= sizes.min() * 1.01].sum() / tokens.sum()
    gain = ends[constant] - best
    beside = f"{gain:.4f} nat below" if gain >= 5e-5 else "no lower than"
    return (f"The best schedule ends at {best:.4f} nat, {beside} the best constant T, "
            f"{constant.removeprefix('constant ')}; it stays at its smallest T, {sizes.min():,.0f}, for {at_least:.0%} "
            f"of the tokens, and ends at {sizes[-1]:,.0f}")


@dataclass(frozen=True)
class Fit:
    """A law fitted to runs, and how well: `r2` of the binned losses, `residual` in nats (root mean square)."""

    law: Law
    r2: float
    residual: float
    at_bound: tuple[str, ...]  # constants that the search ended at the edge of: the runs do not tell them


def fit(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Fit:
    """The law of runs at one constant learning rate; each curve is (tokens of each update, loss of each update) [N].

    A loss that is NaN is left out, such as those of the warm-up. Every curve counts the same, in bins of equal tokens.
    Floor, amplitude and noise follow from the other three by non-negative least squares (variable projection, Golub and
    Pereyra 1973), which leaves a search over s, β and the rate.
    """
    curves = [(np.asarray(batch, float), np.asarray(loss, float)) for batch, loss in curves]
    wanted = np.concatenate([binned(batch, loss, loss) for batch, loss in curves])
    low, high = np.log(np.transpose([*BOUNDS.values()]))

    def linear(logs: np.ndarray) -> tuple[Law, np.ndarray]:
        s, beta, rate = np.exp(np.clip(logs, low, high))
        shape = Law(0.0, 1.0, s, beta, 1.0, rate)
        columns = []
        for batch, loss in curves:
            signal, noise = terms(shape, batch)
            columns.append([binned(batch, loss, part) for part in (np.ones(len(batch)), signal, noise)])
        matrix = np.hstack(columns).T
        scale = matrix.max(axis=0)
        factors = nnls(matrix / scale, wanted)[0] / scale
        return Law(factors[0], factors[1], s, beta, factors[2], rate), matrix @ factors - wanted

    def cost(logs: np.ndarray) -> float:
        return float(np.mean(linear(logs)[1] ** 2))

    starts = product(np.log([0.1, 0.4, 1.0]), np.log([1.3, 2.0, 5.0]), np.log([0.003, 0.03, 0.3]))
    tried = sorted((np.array(start) for start in starts), key=cost)[:3]
    found = min((minimize(cost, start, method="Nelder-Mead", bounds=[*zip(low, high, strict=True)],
                          options={"xatol": 1e-3, "fatol": 1e-10, "maxiter": 400}) for start in tried),
                key=lambda result: result.fun)
    law, residual = linear(found.x)
    edges = tuple(name for name, value, a, b in zip(BOUNDS, found.x, low, high, strict=True)
                  if min(value - a, b - value) < 1e-3)
    return Fit(law, 1 - float(np.mean(residual**2) / np.var(wanted)), float(np.sqrt(np.mean(residual**2))), edges)


def binned(batch: np.ndarray, loss: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Means of the values in BINS bins of equal tokens, over the updates that have a loss; empty bins are left out."""
    ends = np.cumsum(batch)
    place = np.minimum((BINS * (ends - batch / 2) / ends[-1]).astype(int), BINS - 1)[np.isfinite(loss)]
    count = np.bincount(place, minlength=BINS)
    return (np.bincount(place, values[np.isfinite(loss)], BINS)[count > 0]) / count[count > 0]
