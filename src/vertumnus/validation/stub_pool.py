"""The live pool over stub ranks that take what the profile says: E_C for steps, its links for copies, T_ext for
handoffs."""

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.controllers import make_controller
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.moves import MoveSettings
from vertumnus.core.policies import make_policy
from vertumnus.core.pulls import PullSettings
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.replay.prompts import DEFAULT_VOCAB
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.stub_links import StubLinks
from vertumnus.serve.stub_ranks import StubRanks, StubSpeed
from vertumnus.serve.telemetry import Telemetry
from vertumnus.validation.spec import POLICY, PoolSpec

VOCAB_SIZE = DEFAULT_VOCAB
HASH_KEY = bytes(range(32))
MAX_QUEUED_REQUESTS = 1 << 16
"""The simulator refuses nobody for want of patience, so neither may the live side."""


def stub_pool(spec: PoolSpec, telemetry: Telemetry) -> LivePool:
    """Within a running loop."""
    profile, topology = spec.profile, spec.topology
    num_ranks = topology.num_gpus
    ranks = StubRanks(
        num_ranks + spec.num_decode_ranks,
        StubSpeed(
            prefill=profile.cost_model(),
            decode_ranks=range(num_ranks, num_ranks + spec.num_decode_ranks),
            decode_step_s=profile.first_token_s,
            links=StubLinks(profile, topology, block_tokens=spec.block_tokens),
            switch_s=profile.switch_s,
        ),
        vocab_size=VOCAB_SIZE,
    )
    controller = None
    if spec.controller is not None:
        controller = make_controller(spec.controller, profile.cost_model(), profile.kappa)
    control_plane = ControlPlane(
        layout=lay_out(spec.composition, topology),
        topology=topology,
        cost_model=profile.cost_model(),
        policy=make_policy(POLICY),
        settings=ControlPlaneSettings(
            block_tokens=spec.block_tokens,
            blocks_per_rank=spec.blocks_per_rank,
            discipline=spec.discipline,
            step_tokens=spec.step_tokens,
            max_sequence_tokens=profile.max_sequence_tokens,
            window_s=spec.window_s,
            replication=ReplicationSettings(),
            moves=MoveSettings(),
            waits=WaitSettings(),
            pull=PullSettings.of_profile(profile, from_any_worker=True),
        ),
        controller=controller,
        epoch=1,
    )
    return LivePool(
        ranks=ranks,
        control_plane=control_plane,
        settings=LiveSettings(
            num_prefill_ranks=num_ranks,
            num_decode_ranks=spec.num_decode_ranks,
            block_tokens=spec.block_tokens,
            blocks_per_rank=spec.blocks_per_rank,
            max_sequence_tokens=spec.max_tokens,
            vocab_size=VOCAB_SIZE,
            max_queued_requests=MAX_QUEUED_REQUESTS,
        ),
        hash_key=HASH_KEY,
        telemetry=telemetry,
    )
