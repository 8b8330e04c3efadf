"""The training loop: one configuration in, one run directory out.

The loop follows the stages of a schedule and knows nothing of arms. Rules of a run: a token budget is never overshot; a
time budget ends with the first update completed at or after the deadline; one warm-up update comes before the clock
starts; validation is outside it; stages change between updates.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from logging import Logger
from math import isfinite

from lib.check import require
from lib.clock import Clock
from lib.config import RunConfig, command, read_arguments
from lib.machine import environment, pick_device
from lib.runs import Run
from lib.schedule import stage_at
from lib.state import State, metadata
from lib.step import Learner, calibrate
from lib.stream import PackedStream

PROGRESS_SECONDS = 15  # between two lines of a long run


def train(config: RunConfig, progress: Callable[[str], None] = print) -> Run:
    """Train one run, or return it where it has ended before. `progress` takes the lines for the console.

    Raises BadInput, before anything is written, where the configuration does not fit the stream or the device.
    """
    config = replace(config, data_seed=config.seed if config.data_seed is None else config.data_seed,
                     device=str(pick_device(config.device)))
    stream = PackedStream(config.stream, config.seq_len, config.data_seed, config.epochs)
    first = config.stages()[0].tokens_per_step
    require(first <= stream.tokens, "stream", config.stream,
            f"holds {stream.tokens:,} training tokens, but the first update takes {first:,}")
    held_out = stream.meta["validation_tokens"]
    require((config.validation_tokens or 0) <= held_out, "validation_tokens", config.validation_tokens,
            f"must not exceed the {held_out:,} of the stream; null takes them all")
    costs = calibrate(config, stream.vocab_size) if config.clock == "modelled" else None
    run = Run.of(config, {"stream": stream.sha256, "costs": costs and asdict(costs)})
    if run.ended:
        progress(f"{run}: ended before, reused")
        return run

    learner = Learner(config, stream.vocab_size)
    state, clock = State(), Clock(costs)
    status, results = "failed", {"started": datetime.now(UTC).isoformat(timespec="seconds")}
    run.create(config)
    with run.log(progress) as log:
        budget = f"{config.budget:,} tokens" if config.token_budget else f"{config.budget:g} s, {config.clock} clock"
        log.info(f"{config.arm} · lr {config.lr:g} · seed {config.seed} · {budget} · {run}")
        try:
            try:
                status = loop(config, stream, learner, run, state, clock, log)
            finally:
                clock.stop()
            if status != "diverged" and not config.skip_validation:
                loss, bits = learner.evaluate(stream, config.validation_tokens)
                if isfinite(loss):
                    results |= {"validation_loss": loss, "validation_bits_per_byte": bits}
                else:  # the last update broke the weights
                    status = "diverged"
                log.info(f"validation loss {loss:.4f}, {bits:.4f} bits a byte, "
                         f"after {state.tokens:,} tokens in {state.steps:,} updates and {clock.measured:.0f} s")
            results["sha256"] = run.save_model(learner.model, stream.folder / "tokenizer.json")
        except KeyboardInterrupt:
            status = "interrupted"
            state.leave(status)
            raise
        except Exception as error:
            state.leave(status)
            results["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            model = learner.model
            run.close(metadata(config, state, clock, model.flops_per_token) | {
                "status": status,
                "parameters": model.parameter_count,
                "stream": {"sha256": stream.sha256, "range": [0, state.tokens],
                           "shuffle": {"data_seed": config.data_seed, "epochs": config.epochs}},
                "environment": environment(learner.device),
            } | results)
    return run


def loop(config: RunConfig, stream: PackedStream, learner: Learner, run: Run, state: State, clock: Clock,
         log: Logger) -> str:
    """Update until the budget or the stream is used up, or the loss is not finite; returns the run's status."""
    stages, by_tokens = config.stages(), config.token_budget is not None
    said = time.monotonic()
    while True:
        position = state.tokens if by_tokens else clock.elapsed
        index = stage_at(stages, position / config.budget)
        size = stages[index].tokens_per_step
        if position + size > config.budget if by_tokens else position >= config.budget:
            state.leave("budget")
            return "finished"
        if state.tokens + size > stream.tokens:
            state.leave("stream exhausted")
            log.info(f"the stream's {stream.tokens:,} training tokens are used up: the run ends before its budget")
            return "stream_exhausted"
        state.enter(config, index, clock.elapsed)

        begin = time.perf_counter()
        loss = learner.accumulate(stream.read(state.tokens, size))
        norm, loss = learner.clip().item(), loss.item()
        if not (isfinite(loss) and isfinite(norm)):
            state.leave("diverged")
            log.info(f"diverged at update {state.steps + 1}: loss {loss:g}, gradient norm {norm:g}")
            return "diverged"
        # The rate is that of the update's end, for every T alike, so that it ends at min_lr and no update is at 0.
        reached = position + (size if by_tokens else clock.expected(size // config.device_token_capacity))
        hyperparameters = config.hyperparameters(stages[index])
        state.lr = config.learning_rate(reached / config.budget) * hyperparameters.lr_multiplier
        learner.apply(state.lr, hyperparameters)
        learner.synchronize()
        seconds = time.perf_counter() - begin

        clock.update(size // config.device_token_capacity, seconds)
        clipped = norm > learner.grad_clip
        state.count(size, loss, clipped, clock.elapsed)
        run.record({"step": state.steps, "tokens": state.tokens, "elapsed": clock.elapsed, "stage": index,
                    "tokens_per_step": size, "lr": state.lr, "loss": loss, "grad_norm": norm, "clipped": clipped,
                    "tokens_per_second": size / seconds})
        with clock.pause():
            every = 0 if config.skip_validation else config.eval_every
            if every and state.tokens // every > (state.tokens - size) // every:
                nats, bits = learner.evaluate(stream, config.validation_tokens)
                state.validation.append({"step": state.steps, "tokens": state.tokens, "elapsed": clock.elapsed,
                                         "loss": nats, "bits_per_byte": bits})
                log.debug(f"validation loss {nats:.4f} at {state.tokens:,} tokens")
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                log.info(progress_line(config, state, clock))
        if state.steps == 1:
            state.warmup_tokens, state.warmup_seconds = size, seconds
            clock.start()


def progress_line(config: RunConfig, state: State, clock: Clock) -> str:
    """Share done, loss, speed and time left."""
    done = (state.tokens if config.token_budget else clock.elapsed) / config.budget
    rate = (state.tokens - state.warmup_tokens) / clock.measured
    left = clock.measured * (1 - done) / done if done else 0.0
    return (f"  {done:.0%} · {state.tokens / 1e6:.2f}M tokens · loss {state.losses[-1][1]:.3f} · "
            f"{rate:,.0f} tokens/s · {int(left) // 60}:{int(left) % 60:02d} left")


def main(arguments: Sequence[str]) -> None:
    """Train one arm; print its run directory last."""
    print(train(read_arguments(RunConfig, arguments)).path)


if __name__ == "__main__":
    command(main)
