"""How the ranks of a configured server are started, by the server itself or by somebody else."""

import json
from typing import Any

from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.errors import ConfigError
from vertumnus.serve.config import ServeConfig

SOURCE = "vertumnus.engine.model_source:load"
RECOVERY_TIMEOUT_S = 60.0
"""Of the server's own ranks, which are forked from what is loaded already."""


def block_bytes(config: ServeConfig, model: ModelConfig) -> int:
    """Of one KV block at one rank, all layers."""
    dtype = Dtype(config.dtype) if config.dtype is not None else model.dtype
    return model.kv_bytes_per_token(dtype) * config.block_tokens


def blocks_per_rank(config: ServeConfig, model: ModelConfig) -> int:
    """Raises ConfigError if the memory is too small for one."""
    num_bytes = block_bytes(config, model)
    num_blocks = (config.kv_mib_per_rank << 20) // num_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"kv_mib_per_rank is {config.kv_mib_per_rank}; accepted: {-(-num_bytes >> 20)} or more, "
            f"for one block of {config.block_tokens} tokens"
        )
    return num_blocks


def pool_config(config: ServeConfig, model: ModelConfig, *, listen_fd: int, token: str) -> PoolConfig:
    """Ranks 0 .. ranks - 1 prefill, the others decode."""
    plain = _launch(config, model)
    is_launched = config.launcher == "local"
    return PoolConfig(
        source=SOURCE,
        options=json.loads(plain["options"]),
        num_ranks=plain["num_ranks"],
        num_slots=plain["num_slots"],
        threads_per_rank=plain["num_threads"],
        host=config.pool_host,
        listen_fd=listen_fd,
        token=token,
        is_launched=is_launched,
        start_timeout_s=config.start_timeout_s,
        # Who starts ranks elsewhere may start all of them again for one that is lost, and load the model anew.
        recovery_timeout_s=RECOVERY_TIMEOUT_S if is_launched else config.start_timeout_s,
    )


def launch_file(config: ServeConfig) -> str:
    """What `python -m vertumnus.engine.rank_process` reads, as JSON: all but the token. Raises ConfigError if the
    ranks are the server's own to start, or the model cannot be read."""
    if config.launcher != "external":
        raise ConfigError(f"launcher is {config.launcher!r}; accepted: 'external', for ranks that somebody else starts")
    launch = _launch(config, ModelConfig.from_folder(config.model))
    return json.dumps(launch, indent=2) + "\n"


def check_fit(ranks: RankPool, config: ServeConfig, model: ModelConfig) -> None:
    """Raises ConfigError if a rank was started for another model or memory than this server's."""
    wanted = (blocks_per_rank(config, model), config.block_tokens, block_bytes(config, model))
    for rank in range(config.ranks + config.decode_ranks):
        hello = ranks.roster.hello(rank)
        found = (hello.num_slots, hello.block_tokens, hello.block_bytes)
        if found != wanted:
            raise ConfigError(
                f"rank {rank} has {_shown(found)}; accepted: {_shown(wanted)}, as a new launch file says "
                "(vertumnus serve --print-launch)"
            )


def _launch(config: ServeConfig, model: ModelConfig) -> dict[str, Any]:
    """A `Launch` without token and interface_host, which the process that reads it has from where it runs."""
    bounds = PoolConfig(source=SOURCE, num_ranks=1, num_slots=1)
    return {
        "source": SOURCE,
        "options": json.dumps(
            {"folder": str(config.model.resolve()), "dtype": config.dtype, "block_tokens": config.block_tokens}
        ),
        "pool_host": config.pool_host,
        "pool_port": config.pool_port,
        "num_ranks": config.ranks + config.decode_ranks,
        "num_slots": blocks_per_rank(config, model),
        "num_threads": config.threads_per_rank,
        "connect_timeout_s": bounds.connect_timeout_s,
        "step_timeout_s": bounds.step_timeout_s,
        "orphan_timeout_s": config.start_timeout_s,
    }


def _shown(blocks: tuple[int, int, int]) -> str:
    num_blocks, block_tokens, num_bytes = blocks
    return f"{num_blocks} blocks of {block_tokens} tokens, {num_bytes} bytes each"
