"""The next token from one position's logits."""

import torch
from torch import Tensor

from vertumnus.engine.step import Sampling


def sample(logits_V: Tensor, sampling: Sampling, position: int) -> int:
    """Draws a token; temperature 0 takes the most likely one, the lowest of equals.

    The draw depends on the logits, the seed and the position alone: not on what else is in the batch, nor on the
    rank. top_k is applied before top_p, both to the probabilities at the given temperature.
    """
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    scaled = logits_V.float() / sampling.temperature
    probabilities, tokens = torch.softmax(scaled, -1).sort(descending=True, stable=True)
    if sampling.top_k is not None:
        probabilities, tokens = probabilities[: sampling.top_k], tokens[: sampling.top_k]
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        kept = int((before < sampling.top_p * probabilities.sum()).sum())
        probabilities, tokens = probabilities[:kept], tokens[:kept]
    generator = torch.Generator().manual_seed(sampling.seed * 0x9E3779B97F4A7C15 + position & 0xFFFFFFFFFFFFFFFF)
    drawn = torch.rand((), generator=generator, dtype=torch.float64).item() * probabilities.double().sum().item()
    index = int(torch.searchsorted(probabilities.double().cumsum(0), drawn, right=True))
    return int(tokens[min(index, len(tokens) - 1)])


def log_probabilities(logits_V: Tensor, token_id: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural logarithm of the token's probability at temperature 1; and the `num_top` most likely tokens with theirs,
    most likely first, equal ones by their ids."""
    logprobs_V = torch.log_softmax(logits_V.float(), -1)
    own = float(logprobs_V[token_id])
    if not num_top:
        return own, []
    least = logprobs_V.topk(min(num_top, len(logprobs_V))).values[-1]
    candidates = (logprobs_V >= least).nonzero().flatten()  # by id; `topk` chooses among equals as it likes
    values, places = logprobs_V[candidates].sort(descending=True, stable=True)
    return own, list(zip(candidates[places].tolist(), values.tolist(), strict=True))[:num_top]
