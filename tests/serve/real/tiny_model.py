"""A random Llama in float32 whose 128 tokens are the characters of ASCII, so that an answer's text tells its tokens."""

import json
import random
from functools import cache
from pathlib import Path

from tests.engine.models import MAX_POSITIONS, VOCAB_SIZE, SavedModel, copy_of, tiny_llama

from vertumnus.core.profile import Source, load_profile
from vertumnus.serve.http.tokeniser import BYTE_OF_CHARACTER

__all__ = ["MAX_POSITIONS", "copy_of", "folder", "greedy", "profile_file", "prompt"]

_CHARACTERS = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


@cache
def model() -> SavedModel:
    saved = tiny_llama(seed=4)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": {_CHARACTERS[byte]: byte for byte in range(VOCAB_SIZE)}, "merges": []},
    }
    (saved.folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (saved.folder / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return saved


def folder() -> Path:
    """With tokenizer."""
    return model().folder


@cache
def profile_file() -> Path:
    """Figures of no machine, so that nothing is measured at start."""
    figures = {
        "kv_bytes_per_token": 512,
        "kv_capacity_tokens_per_gpu": 2048,
        "intra_node_bytes_per_s": 1e8,
        "inter_node_bytes_per_s": 1e8,
        "copy_latency_s": 0.002,
        "decode_bytes_per_s": 1e8,
        "decode_latency_s": 0.002,
        "first_token_s": 0.005,
        "switch_s": 0.05,
    }
    coefficients = {
        "d_s": 5e-3,
        "a_s_per_token": 1e-5,
        "b_s_per_token": 1e-6,
        "c_s_per_token": 1e-4,
        "alpha_s_per_pair": 1e-8,
    }
    source = Source.ESTIMATED.value

    def lines(numbers: dict[str, float]) -> list[str]:
        return [
            f'{name} = {{ value = {value}, source = "{source}", note = "made up" }}' for name, value in numbers.items()
        ]

    text = ['name = "tiny"', 'model = "tiny"', 'hardware = "any"', "degrees = [1, 2, 4]", *lines(figures)]
    path = folder() / "profile.toml"
    path.write_text("\n".join([*text, "[coefficients]", *lines(coefficients)]) + "\n", encoding="utf-8")
    load_profile(str(path))
    return path


@cache
def prompt(number: int, num_tokens: int = 200, num_shared: int = 0) -> tuple[int, ...]:
    """Equal numbers give prompts that begin alike; all begin with the same `num_shared` tokens."""
    shared, own = random.Random(0), random.Random(number + 1)
    draws = [shared] * min(num_shared, num_tokens) + [own] * max(num_tokens - num_shared, 0)
    return tuple(each.randrange(VOCAB_SIZE) for each in draws)


@cache
def _greedy(tokens: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(model().greedy(list(tokens), num_tokens))


def greedy(tokens: tuple[int, ...], num_tokens: int) -> str:
    """What a single rank of another implementation answers."""
    return bytes(_greedy(tokens, num_tokens)).decode("ascii")
