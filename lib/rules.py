"""Optimizer hyperparameters under a change of tokens per step.

`ratio` is the new tokens per step over the base one. Sources: square-root rule for Adam, Malladi et al. 2022
(arXiv 2205.10287); constant half-life, Marek et al. 2025 (arXiv 2507.07101).
"""

from dataclasses import dataclass
from math import log, sqrt

from lib.check import require

SCALING_RULES = ("none", "linear", "sqrt-lr", "sde", "sde-power", "half-life", "half-life-both")
WD_RULES = ("none", "per-token")


@dataclass(frozen=True)
class Hyperparameters:
    """What AdamW takes in one stage; `lr_multiplier` multiplies the base learning-rate curve."""

    lr_multiplier: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def lr_multiplier(rule: str, ratio: float) -> float:
    """What the rule multiplies the learning rate by."""
    return {"linear": ratio, "sqrt-lr": sqrt(ratio), "sde": sqrt(ratio), "sde-power": sqrt(ratio)}.get(rule, 1.0)


def scaled_lr(rule: str, lr: float, ratio: float) -> float:
    """The learning rate for `ratio` times the tokens per step, to six digits, so that equal rates are equal numbers."""
    return float(f"{lr * lr_multiplier(rule, ratio):.6g}")


def rescale(rule: str, ratio: float, base: Hyperparameters, wd_rule: str = "none") -> Hyperparameters:
    """Hyperparameters for `ratio` times the base tokens per step.

    `wd_rule="per-token"` keeps lr · weight decay / T, the decay per token, constant; "none" leaves weight decay alone.
    Raises BadInput for an unknown rule, or where the linear form of the rule would make a beta negative.
    """
    require(rule in SCALING_RULES, "scaling_rule", rule, f"must be one of {', '.join(SCALING_RULES)}")
    require(wd_rule in WD_RULES, "wd_rule", wd_rule, f"must be one of {', '.join(WD_RULES)}")
    factor, beta1, beta2, eps = lr_multiplier(rule, ratio), base.beta1, base.beta2, base.eps
    if rule == "sde":
        smallest = min(beta1, beta2)
        require(ratio * (1 - smallest) < 1, "scaling_rule", rule,
                f"needs ratio · (1 − beta) < 1, but tokens per step change by {ratio:g} and beta is {smallest:g}; "
                "sde-power has no such bound")
        beta1, beta2 = 1 - ratio * (1 - beta1), 1 - ratio * (1 - beta2)
    if rule in ("sde-power", "half-life", "half-life-both"):
        beta2 = beta2**ratio
    if rule in ("sde-power", "half-life-both"):
        beta1 = beta1**ratio
    if rule in ("sde", "sde-power"):
        eps /= sqrt(ratio)
    weight_decay = base.weight_decay
    if wd_rule == "per-token":
        weight_decay *= ratio / factor
    return Hyperparameters(base.lr_multiplier * factor, beta1, beta2, eps, weight_decay)


def half_life(tokens_per_step: float, beta: float) -> float:
    """Tokens after which an exponential average with `beta` has forgotten half: T ln 2 / ln(1/beta)."""
    return tokens_per_step * log(2) / log(1 / beta)
