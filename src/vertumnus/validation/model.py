"""A live pool of real weights, and its profile where none was given: what `vertumnus serve` would measure at start."""

import asyncio
import secrets
import socket
import time
from pathlib import Path

from vertumnus.core.profile import Profile, Provenance, Source
from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.engine.pool import RankPool
from vertumnus.serve.calibration import calibrate
from vertumnus.serve.config import ServeConfig, config_from
from vertumnus.serve.rank_launch import blocks_per_rank, pool_config
from vertumnus.validation.spec import POLICY, PoolSpec

NUM_SWITCHES = 3
_MEASURED = Provenance(Source.MEASURED, "at the start of a validation, as vertumnus serve does")
_CONFIGURED = Provenance(Source.MEASURED, "from the model's and the pool's configuration")


def model_config(model: Path, *, num_ranks: int, block_tokens: int, step_tokens: int, dtype: str | None) -> ServeConfig:
    """A pool of real ranks with blocks of the trace's size, so that exactly what the trace shares can be found.
    Raises ConfigError for a folder that cannot be served."""
    return config_from(
        {
            "model": model,
            "dtype": dtype,
            "ranks": num_ranks,
            "composition": f"{num_ranks}x1",
            "block_tokens": block_tokens,
            "step_tokens": step_tokens,
            "policy": POLICY,
            "port": 0,
        }
    ).checked()


def with_spec(config: ServeConfig, spec: PoolSpec, profile_file: Path) -> ServeConfig:
    """The configuration that is served: as the specification says, with the profile of this file."""
    return config.model_copy(
        update={
            "composition": str(spec.composition),
            "controller": spec.controller or "none",
            "window_s": spec.window_s,
            "queue": spec.discipline.value,
            "profile": str(profile_file),
            "slo": str(spec.slo),
            "max_queued_requests": 1 << 16,
            "max_decode_sequences": 256,
        }
    )


def spec_of_model(config: ServeConfig, profile: Profile, *, controller: str | None, window_s: float) -> PoolSpec:
    """The pool of real ranks as the simulator is told of it."""
    return PoolSpec(
        profile=profile,
        composition=config.initial_composition,
        block_tokens=config.block_tokens,
        blocks_per_rank=blocks_per_rank(config, ModelConfig.from_folder(config.model)),
        controller=controller,
        window_s=window_s,
        step_tokens=config.step_tokens,
        num_decode_ranks=config.decode_ranks,
    )


def measured_profile(config: ServeConfig) -> Profile:
    """E_C by degree, copies and the switch of these ranks, in some twenty seconds: good to the order of degrees and
    some percent. `vertumnus profile` measures with care."""
    return asyncio.run(_measure(config))


async def _measure(config: ServeConfig) -> Profile:
    model = ModelConfig.from_folder(config.model)
    num_blocks = blocks_per_rank(config, model)
    degrees = tuple(degree for degree in (1, 2, 4, 8) if degree <= config.ranks)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = await RankPool.start(
            pool_config(config, model, listen_fd=listener.fileno(), token=secrets.token_hex(16))
        )
        try:
            found = await calibrate(
                ranks,
                degrees,
                epoch=ranks.highest_epoch,
                block_tokens=config.block_tokens,
                blocks_per_rank=num_blocks,
                step_tokens=config.step_tokens,
            )
            epoch = found.epoch
            started_s = time.perf_counter()
            for number in range(NUM_SWITCHES):
                epoch += 1
                await ranks.activate(epoch, {0: degrees[number % len(degrees)]})
            switch_s = (time.perf_counter() - started_s) / NUM_SWITCHES
        finally:
            await ranks.close()
    dtype = Dtype(config.dtype) if config.dtype is not None else model.dtype
    kv_bytes_per_token = model.kv_bytes_per_token(dtype)
    # A copy that takes no measurable time per token is one over a link without a bound.
    bytes_per_s = kv_bytes_per_token / max(found.copy_s_per_token, 1e-12)
    names = ("intra_node_bytes_per_s", "inter_node_bytes_per_s", "decode_bytes_per_s")
    times = ("copy_latency_s", "decode_latency_s", "switch_s")
    coefficients = ("d_s", "a_s_per_token", "b_s_per_token", "c_s_per_token", "alpha_s_per_pair")
    provenance = dict.fromkeys((*names, *times), _MEASURED)
    provenance |= dict.fromkeys(
        ("kv_bytes_per_token", "kv_capacity_tokens_per_gpu", "max_sequence_tokens"), _CONFIGURED
    )
    provenance["first_token_s"] = Provenance(Source.MEASURED, "none: the prefill's last step samples the first token")
    provenance |= {f"coefficients.{degree}.{name}": _MEASURED for degree in degrees for name in coefficients}
    return Profile(
        name=f"{config.model_name}-here",
        model=config.model_name,
        hardware="this machine's ranks",
        degrees=degrees,
        coefficients=found.cost_model.coefficients,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_capacity_tokens_per_gpu=num_blocks * config.block_tokens,
        max_sequence_tokens=model.max_positions,
        intra_node_bytes_per_s=bytes_per_s,
        inter_node_bytes_per_s=bytes_per_s,
        decode_bytes_per_s=bytes_per_s,
        copy_latency_s=found.copy_latency_s,
        decode_latency_s=found.copy_latency_s,
        first_token_s=0.0,
        switch_s=switch_s,
        provenance=provenance,
    )
