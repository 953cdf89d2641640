"""A short trace and pools for it."""

from vertumnus.core.composition import Composition
from vertumnus.core.profile import load_profile
from vertumnus.validation.run import as_validated
from vertumnus.validation.spec import PoolSpec
from vertumnus.workload.synthesis import synthesise

PROFILE = load_profile()
TRACE = as_validated(synthesise("conversation", seed=5, duration_s=90.0, rate_per_s=4.0))


def spec(composition="2x1,1x2", **changes):
    return PoolSpec(
        profile=PROFILE,
        composition=Composition.parse(composition),
        block_tokens=TRACE.block_tokens,
        blocks_per_rank=PROFILE.kv_capacity_blocks(TRACE.block_tokens),
        window_s=5.0,
        **changes,
    )
