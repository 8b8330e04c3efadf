"""Many runs: what has ended is reused, a past in common is trained once, and an executor takes the rest."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path

import torch
from IPython import get_ipython
from IPython.display import display

from lib.check import BadInput, require
from lib.checkpoint import tokens_of, written
from lib.clock import Costs
from lib.config import RunConfig, under_root
from lib.plan import common_past, updates
from lib.runs import Run, make_folder, read_json, unwritten, write_json
from lib.train import resolve, train

UPDATE_SECONDS = 10  # between two updates of the line
WORTH = 0.05  # of a run: a shorter past in common costs more, in checkpoints and waiting, than it saves


@dataclass
class Node:
    """A run of a sweep: what it shares with an earlier one, and where it is to keep checkpoints for later ones."""

    config: RunConfig  # as asked for
    resolved: RunConfig
    costs: Costs | None
    run: Run
    ended: bool
    tokens: int = 0  # of the whole run; 0 where a measured clock decides
    parent: "Node | None" = None
    shared: int = 0  # tokens taken over from the parent
    done: int = 0  # tokens up to its own last checkpoint, or its parent's
    keep: set[int] = field(default_factory=set)

    @property
    def to_train(self) -> int:
        """Tokens, as planned."""
        return 0 if self.ended else max(self.tokens - max(self.shared, self.done), 0)

    @property
    def past(self) -> tuple[Run, int] | None:
        return self.parent and (self.parent.run, self.shared)


def plan(configs: Iterable[RunConfig]) -> list[Node]:
    """Each run once, in order, with the earlier run that shares the longest past with it.

    The past is trained with the earlier run, which keeps a checkpoint where the two part. Runs with common pasts form a
    tree, so any order of them trains the same number of tokens.
    """
    nodes = {}
    for config in configs:
        task = resolve(config)
        if task.run.path in nodes:
            continue
        node = nodes[task.run.path] = Node(config, task.config, task.costs, task.run, task.run.ended)
        if node.ended:
            continue
        node.tokens = sum(update.tokens for update in updates(node.resolved, node.costs))
        taken_over = [task.branch.tokens] if task.branch and not task.branch.weights_only else []
        node.done = max([*map(tokens_of, written(node.run)), *taken_over], default=0)
        for other in [*nodes.values()][:-1]:
            shared = common_past(node.resolved, other.resolved, node.costs)
            if other.ended or shared <= max(other.done, other.shared):  # what it kept is all there is
                kept = [path for path in written(other.run) if other.ended or path.parent.name == "kept"]
                shared = max((tokens for tokens in map(tokens_of, kept) if tokens <= shared), default=0)
            if shared > max(node.shared, WORTH * node.tokens):
                node.parent, node.shared = other, shared
        if node.parent and not node.parent.ended:
            node.parent.keep.add(node.shared)
    return [*nodes.values()]


def picture(nodes: list[Node]) -> str:
    """The plan in words: what there is to train and what is saved; common pasts as trees."""
    todo = [node for node in nodes if not node.ended]
    if not todo:
        return f"{len(nodes)} runs, all of them reused"
    saved = sum(min(node.shared, node.tokens) for node in todo)
    lines = [f"{len(nodes)} runs, {len(nodes) - len(todo)} of them reused; "
             f"{sum(node.to_train for node in todo):,} tokens to train, {saved:,} saved by common pasts"]
    if timed := sum(not node.tokens for node in todo):
        lines[0] += f"; and {timed} on the measured clock"

    def draw(node: Node, before: str, last: bool, first: bool = False) -> None:
        name = f"{node.config.arm} · lr {node.config.lr:g} · seed {node.config.seed}"
        size = "ended before" if node.ended else f"{node.to_train:,} tokens"
        at = "" if first else f"at {node.shared:,}: "
        lines.append(f"{before}{'' if first else '└─ ' if last else '├─ '}{at}{name} · {size}")
        children = [other for other in nodes if other.parent is node]
        for child in children:
            draw(child, before + ("" if first else "   " if last else "│  "), child is children[-1])

    for node in nodes:
        if node.parent is None and any(other.parent is node for other in nodes):
            draw(node, "", True, first=True)
    return "\n".join(lines)


def sweep(configs: Iterable[RunConfig], title: str, executor: str | Executor = "serial", keep: Iterable[int] = ()
          ) -> list[Run]:
    """Train each configuration once; returns their runs in order. A bad outcome of a run does not stop the sweep.

    `executor` is serial (in this process, one after another), processes:N, dask:ADDRESS (of its scheduler), or any
    concurrent.futures.Executor. `keep` names tokens at which each run keeps a checkpoint, for branches. The names of
    the runs are written to sweeps/TITLE.json beside them, so that an analysis knows which belong together. Raises
    BadInput for a configuration or an executor that cannot work; KeyboardInterrupt where one of its runs is stopped.
    """
    configs = list(configs)
    record = sweep_record(configs[0].runs, title)
    with workers(executor) as (pool, slots), unwritten(record.parent):
        nodes, keep = plan(configs), {*keep}
        todo, begin = [node for node in nodes if not node.ended], time.monotonic()
        print(f"{title}: {picture(nodes)}")
        show, said = updating_line(), begin

        def report(message: str) -> None:
            nonlocal said
            now, trained = time.monotonic(), sum(node.ended for node in todo)
            if now - said > UPDATE_SECONDS:
                said = now
                left = (now - begin) / trained * (len(todo) - trained) / 60 if trained else None
                about = f", about {left:.0f} min left" if left is not None else ""
                show(f"{title}: {len(nodes) - len(todo) + trained} of {len(nodes)} done{about} · {message.strip()}")

        if pool is None:
            for node in todo:
                train(node.config, report, keep=node.keep | keep, past=node.past, costs=node.costs)
                node.ended = True
        else:
            hand_out(todo, pool, slots, keep, report)
        make_folder(record.parent)
        write_json(record, [node.run.name for node in nodes])
    minutes = (time.monotonic() - begin) / 60
    show(f"{title}: {len(nodes)} done, {len(todo)} trained now in {minutes:.1f} min, the others reused")
    return [node.run for node in nodes]


def hand_out(todo: list[Node], pool: Executor, slots: int, keep: set[int], report: Callable[[str], None]) -> None:
    """Train these runs in the pool; one that takes over a past waits for the run that has it.

    Raises what a run raised, and starts no other then; BrokenExecutor where a process died.
    """
    given: dict[Future, Node] = {}
    ready = [node for node in todo if node.parent not in todo]
    # What a pool of processes takes in advance it begins even after it was told to stop.
    room = slots if slots and isinstance(pool, ProcessPoolExecutor) else len(todo)
    try:
        while ready or given:
            while ready and len(given) < room:
                node = ready.pop(0)
                past = node.past and (str(node.past[0].path), node.past[1])
                given[pool.submit(work, node.config, node.costs, node.keep | keep, past, slots)] = node
            done, _ = wait(given, return_when=FIRST_COMPLETED)
            for future in done:
                node = given.pop(future)
                if not future.result():
                    raise KeyboardInterrupt(f"{node.run}: a stop was asked for; the same sweep goes on from there")
                node.ended = True
                ready += [other for other in todo if other.parent is node]
                report(f"{node.run.name} done")
    except BrokenExecutor:
        raise BrokenExecutor("a worker died in the middle of a run; asked for again, the sweep goes on") from None
    finally:
        for future in given:
            future.cancel()


def work(config: RunConfig, costs: Costs | None, keep: set[int], past: tuple[str, int] | None, slots: int) -> bool:
    """Train one run in a process that shares its machine with so many, 0 if unknown; False where it was stopped."""
    if slots:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        torch.set_num_threads(max(1, cores // slots))
    donor = past and (Run(Path(past[0])), past[1])
    try:
        train(config, lambda line: None, keep=keep, past=donor, costs=costs)
    except KeyboardInterrupt:  # a worker of Dask would end with it, and another one go on with the run
        return False
    return True


@contextmanager
def workers(executor: str | Executor) -> Iterator[tuple[Executor | None, int]]:
    """The pool that this parameter names, None for this process, and how many runs share a machine there."""
    if isinstance(executor, Executor):
        yield executor, 0
        return
    kind, _, where = executor.partition(":")
    if executor == "serial":
        yield None, 1
    elif kind == "processes" and where.isascii() and where.isdigit() and int(where) > 0:
        others = active_children()
        # A session of their own: Ctrl-C reaches this process alone, which then asks each of them to stop.
        with ProcessPoolExecutor(int(where), get_context("spawn"), os.setsid) as pool:
            try:
                yield pool, int(where)
            except BaseException:
                for process in active_children():  # each stops at its next update, with a checkpoint
                    if process not in others:
                        process.terminate()
                raise
    elif kind == "dask" and where:
        try:
            from distributed import Client
        except ImportError:
            raise BadInput(f"executor = {executor!r}: needs Dask; install it with pip install -e '.[dask]'") from None
        try:
            client = Client(where, timeout=10)
        except Exception as error:  # whatever it is (an AssertionError of its loop was seen), there is no client
            raise BadInput(f"executor = {executor!r}: must be the address of a Dask scheduler ({error!r})") from error
        with client:
            processes = Counter()
            for worker in client.scheduler_info(n_workers=-1)["workers"].values():
                processes[worker["host"]] += 1  # one run at a time in each
            require(bool(processes), "executor", executor, "must have a worker")
            yield client.get_executor(), max(processes.values())
    else:
        raise BadInput(f"executor = {executor!r}: must be serial, processes:N or dask:ADDRESS")


def sweep_record(runs: str, title: str) -> Path:
    """The file that names the runs of a sweep."""
    require(title == Path(title).name, "title", title, "must be a file's name")
    return under_root(runs) / "sweeps" / f"{title}.json"


def swept(runs: str, *titles: str) -> list[str]:
    """The names of the runs of these sweeps. Raises BadInput for a sweep that has not been made."""
    names = []
    for title in titles:
        found = read_json(sweep_record(runs, title))
        require(found is not None, "runs", runs, f"holds no sweep {title!r}; execute the notebook that makes it first")
        names += found
    return names


def sweeps(runs: str) -> dict[str, list[str]]:
    """The names of the runs of each sweep made in this folder, by its title."""
    records = sorted(sweep_record(runs, "any").parent.glob("*.json"))
    return {record.stem: names for record in records if isinstance(names := read_json(record), list)}


def updating_line() -> Callable[[str], object]:
    """A function that shows a line: in a notebook in place of the one before, elsewhere below it."""
    if get_ipython() is None:
        return print
    handle = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: handle.update({"text/plain": text}, raw=True)
