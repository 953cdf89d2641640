"""How much is simulated: seconds for a test, half an hour by default, hours in full."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The size of every experiment."""

    name: str
    num_gpus: int = 40
    cell_requests: int = 4_000
    """Requests of one cell; production, which has a day in it, gets twice as many."""
    tuning_requests: int = 2_000
    search_requests: int = 1_000
    """Requests of the short runs that rank compositions in hindsight."""
    max_compositions: int = 8
    """Compositions searched at each rate."""
    num_finalists: int = 2
    """Of them, compositions that are then run in full."""
    production_rate_per_s: float = 2.0
    """Mean rate at which the production day is synthesised; its windows are then played faster."""
    day_requests: int = 48_000
    """Requests of the day in long windows."""
    loads: tuple[float, ...] = (0.2, 0.45, 0.65, 0.8, 0.95, 1.1)
    """Rates as shares of the rate that all GPUs could just serve at their smallest degree."""
    has_full_grids: bool = False
    """All sensitivities and all baselines in hindsight instead of the main ones."""
    phase_s: float = 480.0
    """Length of a phase of the phased workload."""
    pool_gpus: tuple[int, ...] = (64, 256, 1024, 4096)
    """Pools whose decisions and scans are timed."""
    quality_gpus: tuple[int, ...] = (64, 256, 1024)
    """Pools that are simulated."""
    requests_per_gpu: float = 24.0
    """Requests of a cell of the scale experiment per GPU."""


DEFAULT = Scale(name="default")
FULL = replace(
    DEFAULT,
    name="full",
    cell_requests=20_000,
    tuning_requests=6_000,
    search_requests=4_000,
    max_compositions=24,
    num_finalists=4,
    day_requests=144_000,
    has_full_grids=True,
    phase_s=660.0,
    quality_gpus=(64, 256, 1024, 4096),
    requests_per_gpu=40.0,
)
TINY = replace(
    DEFAULT,
    name="tiny",
    num_gpus=16,
    cell_requests=60,
    production_rate_per_s=0.1,
    day_requests=120,
    tuning_requests=40,
    search_requests=40,
    max_compositions=2,
    loads=(0.4, 0.8),
    phase_s=30.0,
    pool_gpus=(16, 32),
    quality_gpus=(16, 32),
    requests_per_gpu=4.0,
)
SCALES = {scale.name: scale for scale in (TINY, DEFAULT, FULL)}
