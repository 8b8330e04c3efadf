"""Where an update's time goes: what each kind of operation takes, and what it would at this machine's limits.

The limits are those of the roofline (Williams et al. 2009): an operation needs at least its FLOPs at the peak of a
matrix product, and its bytes at the pace of a copy, whichever takes longer.
"""

import time
from collections.abc import Callable

import pandas as pd
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

KINDS = {  # by what the operation's name begins with
    "matrix products": ("mm", "addmm", "bmm", "baddbmm"),
    "attention": ("_scaled_dot_product",),
    "loss on the logits": ("_log_softmax", "_softmax", "gather", "scatter", "exp", "nll_loss"),
    "layer norms": ("native_layer_norm",),
    "activation function": ("gelu",),
    "optimizer and norms": ("_fused_adam", "_foreach", "linalg_vector_norm"),
}
REST = "elementwise and copies"
# Of torch's own kernel for CPUs, which its registry lacks.
ATTENTION = {
    "_scaled_dot_product_flash_attention_for_cpu":
        lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
    "_scaled_dot_product_flash_attention_for_cpu_backward":
        lambda out, q, k, v, *_, **__: sdpa_backward_flop_count(out.shape, q.shape, k.shape, v.shape),
}


class Ledger(TorchDispatchMode):
    """Notes each operation that runs below autograd: its kind, seconds, FLOPs and bytes read and written."""

    def __init__(self, synchronize: Callable[[], None]):
        super().__init__()
        self.synchronize, self.rows = synchronize, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        self.synchronize()
        seconds = time.perf_counter() - begin
        if not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            name = func.overloadpacket.__name__
            count = flop_registry.get(func.overloadpacket) or ATTENTION.get(name)
            flops = count(*args, **(kwargs or {}), out_val=out) if count else 0
            self.rows.append((kind_of(name), seconds, flops, sum(tensor.nbytes for tensor in tensors)))
        return out


def kind_of(operation: str) -> str:
    """The kind of an operation of this name."""
    return next((kind for kind, begins in KINDS.items() if operation.startswith(begins)), REST)


def account(work: Callable[[], object], flops: float, bandwidth: float,
            synchronize: Callable[[], None] = lambda: None) -> pd.DataFrame:
    """What `work` spends on each kind of operation, the longest first: calls, seconds, flops, bytes, limit.

    `limit` is the least time in seconds at `flops` FLOP/s and `bandwidth` bytes/s, summed over operations. `work` must
    run eagerly. Attention's FLOPs are counted as if nothing were masked.
    """
    with Ledger(synchronize) as ledger:
        work()
    rows = pd.DataFrame(ledger.rows, columns=["kind", "seconds", "flops", "bytes"])
    rows["limit"] = pd.concat([rows["flops"] / flops, rows["bytes"] / bandwidth], axis=1).max(axis=1)
    sums = rows.groupby("kind").sum().assign(calls=rows.groupby("kind").size())
    return sums.sort_values("seconds", ascending=False)[["calls", "seconds", "flops", "bytes", "limit"]]
