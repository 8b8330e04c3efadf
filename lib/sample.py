"""Text that a trained model writes: what it makes of a prompt, and what the arms of a study make of the same ones."""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tokenizers import Tokenizer

from lib.check import require
from lib.config import under_root
from lib.model import MiniGPT
from lib.runs import Run, load_model
from lib.stream import EOS, read_tokenizer

TRAINED = ("finished", "stream_exhausted")  # runs whose model is worth a look; that of a diverged one may be broken


def trained(run: Run) -> tuple[MiniGPT, Tokenizer]:
    """The model of a run, in float32 on the CPU, and its tokenizer.

    Raises BadInput for a run that was not trained to its end, and where one of the two is not whole.
    """
    status = (run.meta or {}).get("status", "not ended")
    require(status in TRAINED, "run", str(run), f"must have been trained to its end; it is {status.replace('_', ' ')}")
    model, tokenizer = load_model(run), read_tokenizer(run.path / "model", "run")
    require(tokenizer.token_to_id(EOS) is not None and tokenizer.get_vocab_size() == model.config.vocab_size, "run",
            str(run), f"must hold the tokenizer of its model: {model.config.vocab_size:,} tokens, {EOS} among them")
    return model, tokenizer


def sample(model: MiniGPT, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int, temperature: float = 1.0,
           seed: int = 0) -> list[str]:
    """Continue each prompt by up to `tokens` tokens; an empty one begins a document, and its end ends the text.

    At temperature 0 the likeliest token follows, else one drawn from softmax(logits / temperature). A prompt is drawn
    for by itself: the same seed gives it the same text beside any others. Raises BadInput.
    """
    require(not isinstance(prompts, str), "prompts", prompts, "must be a list of texts")
    require(tokens > 0, "tokens", tokens, "must be positive")
    require(temperature >= 0 and isfinite(temperature), "temperature", temperature, "must be 0 or positive")
    require(0 <= seed < 2**63, "seed", seed, "must be 0 or positive, and fit 63 bits")
    end = tokenizer.token_to_id(EOS)
    contexts = [tokenizer.encode(prompt).ids or [end] for prompt in prompts]
    return [tokenizer.decode(extend(model, context, tokens, temperature, seed, end)) for context in contexts]


@torch.inference_mode()
def extend(model: MiniGPT, context: Sequence[int], tokens: int, temperature: float, seed: int, end: int) -> list[int]:
    """The tokens that follow `context`, as `sample` has them, without `end`.

    The model sees the last `seq_len` of them all, a window that slides: a row of training, too, begins anywhere.
    """
    ids, chance = [*context], torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        window = torch.tensor([ids[-model.config.seq_len:]], device=model.embed_in.weight.device)
        logits = model(window)[0, -1].float().cpu()
        if temperature:
            odds = ((logits - logits.max()) / temperature).softmax(-1)
            token = torch.multinomial(odds, 1, generator=chance).item()
        else:
            token = logits.argmax().item()
        if token == end:
            break
        ids.append(token)
    return ids[len(context):]


def samples(runs: pd.DataFrame, folder: str | Path, prompts: Sequence[str], tokens: int, temperature: float = 1.0,
            seed: int = 0) -> pd.DataFrame:
    """What each arm of a frame of runs, those of `folder`, makes of each prompt: a row a prompt and arm.

    One run speaks for its arm: of those that still have a trained model, the one with the lowest seed, then the lowest
    loss; an arm without one is left out. The arms of a prompt stand in order of that loss. Raises BadInput.
    """
    folder = under_root(folder)
    kept = np.array([(folder / name / "model").is_dir() for name in runs["run"]], dtype=bool)
    chosen = runs[runs["status"].isin(TRAINED) & kept].sort_values(["seed", "validation_loss"]).drop_duplicates("arm")
    texts = {row.arm: sample(*trained(Run(folder / row.run)), prompts, tokens, temperature, seed)
             for row in chosen.sort_values("validation_loss", kind="stable").itertuples()}
    rows = [(prompt, arm, texts[arm][i]) for i, prompt in enumerate(prompts) for arm in texts]
    return pd.DataFrame(rows, columns=["prompt", "arm", "continuation"]).set_index(["prompt", "arm"])
