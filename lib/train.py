"""The training loop: one configuration in, one run directory out.

The loop follows a plan of updates and knows nothing of arms. One warm-up update comes before the clock starts;
validation and checkpoints are outside it; stages change, and a run stops or is continued, between updates.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from logging import Logger, NullHandler, getLogger
from math import inf, isfinite
from pathlib import Path

import torch

from lib import board, branch, checkpoint
from lib.begin import Start, Task, check, counts, has_read, load, opening, start
from lib.check import require
from lib.clock import Clock, Costs
from lib.config import RunConfig, command, read_arguments
from lib.interrupt import FILE, Interrupt
from lib.machine import environment, no_garbage_collection, peak_memory, pick_device
from lib.noise import estimate
from lib.plan import Plan
from lib.ranks import Ranks
from lib.runs import Run, unwritten
from lib.state import State, metadata
from lib.step import Learner, calibrate, out_of_memory
from lib.stream import PackedStream

PROGRESS_SECONDS = 15  # between two lines of a long run
ALONE = threading.RLock()  # one run at a time in a process: they would share its generators, threads and log
SMALLEST_SCALE = 2.0**-10  # of fp16's loss: below it the gradient itself is not finite


def resolve(config: RunConfig, costs: Costs | None = None) -> Task:
    """What this configuration means here: its run, ended or not. `costs` stand for a calibration of this machine.

    Raises BadInput where it does not fit the stream, the device or the parent. Writes no run.
    """
    board.check(config.tensorboard)
    left = branch.find(config)
    seed = config.seed if left is None else branch.data_seed(left.parent)
    asked = replace(config, device=str(pick_device(config.device)))
    config = replace(asked, data_seed=seed if config.data_seed is None else config.data_seed)
    stream = PackedStream(config.stream, config.seq_len, config.data_seed, config.epochs)
    first = config.resolved()[0].tokens_per_step
    require(first <= stream.tokens, "stream", config.stream,
            f"holds {stream.tokens:,} training tokens, but the first update takes {first:,}")
    held_out = stream.meta["validation_tokens"]
    require((config.validation_tokens or 0) <= held_out, "validation_tokens", config.validation_tokens,
            f"must not exceed the {held_out:,} of the stream; null takes them all")
    if config.clock == "measured":
        costs = None
    elif costs is None:
        try:
            costs = calibrate(config, stream.vocab_size)
        except Exception as error:
            if not out_of_memory(error):  # which the run comes to, too
                raise
    facts = {"stream": stream.sha256, "costs": costs and asdict(costs)} | (left.facts if left else {})
    task = Task(asked, config, stream, costs, left, Run.of(config, facts))
    if left and not task.run.ended and not checkpoint.written(task.run):
        check(task)
    return task


def train(config: RunConfig, progress: Callable[[str], object] = print, *, keep: Iterable[int] = (),
          until: int | None = None, past: tuple[Run, int] | None = None, costs: Costs | None = None) -> Run:
    """Train one run, continue it where it was interrupted, or return it where it has ended before.

    `progress` takes the lines for the console. `keep` names tokens at which to keep a checkpoint for branches, and
    `until` tokens after which to stop, with one. `past` is a run that does the same as this one up to so many tokens,
    from whose checkpoint there it begins. `costs` stand for a calibration of this machine.

    Under torchrun, every process calls this. Raises BadInput, before anything is written, where the configuration does
    not fit, or the checkpoints are damaged; Unwritten where the disk takes no more; KeyboardInterrupt, after a
    checkpoint, where it was interrupted, or a file `stop` was put into the run's directory: so a sweep ends, too.
    """
    ranks = Ranks.join()
    for stage in config.resolved():
        ranks.check(stage.tokens_per_step, config.device_token_capacity)
    with ALONE, unwritten(config.runs):
        if config.clock == "modelled" and ranks.size > 1:
            costs = ranks.share(lambda: resolve(config, costs).costs)
        task = resolve(config, costs)
    run, say = task.run, progress if ranks.first else lambda line: None
    with (ALONE, unwritten(run), run.hold(say) if ranks.first else nullcontext(),
          Interrupt(run.path / FILE if ranks.first else None) as stop, torch.random.fork_rng()):
        torch.manual_seed(config.seed)  # for models that draw while they train; this one does not
        if ranks.share(lambda: run.ended):
            say(f"{run}: ended before, reused")
        else:
            ranks.share(lambda: run.check(task.asked))
            begin = ranks.share(lambda: start(task, past, say))
            if begin.kind == "repeat":
                begin = repeat(task, ranks, say)
            attempt(task, ranks, begin, stop, say, frozenset(keep), until)
    if stop.asked:
        raise KeyboardInterrupt(f"{run}: a stop was asked for; asked for again, it goes on from there")
    return run


def repeat(task: Task, ranks: Ranks, say: Callable[[str], object]) -> Start:
    """Train the parent's past again, in a folder beside it, from what there is of it, as far as the branch needs it."""
    parent, tokens = task.branch.parent, task.branch.tokens
    say(f"{parent}: keeps no checkpoint at {tokens:,} tokens; that past is trained again, beside it")
    config, grand, folder = parent.config, branch.find(parent.config), branch.past_folder(task.branch)
    config = replace(config, stream=task.config.stream, runs=str(folder), tensorboard=False,
                     branch_from=str(grand.parent.path) if grand else "")
    costs = (parent.meta or {}).get("modelled_costs")
    there = [(run, checkpoint.tokens_of(path)) for run in [parent, *map(Run, folder.parent.glob(f"*/{parent.name}"))]
             for path in checkpoint.written(run) if checkpoint.tokens_of(path) <= tokens]
    past = max(there, key=lambda place: place[1], default=None)
    again = train(config, say, keep=[tokens], until=tokens, past=past, costs=costs and Costs(**costs))

    def find() -> Path:
        found = checkpoint.kept_at(again, tokens)
        require(found is not None, "branch_at", tokens, f"is not reached by {parent}")
        logged = [row for row in parent.metrics().to_dict("records") if row["step"] == found.last["step"]]
        if logged and logged[0]["loss"] != found.last["loss"]:
            say("what was trained again differs from the parent, as it does with other threads or another device")
        return found.path

    return Start("branch", ranks.share(find))


