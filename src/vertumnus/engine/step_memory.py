"""What a step takes beside weights and KV: grows linearly with its tokens, and not with the number of layers."""

from vertumnus.engine.forward import ROWS_AT_ONCE
from vertumnus.engine.model_config import Dtype, ModelConfig


def step_bytes(config: ModelConfig, dtype: Dtype, num_new_tokens: int, num_prefix_tokens: int, degree: int) -> int:
    """Estimated peak bytes of a rank's step of R new tokens behind P cached ones at degree C; pass-KV, no logits.

    With e bytes a number, T = ceil(R / C) rows of this rank, E the hidden size, h = H*D and g = K*D, the peak is in
    attention, where hidden state, queries, keys, values and their stacked copy are there at the same time, queries and
    keys once more in the kernel's order, and the output once, or twice where it is to be merged with another:

        no prefix, C = 1    e*T*(E + 3*h + 6*g)
        otherwise           e*(T*(E + 4*h + 4*g) + 4*g*R*[C > 1] + 2*g*P*(1 if C = 1 else 2 + 1/C) + 2*g*S)

    4*g*R are the new keys and values as gathered and as ordered; 2*g*P those of the prefix: read in order at degree 1,
    otherwise ordered, on their way for the next layer, and as sent; S the most keys of one kernel call, P or up to R.
    Short steps may peak in the MLP, which takes `ROWS_AT_ONCE` rows at a time.
    """
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = -(-num_new_tokens // degree)
    if degree == 1 and not num_prefix_tokens:
        attention = rows * (hidden + 3 * query + 6 * key)
    else:
        attention = rows * (hidden + 4 * query + 4 * key)
        attention += 4 * key * num_new_tokens if degree > 1 else 0
        attention += round(2 * key * num_prefix_tokens * (1 if degree == 1 else 2 + 1 / degree))
        attention += 2 * key * max(num_prefix_tokens, num_new_tokens if degree > 1 else 0)
    feeding = rows * hidden + min(rows, ROWS_AT_ONCE) * (2 * hidden + 3 * mlp)
    return max(attention, feeding) * dtype.num_bytes
