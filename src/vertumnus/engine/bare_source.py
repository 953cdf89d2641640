"""Ranks without a model: all of the machinery of a pool, and steps in which nothing is computed."""

from vertumnus.engine.collectives import GroupLink
from vertumnus.engine.kv_memory import KvMemory
from vertumnus.engine.stages import Stages
from vertumnus.engine.step import Step, StepOutput


class BareSource:
    """Blocks of the given size, with nothing in them."""

    def __init__(self, block_bytes: int, block_tokens: int) -> None:
        self.block_bytes = block_bytes
        self.block_tokens = block_tokens

    def stepper(self, rank: int, memory: KvMemory) -> "BareStepper":
        return BareStepper(rank)


class BareStepper:
    """Agrees to every step and is done with it at once."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def refusal(self, step: Step) -> str | None:
        return None

    def run(self, step: Step, link: GroupLink) -> StepOutput:
        return StepOutput(
            step_id=step.step_id,
            rank=self._rank,
            epoch=step.epoch,
            outputs=(),
            timings=Stages().timings(),
            received_bytes=link.received_bytes,
        )


def load(block_bytes: int = 65536, block_tokens: int = 64) -> BareSource:
    return BareSource(block_bytes, block_tokens)