def attempt(task: Task, ranks: Ranks, begin: Start, stop: Interrupt, say: Callable[[str], object],
            keep: frozenset[int], until: int | None) -> None:
    """Train from where it begins to an outcome, and record that."""
    config, stream, run = task.config, task.stream, task.run
    found = begin.path and checkpoint.read(begin.path)
    whole = found is not None and not (begin.kind == "branch" and task.branch.weights_only)
    state, clock, learner = counts(task, begin.kind, found), Clock(task.costs), None
    if whole:
        clock.set(found.facts["clock"])
    if ranks.first:
        run.open(task.asked, found.rows if whole else b"")
        if config.tensorboard:
            run.board.open(run.path / "tensorboard", run.rows(), state.validation)
        for path in begin.damaged:  # out of the way of the last two
            path.rename(path.with_suffix(".damaged"))
    status, results = "failed", {}
    with run.log(say) if ranks.first else nullcontext(silent()) as log:
        try:
            if config.clock == "modelled" and task.costs is None:
                raise MemoryError("the machine could not be calibrated")
            learner = Learner(config, stream.vocab_size, ranks)
            load(task, begin.kind, found, learner)
            state.attempts.append({"started": datetime.now(UTC).isoformat(timespec="seconds"), "after": state.steps,
                                   "processes": ranks.size})
            log.info(opening(task, begin.kind, state))
            try:
                with no_garbage_collection() if config.skip_gc else nullcontext():
                    status = loop(task, ranks, learner, state, clock, stop, keep, until, log)
            finally:
                clock.stop()
            if status == "interrupted":
                return
            if status == "diverged":
                results["diverged_at"] = state.steps + 1
            elif not learner.sound():
                status, results["diverged_at"] = "diverged", state.steps
                log.info("diverged: the last update broke the weights")
            elif not config.skip_validation:
                loss, bits = learner.evaluate(stream, config.validation_tokens)
                if isfinite(loss):
                    results |= {"validation_loss": loss, "validation_bits_per_byte": bits}
                else:
                    status, results["diverged_at"] = "diverged", state.steps
                log.info(f"validation loss {loss:.4f}, {bits:.4f} bits a byte, "
                         f"after {state.tokens:,} tokens in {state.steps:,} updates and {clock.measured:.0f} s")
            if ranks.first:
                results["sha256"] = run.save_model(learner.model, stream.folder / "tokenizer.json")
        except Exception as error:
            state.leave("failed")
            results["error"] = f"{type(error).__name__}: {error}"
            if not out_of_memory(error):
                status = "failed"
                raise
            status, results["device_token_capacity"] = "out_of_memory", config.device_token_capacity
            state.leave("out of memory")
            log.info(f"out of memory with device_token_capacity {config.device_token_capacity:,}")
            if ranks.size > 1:  # the others wait for this one, until torchrun ends them
                raise
        except KeyboardInterrupt:
            status = "interrupted"
            state.leave(status)
            raise
        finally:
            if ranks.first:
                model = learner and learner.model
                run.close(metadata(config, state, clock, model and model.flops_per_token) | {
                    "status": status,
                    "started": state.attempts[0]["started"] if state.attempts else None,
                    "parameters": model and model.parameter_count,
                    "compilation": learner and learner.compilation(),
                    "peak_memory_bytes": peak_memory(torch.device(config.device)),
                    "stream": has_read(task, state),
                    "environment": environment(torch.device(config.device)),
                } | results)


