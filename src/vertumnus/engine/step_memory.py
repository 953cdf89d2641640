"""What a step takes beside weights and KV: grows linearly with its tokens, and not with the number of layers."""

from vertumnus.engine.forward import ROWS_AT_ONCE
from vertumnus.engine.model_config import Dtype, ModelConfig


def step_bytes(config: ModelConfig, dtype: Dtype, num_new_tokens: int, num_prefix_tokens: int, degree: int) -> int:
    """Estimated peak bytes of a rank's step of R new tokens behind P cached ones at degree C, of the rank that takes
    most; pass-KV, no logits.

    With e bytes a number, T = ceil(R / C) rows of this rank, E the hidden size, h = H*D and g = K*D, the peak is in
    attention, where hidden state, queries, keys, values, their stacked copy and the rotary table are there at the same
    time, queries and keys once more in the kernel's order, and the output once, or twice where it is to be merged with
    another:

        no prefix, C = 1    e*T*(E + 3*h + 6*g + 2*D)
        C = 1               e*(T*(E + 4*h + 4*g + 2*D) + 4*g*P)
        C > 1               e*(T*(E + 4*h + 4*g + 2*D) + max(2*g*R + 2*g*P*(4 + 1/C), 4*g*R + 2*g*P*(2 + 1/C) + k))

    At degree 1 the prefix is there as read, and in the kernel's order. Otherwise, either the prefix is attended to: it
    is there in order of position, in the kernel's, and for the next layer as sent and as received, twice until gloo is
    done with it; and the new keys and values (2*g*R) are received. Or the others' new ones are attended to, which are
    there as received and in order, and k in the kernel's order: the last rank has 1/2 - 1/(2*C) of them before all its
    rows, the first twice as many but for half of its rows only, so that k = max(n, 2*n - h*T), n = g*R*(1 - 1/C).
    Short steps may peak in the MLP, which takes `ROWS_AT_ONCE` rows at a time.
    """
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = -(-num_new_tokens // degree)
    if degree == 1 and not num_prefix_tokens:
        attention = rows * (hidden + 3 * query + 6 * key + 2 * config.head_dim)
    else:
        attention = rows * (hidden + 4 * query + 4 * key + 2 * config.head_dim)
        if degree == 1:
            attention += 4 * key * num_prefix_tokens
        else:
            new, prefix = 2 * key * num_new_tokens, 2 * key * num_prefix_tokens
            of_others = round(key * num_new_tokens * (1 - 1 / degree))
            attention += max(
                new + round(prefix * (4 + 1 / degree)),
                2 * new + round(prefix * (2 + 1 / degree)) + max(of_others, 2 * of_others - query * rows),
            )
    widths = hidden + 2 * mlp if config.experts is None else 2 * hidden + 3 * mlp
    feeding = rows * (hidden + 2 * config.head_dim) + min(rows, ROWS_AT_ONCE) * widths
    return max(attention, feeding) * dtype.num_bytes
