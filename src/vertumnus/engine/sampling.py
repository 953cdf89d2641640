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


def log_probability(logits_V: Tensor, token_id: int) -> float:
    """Natural logarithm of the token's probability at temperature 1."""
    logits_V = logits_V.float()
    return float(logits_V[token_id] - torch.logsumexp(logits_V, -1))