def loop(task: Task, ranks: Ranks, learner: Learner, state: State, clock: Clock, stop: Interrupt,
         keep: frozenset[int], until: int | None, log: Logger) -> str:
    """Update until the budget or the stream is used up, the loss is not finite, or a stop is asked for.

    Returns the run's status.
    """
    config, stream, run, plan = task.config, task.stream, task.run, Plan(task.config, state.grown)
    said, saved = time.monotonic(), state.tokens

    def save(kept: bool = False) -> None:
        nonlocal saved
        readings = clock.readings
        with clock.pause():
            if saved != state.tokens and learner.sound() and ranks.first:
                checkpoint.write(run, learner, state, readings, has_read(task, state), kept)
            saved = state.tokens

    if state.steps:
        learner.warm_up(stream.read(0, config.device_token_capacity))
        learner.warmed()
        clock.start()
    while True:
        position = state.tokens if plan.by_tokens else clock.elapsed
        asked, position, clock.pace = ranks.agree(stop.look(), position, clock.pace)
        if asked:  # of any process; False is not to hide a signal that came meanwhile
            stop.asked = True
        if asked or state.tokens >= (until or inf):
            save()
            state.leave("interrupted")
            log.info(f"stopped after update {state.steps:,}; asked for again, the run goes on from there")
            return "interrupted"
        state.grown += plan.grow(position, state.noise_scale)
        update = plan.update(position, clock.expected)
        if update is None:
            state.leave("budget")
            return "finished"
        size, micro_batches = update.tokens, update.tokens // config.device_token_capacity
        if state.cursor + size > stream.tokens:
            state.leave("stream exhausted")
            log.info(f"the stream's {stream.tokens:,} training tokens are used up: the run ends before its budget")
            return "stream_exhausted"
        state.enter(update.stage, clock.elapsed)

        begin, share = time.perf_counter(), size // ranks.size
        rows, part = stream.read(state.cursor + ranks.rank * share, share), config.device_token_capacity
        if share == part and crossed(config.noise_every, state.steps + 1, 1):
            part = rows.size // smallest_divisor(len(rows))
        loss = learner.accumulate(rows, part)
        norm, loss = learner.clip().item(), loss.item()
        scale = learner.scaler.get_scale() if learner.scaler.is_enabled() else 0.0
        skipped = isfinite(loss) and not isfinite(norm) and scale > SMALLEST_SCALE
        if not (isfinite(loss) and (isfinite(norm) or skipped)):
            save()
            state.leave("diverged")
            log.info(f"diverged at update {state.steps + 1}: loss {loss:g}, gradient norm {norm:g}")
            return "diverged"
        learner.apply(update.lr, update.hyperparameters)
        learner.synchronize()
        seconds = time.perf_counter() - begin

        clock.update(micro_batches, seconds)
        clipped = norm > learner.grad_clip and not skipped
        state.lr = update.lr
        noise = (None, None)
        if learner.mean_square is not None and not skipped:
            noise = estimate(part, size, learner.mean_square.item(), norm**2)
        state.count(size, loss, noise, clipped, skipped, clock.elapsed, seconds)
        row = {"step": state.steps, "tokens": state.tokens, "elapsed": clock.elapsed, "stage": update.stage,
               "tokens_per_step": size, "lr": state.lr, "loss": loss, "grad_norm": None if skipped else norm,
               "clipped": clipped, "noise_g2": noise[0], "noise_s": noise[1], "tokens_per_second": size / seconds}
        if ranks.first:
            run.record(row)
        with clock.pause():
            run.board.add("train", row)
            if crossed(0 if config.skip_validation else config.eval_every, state.tokens, size):
                nats, bits = learner.evaluate(stream, config.validation_tokens)
                finite = isfinite(nats)
                state.validation.append({"step": state.steps, "tokens": state.tokens, "elapsed": clock.elapsed,
                                         "loss": nats if finite else None, "bits_per_byte": bits if finite else None})
                run.board.add("validation", state.validation[-1])
                log.debug(f"validation loss {nats:.4f} at {state.tokens:,} tokens")
            if time.monotonic() - said > PROGRESS_SECONDS and clock.measured:
                said = time.monotonic()
                log.info(progress_line(config, state, clock))
        if state.steps == 1:
            learner.warmed()
            clock.start()
        if any(state.tokens - size < tokens <= state.tokens for tokens in keep):
            save(kept=True)
        if crossed(config.checkpoint_every, state.tokens, size):
            save()


