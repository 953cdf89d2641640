"""`vertumnus-paper`, `vertumnus`, and what lies between them, by name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from vertumnus.core.placement import VertumnusPolicy
from vertumnus.core.queueing import Discipline
from vertumnus.reproduction.tuning import PaperChoice
from vertumnus.sim.compare import PolicyMaker, policy_maker
from vertumnus.sim.simulate import Pulls, SimulationSettings


def adaptive(settings: SimulationSettings) -> SimulationSettings:
    """The same pool with its controller on."""
    return replace(settings, is_fixed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvements:
    """What `vertumnus` adds to `vertumnus-paper`; all off is the paper's, all on the default."""

    price: bool = False
    """beta and lambda follow scarcity instead of being constants."""
    miss: bool = False
    """J prices needless recomputing; without `price` it brings that along, as both scale by scarcity."""
    order: bool = False
    """Shortest predicted service first, the delay that it puts on others charged."""
    lookahead: bool = False
    """The controller replays windows through other compositions instead of watching thresholds."""
    copies: bool = False
    """Missing blocks priced as the cheaper of computing and copying them from any holder."""
    moves: bool = False
    """Queued work moves to workers that run dry."""
    waits: bool = False
    """A request may wait for a prefix that another is computing."""

    def policy(self, tuned: PaperChoice) -> PolicyMaker:
        """The placement policy."""
        if self.miss:
            return VertumnusPolicy
        if self.price:
            return policy_maker("vertumnus", mu=0.0)
        return policy_maker("paper", **tuned.options)

    def settings(self, base: SimulationSettings, tuned: PaperChoice) -> SimulationSettings:
        """The pool."""
        return replace(
            base,
            controller_settings=None if self.lookahead else tuned.thresholds,
            discipline=Discipline.SHORTEST if self.order else Discipline.FIFO,
            controller="lookahead" if self.lookahead else "threshold",
            pulls=Pulls.ANY if self.copies else Pulls.NONE,
            has_moves=self.moves,
            has_waits=self.waits,
        )


NAMES = tuple(field.name for field in fields(Improvements))
NONE, ALL = Improvements(), Improvements(**dict.fromkeys(NAMES, True))


def steps() -> Mapping[str, Improvements]:
    """The paper's, ours, each improvement alone, and all but each."""
    named = {"vertumnus-paper": NONE, "vertumnus": ALL}
    named |= {f"paper + {name}": Improvements(**{name: True}) for name in NAMES}
    named |= {f"vertumnus - {name}": replace(ALL, **{name: False}) for name in NAMES}
    # Without the price there is no miss term either: both would be the same pool.
    named["vertumnus - price"] = replace(ALL, price=False, miss=False)
    return named
