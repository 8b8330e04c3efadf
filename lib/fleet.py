"""Past one machine, by a model: what an update takes on N devices, and how long a schedule of T takes to a loss.

Data parallel: every device holds the model, and all gradients are averaged after each update, with no overlap. What is
not measured is of a data sheet or a paper, named beside it; a step of the model that no source has is marked assumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, cos, log2, pi

import numpy as np
import pandas as pd

from lib.check import require

TOKENS_A_PARAMETER = 20  # Hoffmann et al. 2022 (arXiv 2203.15556)
POWER = 0.468  # of the critical batch in the size, tokens in proportion: Zhang et al. 2024 (arXiv 2410.21676)
FITTED = (85e6, 1.2e9)  # parameters that fit was made with
Schedule = Callable[[float], float]  # from progress to T as a share of the final critical batch


@dataclass(frozen=True)
class Fleet:
    """Devices alike, in nodes. Seconds, bytes and FLOP/s."""

    flops: float = 989e12  # bf16, dense: NVIDIA H100 SXM data sheet
    utilisation: float = 0.4  # of them: 38 to 43 % in Llama 3 (arXiv 2407.21783)
    memory: float = 3.35e12  # bytes a second: H100 SXM data sheet
    node: int = 8  # devices that NVLink joins
    inside: float = 450e9  # bytes a second each way: H100 SXM data sheet
    between: float = 50e9  # the same, of a 400 Gb/s link a device: DGX H100 data sheet
    hop: float = 5e-6  # seconds a message takes to its neighbour; assumed, switches take 2 to 5 µs
    launch: float = 150e-6  # seconds a layer takes however few its tokens, forward and backward; assumed
    row: int = 1024  # tokens that are not split over devices
    micro_batch: int = 16_384  # tokens at once in a device

    def update_seconds(self, parameters: float, tokens: float, devices: int) -> float:
        """Seconds of one update of so many tokens: micro-batches, averaging of bf16 gradients (a ring's bytes, a tree's
        hops), and AdamW's passes over 28 bytes a parameter: four float32 read, three written."""
        require(devices >= 1, "devices", devices, "must be at least 1")
        rows = max(ceil(tokens / self.row), 1)
        busiest = ceil(rows / min(devices, rows)) * self.row
        layers = max((parameters / (12 * 128**2)) ** (1 / 3), 1)  # of 12 · layers · width², 128 wide a layer
        compute = busiest * 6 * parameters / (self.flops * self.utilisation)
        compute += ceil(busiest / self.micro_batch) * layers * self.launch
        bandwidth = self.inside if devices <= self.node else self.between
        average = 2 * (devices - 1) / devices * 2 * parameters / bandwidth + 2 * log2(devices) * self.hop
        return compute + average + 28 * parameters / self.memory


def critical_batch(parameters: float) -> float:
    """Tokens: 93.2 · N^0.468 sequences of 512, N in millions (Zhang et al.); an extrapolation outside FITTED."""
    return 93.2 * (parameters / 1e6) ** POWER * 512


def time_to_loss(fleet: Fleet, parameters: float, devices: int, schedule: Schedule, scale: float = 1.0,
                 trade: bool = True, grid: int = 60) -> tuple[float, float, float]:
    """Seconds, updates and tokens to the loss that 20 tokens a parameter reach at a small T; T is `scale` · schedule.

    With `trade`, a T of x critical batches takes 1 + x times the tokens (McCandlish et al., arXiv 1812.06162, eq. 5.1),
    and the critical batch grows along the run with the tokens as it does over sizes; assumed. Without, the loss after
    the same tokens is the same whatever T, as is claimed of schedules below the critical batch.
    """
    final, least = critical_batch(parameters), TOKENS_A_PARAMETER * parameters
    seconds = updates = tokens = 0.0
    for progress in (np.arange(grid) + 0.5) / grid:
        critical = final * progress**POWER
        size = max(round(scale * schedule(progress) * final / fleet.row), 1) * fleet.row
        taken = least / grid * (1 + trade * size / critical)
        tokens, updates = tokens + taken, updates + taken / size
        seconds += taken / size * fleet.update_seconds(parameters, size, devices)
    return seconds, updates, tokens


def flat(share: float) -> Schedule:
    """A constant T."""
    return lambda progress: share


def seesaw(smallest: float) -> Schedule:
    """T doubles where a cosine has fallen by another half, from this share up to the whole."""
    return lambda progress: min(smallest * 2 ** int(-log2((1 + cos(pi * progress)) / 2)), 1.0)


SHAPES: Mapping[str, Schedule] = {  # shares of the final critical batch
    "dividers 12,4,1": lambda progress: (1 / 12, 1 / 4, 1.0)[int(3 * progress)],
    "seesaw by 2": seesaw(1 / 8),
    "switch at 0.75": lambda progress: 1 / 8 if progress < 0.75 else 1.0,
    "adaptive, as the critical batch": lambda progress: progress**POWER,
    "adaptive, as its square root": lambda progress: progress ** (POWER / 2),
}
SCALES = tuple(2.0 ** (power / 2) for power in range(-16, 17))  # tried for every shape: each stands at its best


def compare_times(fleet: Fleet, sizes: Sequence[float], devices: Sequence[int]) -> pd.DataFrame:
    """A row a size, number of devices and shape of T: what a growing T saves, as shares of the time.

    `from_start` is held against the constant T that the shape begins with, at equal tokens. `at_best` is held against
    the best constant T for so many devices, the shape at its own best scale, both paying for T in tokens. Where a token
    takes c seconds and an update a more, (1 + T/B)(a/T + c) is least at T = √(a·B/c): as the root of the critical one.
    """
    rows = []
    for parameters in sizes:
        for count in devices:
            best = min(time_to_loss(fleet, parameters, count, flat(1.0), scale)[0] for scale in SCALES)
            for arm, shape in SHAPES.items():
                start = time_to_loss(fleet, parameters, count, flat(shape(0.5 / 60)), trade=False)[0]
                as_claimed = time_to_loss(fleet, parameters, count, shape, trade=False)[0]
                own = min(time_to_loss(fleet, parameters, count, shape, scale)[0] for scale in SCALES)
                rows.append({"parameters": parameters, "devices": count, "arm": arm, "hours": own / 3600,
                             "from_start": 1 - as_claimed / start, "at_best": 1 - own / best})
    return pd.DataFrame(rows)