def smallest_divisor(number: int) -> int:
    """The smallest divisor past 1."""
    return next(n for n in range(2, number + 1) if number % n == 0)


def crossed(every: int, tokens: int, size: int) -> bool:
    """Whether the last update of `size` tokens reached another multiple of `every`; 0 is off."""
    return bool(every) and tokens // every > (tokens - size) // every


def progress_line(config: RunConfig, state: State, clock: Clock) -> str:
    """Share done, loss, speed and time left."""
    done = (state.tokens if config.token_budget else clock.elapsed) / config.budget
    rate = (state.tokens - state.warmup_tokens) / clock.measured
    left = clock.measured * (1 - done) / done if done else 0.0
    return (f"  {done:.0%} · {state.tokens / 1e6:.2f}M tokens · loss {state.updates[-1][1]:.3f} · "
            f"{rate:,.0f} tokens/s · {int(left) // 60}:{int(left) % 60:02d} left")


def silent() -> Logger:
    """The log of a process that is not the first."""
    logger = getLogger("run.silent")
    logger.addHandler(NullHandler())
    logger.propagate = False
    return logger


def main(arguments: Sequence[str]) -> None:
    """Train one arm; print its run directory last."""
    run, ranks = train(read_arguments(RunConfig, arguments)), Ranks.join()
    if ranks.first:
        print(run.path)
    ranks.leave()


if __name__ == "__main__":
    command(main)
