"""A run that begins where another one stood: what it takes over, and what of the stream it has seen by then."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lib.check import require
from lib.config import RunConfig, under_root
from lib.runs import OUTCOMES, Run

SAME = ("hidden_size", "layers", "heads", "mlp_size", "rope_theta", "seq_len")  # of a parent and its branch


@dataclass(frozen=True)
class Branch:
    """The parent run, the tokens at which to leave it, and how.

    `reads_on` says that the branch goes on in the parent's order where that stood; otherwise it reads an order of its
    own from the beginning.
    """

    parent: Run
    tokens: int
    weights_only: bool
    reads_on: bool

    @property
    def facts(self) -> dict:
        """What names the branch: the parent's name, whose hash stands for all that decided it."""
        return {"parent": self.parent.name, "reads_on": self.reads_on}


def find(config: RunConfig) -> Branch | None:
    """The branch that this configuration asks for; None where it asks for none.

    Raises BadInput for a parent that is no run, of another model, or did not come as far as `branch_at`.
    """
    if not config.branch_from:
        return None
    path = under_root(config.branch_from, "branch_from")
    named = under_root(config.runs) / config.branch_from
    parent = Run(named if named.is_dir() else path)
    require((parent.path / "config.json").is_file(), "branch_from", config.branch_from,
            "must be the folder of a run, or its name in runs")
    for name in SAME:
        of_parent = getattr(parent.config, name)
        require(getattr(config, name) == of_parent, name, getattr(config, name), f"must be the parent's, {of_parent}")
    tokens, meta = config.branch_at, parent.meta or {}
    reached = meta.get("tokens", 0)
    if tokens == 0:
        require(meta.get("status") in OUTCOMES, "branch_from", config.branch_from,
                "has not ended; train it on, or name a branch_at")
        tokens = reached
    require(meta.get("status") not in OUTCOMES or tokens <= reached, "branch_at", tokens,
            f"must not be past the {reached:,} tokens of the parent")
    require(config.branch_weights_only or config.token_budget is None or tokens < config.token_budget, "branch_at",
            tokens, f"must leave something of token_budget {config.token_budget}")
    seed = data_seed(parent)
    same_order = config.data_seed is None or (config.data_seed == seed and not config.branch_weights_only)
    return Branch(parent, tokens, config.branch_weights_only, same_order)


def data_seed(run: Run) -> int:
    """The seed of the order it reads: set, or its parent's, or that of its weights."""
    config = run.config
    if config.data_seed is not None:
        return config.data_seed
    left = find(config)
    return data_seed(left.parent) if left else config.seed


def taken_over(branch: Branch, tokens: int, stream: dict, before: dict | None, mine: dict) -> dict:
    """What run_meta.json says of the parent.

    `stream` is what the parent says it read up to these tokens, `before` what it says of its own parent, and `mine`
    what the branch is about to read. `reread` lists spans of the branch's tokens that ancestors have read in this
    order; `seen` counts what they have read of the stream at all, which another order meets again by chance.
    """
    reads = [*(before or {}).get("reads", []), stream]
    shift = (0 if branch.weights_only else tokens) - mine["range"][0]
    spans = [(max(read["range"][0], mine["range"][0]) + shift, read["range"][1] + shift) for read in reads
             if order(read) == order(mine) and read["range"][1] > mine["range"][0]]
    if not branch.weights_only:  # what the rows taken over have read again
        spans += (before or {}).get("reread", [])
    seen = sum(read["range"][1] - read["range"][0] for read in reads if read["sha256"] == mine["sha256"])
    return {"run": branch.parent.name, "tokens": tokens, "weights_only": branch.weights_only, "reads": reads,
            "reread": merged(spans), "seen": seen}


def merged(spans: Iterable[Sequence[int]]) -> list[list[int]]:
    """The same spans in order, where they touch or overlap as one."""
    result = []
    for first, last in sorted(map(tuple, spans)):
        if result and first <= result[-1][1]:
            result[-1][1] = max(last, result[-1][1])
        else:
            result.append([first, last])
    return result


def order(read: dict) -> tuple[str, int]:
    """Which order of which stream was read."""
    return read["sha256"], read["shuffle"]["data_seed"]


def past_folder(branch: Branch) -> Path:
    """Where a past that the parent has not kept is trained again: a folder for each place to leave it at."""
    return branch.parent.path.parent / "pasts" / str(branch.tokens)
