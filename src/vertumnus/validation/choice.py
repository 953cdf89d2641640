"""The pool that is validated, chosen by what somebody asked for and by the trace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vertumnus.core.composition import Composition, Topology, lay_out
from vertumnus.core.profile import Profile, load_profile, write_profile
from vertumnus.core.slo import Slo
from vertumnus.engine.model_config import ModelConfig
from vertumnus.errors import ConfigError
from vertumnus.replay.prompts import DEFAULT_VOCAB
from vertumnus.serve.config import ServeConfig
from vertumnus.sim.auto import auto_composition
from vertumnus.validation.model import measured_profile, model_config, spec_of_model, with_spec
from vertumnus.validation.spec import PoolSpec
from vertumnus.workload.trace import Trace

DEFAULT_NUM_STUBS, DEFAULT_NUM_REAL = 16, 2
REAL_STEP_TOKENS = 512
"""As `vertumnus serve` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPool:
    """`config`: of real ranks; None: stub ranks. `vocab`: prompts have token ids below it."""

    spec: PoolSpec
    config: ServeConfig | None = None
    vocab: int = DEFAULT_VOCAB


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChoice:
    """What was asked for. None: the default of stub or real ranks; composition: COUNTxDEGREE parts or `auto`."""

    profile: str | None = None
    num_ranks: int | None = None
    composition: str = "auto"
    controller: str | None = None
    window_s: float = 20.0
    step_tokens: int | None = None

    def stubs(self, trace: Trace) -> ChosenPool:
        """A pool of stub ranks for a trace of `as_validated`."""
        profile = load_profile() if self.profile is None else load_profile(self.profile)
        num_blocks = profile.kv_capacity_blocks(trace.block_tokens)
        spec = PoolSpec(
            profile=profile,
            composition=self._composition(trace, profile, self.num_ranks or DEFAULT_NUM_STUBS, num_blocks),
            block_tokens=trace.block_tokens,
            blocks_per_rank=num_blocks,
            controller=self.controller,
            window_s=self.window_s,
            step_tokens=self.step_tokens,
        )
        return ChosenPool(spec=spec)

    def real(
        self, trace: Trace, model: Path, *, dtype: str | None, folder: Path, say: Callable[[str], None]
    ) -> ChosenPool:
        """A pool of real ranks, measured first where no profile was named; `folder` takes the profile's file."""
        num_ranks = self.num_ranks or DEFAULT_NUM_REAL
        config = model_config(
            model,
            num_ranks=num_ranks,
            block_tokens=trace.block_tokens,
            step_tokens=self.step_tokens or max(REAL_STEP_TOKENS, trace.block_tokens),
            dtype=dtype,
        )
        if self.profile is None:
            say("measuring the ranks: some twenty seconds")
            profile = measured_profile(config)
        else:
            profile = load_profile(self.profile)
        spec = spec_of_model(config, profile, controller=self.controller, window_s=self.window_s)
        spec = spec.of(self._composition(trace, profile, num_ranks, spec.blocks_per_rank))
        file = folder / "profile.toml"
        write_profile(profile, file)
        vocab = min(DEFAULT_VOCAB, ModelConfig.from_folder(model).vocab_size)
        return ChosenPool(spec=spec, config=with_spec(config, spec, file), vocab=vocab)

    def _composition(self, trace: Trace, profile: Profile, num_ranks: int, num_blocks: int) -> Composition:
        topology = Topology(num_ranks)
        if self.composition == "auto":
            return auto_composition(trace, profile, topology, slo=Slo(), blocks_per_rank=num_blocks)
        chosen = Composition.parse(self.composition)
        lay_out(chosen, topology)
        if chosen.num_gpus != num_ranks:
            raise ConfigError(f"composition is {chosen}, of {chosen.num_gpus} ranks; accepted: {num_ranks} (--ranks)")
        return chosen
