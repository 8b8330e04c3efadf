"""A trained run as a folder for `transformers`, tokenizer included: `python -m lib.export RUN FOLDER`.

RUN is a run's folder, or its name in `runs`. FOLDER must not be there yet, or be empty; both count from the repository.
The folder is a stock GPT-NeoX, which AutoModelForCausalLM and AutoTokenizer load without any code of this project:

    model, tokenizer = AutoModelForCausalLM.from_pretrained(FOLDER), AutoTokenizer.from_pretrained(FOLDER)
    print(tokenizer.decode(model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=40)[0]))
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save

from lib.check import require
from lib.config import command, under_root
from lib.folder import all_or_nothing
from lib.model import MiniGPT
from lib.runs import Run, unwritten, write_json, write_whole
from lib.sample import trained
from lib.stream import EOS


def export(run: Run, folder: Path) -> None:
    """Write the run's model and tokenizer into `folder`, all or nothing.

    Raises BadInput for a run without a trained model and a folder that holds anything, Unwritten on a full disk.
    """
    require_free(folder)
    model, tokenizer = trained(run)
    end = tokenizer.token_to_id(EOS)
    with unwritten(folder, "nothing of it is left"), all_or_nothing(folder, "folder") as partial:
        require_free(folder)  # another process may have been faster
        write_json(partial / "config.json", neox_config(model, end))
        write_json(partial / "generation_config.json", dict.fromkeys(
            ("bos_token_id", "eos_token_id", "pad_token_id"), end))
        write_json(partial / "tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "model_max_length": model.config.seq_len,
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True})  # <|eos|> inside a text is text, as it was in training
        write_whole(partial / "model.safetensors", save(neox_weights(model), metadata={"format": "pt"}))
        shutil.copyfile(run.path / "model" / "tokenizer.json", partial / "tokenizer.json")


def require_free(folder: Path) -> None:
    """Raise BadInput for a folder that holds anything."""
    free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(free, "folder", str(folder), "must not be there yet, or be an empty folder")


def neox_config(model: MiniGPT, end: int) -> dict:
    """The config.json of a GPT-NeoX that computes what the model does; a document begins after the `end` of another."""
    c = model.config
    return {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "dtype": "float32",
        "vocab_size": c.vocab_size, "max_position_embeddings": c.seq_len, "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers, "num_attention_heads": c.heads, "intermediate_size": c.mlp_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": 1.0},
        "hidden_act": "gelu", "layer_norm_eps": model.final_layer_norm.eps, "use_parallel_residual": False,
        "attention_bias": False, "attention_dropout": 0.0, "hidden_dropout": 0.0, "tie_word_embeddings": True,
        "bos_token_id": end, "eos_token_id": end,
    }


def neox_weights(model: MiniGPT) -> dict[str, torch.Tensor]:
    """The weights under GPT-NeoX's names, with a bias of zeros where it has one: its layer norms and its MLP."""
    weights = {}
    for name, weight in model.state_dict().items():
        name = "gpt_neox." + name.replace("dense_h_", "mlp.dense_h_").replace("dense_4h_", "mlp.dense_4h_")
        weights[name] = weight.contiguous()
        if "norm" in name or ".mlp." in name:
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(len(weight))
    return weights


def main(arguments: Sequence[str]) -> None:
    """Export a run; print the folder last."""
    require(len(arguments) == 2, "arguments", " ".join(arguments), "must be a run and the folder to write")
    named, folder = under_root(arguments[0], "run"), under_root(arguments[1], "folder")
    run = Run(named if named.is_dir() else under_root("runs") / arguments[0])
    found = (run.path / "config.json").is_file()
    require(found, "run", arguments[0], "must be the folder of a run, or its name in runs")
    export(run, folder)
    print(folder)


if __name__ == "__main__":
    command(main)
