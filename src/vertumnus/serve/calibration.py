"""A cost model for a pool that came without a profile: a few prefills of every degree, measured before it serves.

It is meant to get the order of degrees right on the machine at hand, in some ten seconds; `vertumnus profile` measures
with care.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vertumnus.core.composition import RankGroup
from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.fit import PrefillSample, fit_per_degree
from vertumnus.engine.messages import Refusal
from vertumnus.engine.step import Step, StepRequest
from vertumnus.errors import VertumnusError
from vertumnus.serve.ranks import Ranks

NUM_ROUNDS = 2


class CalibrationFailed(VertumnusError):
    """The ranks did not run what was asked of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """copy_s_per_token, copy_latency_s: of KV from rank to rank. epoch: the last one used."""

    cost_model: CostModel
    copy_s_per_token: float
    copy_latency_s: float
    epoch: int

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        coefficients = {str(degree): asdict(each) for degree, each in self.cost_model.coefficients.items()}
        return {
            "coefficients": coefficients,
            "copy_s_per_token": self.copy_s_per_token,
            "copy_latency_s": self.copy_latency_s,
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> "Calibration":
        coefficients = {int(degree): Coefficients(**each) for degree, each in plain["coefficients"].items()}
        return cls(
            cost_model=CostModel(coefficients),
            copy_s_per_token=plain["copy_s_per_token"],
            copy_latency_s=plain["copy_latency_s"],
            epoch=0,
        )


async def calibrate(
    ranks: Ranks, degrees: Sequence[int], *, epoch: int, block_tokens: int, blocks_per_rank: int, step_tokens: int
) -> Calibration:
    """Measures the degrees under epochs above `epoch`. Takes the first ranks; nothing else may run on them.

    The pool's steps have `step_tokens` at most, so that is what is measured, alone and behind a prefix.
    """
    long = max(min(step_tokens, blocks_per_rank * block_tokens // 4) // block_tokens, 4) * block_tokens
    cells = [(long // 4, 0), (long // 2, 0), (long, 0), (long // 4, long), (long // 2, 2 * long)]
    samples = []
    for degree in degrees:
        epoch += 1
        group = RankGroup(0, degree)
        answer = await ranks.activate(epoch, {0: degree})
        if isinstance(answer, Refusal):
            raise CalibrationFailed(f"degree {degree} cannot be measured: {answer.detail}")
        await time_step(ranks, group, epoch, block_tokens, [(long // 4, 0)])  # the first one warms up
        for suffix_tokens, prefix_tokens in cells * NUM_ROUNDS:
            seconds = await time_step(ranks, group, epoch, block_tokens, [(suffix_tokens, prefix_tokens)])
            samples.append(PrefillSample(degree, suffix_tokens, prefix_tokens, seconds))
    latency_s, per_block_s = await time_copies(ranks, min(blocks_per_rank // 2, 64), destination=1)
    return Calibration(
        cost_model=CostModel(fit_per_degree(samples).coefficients),
        copy_s_per_token=per_block_s / block_tokens,
        copy_latency_s=latency_s,
        epoch=epoch,
    )


async def time_copies(ranks: Ranks, num_blocks: int, *, destination: int) -> tuple[float, float]:
    """(seconds of any copy, seconds more for each block), from rank 0 to another. Raises CalibrationFailed."""
    medians = []
    for count in (1, num_blocks):
        seconds = []
        for _ in range(3):
            started_s = time.perf_counter()
            answer = await ranks.copy_blocks(0, list(range(count)), destination, list(range(count)))
            if isinstance(answer, Refusal):
                raise CalibrationFailed(f"a copy cannot be measured: {answer.detail}")
            seconds.append(time.perf_counter() - started_s)
        medians.append(statistics.median(seconds))
    per_block_s = max(medians[1] - medians[0], 0.0) / max(num_blocks - 1, 1)
    return medians[0], per_block_s


async def time_step(
    ranks: Ranks, group: RankGroup, epoch: int, block_tokens: int, work: Sequence[tuple[int, int]]
) -> float:
    """Seconds of one step over requests of (R, P) each. What the prefixes' slots hold is of no concern. Raises
    CalibrationFailed."""
    step = work_step(group, epoch, block_tokens, work)
    started_s = time.perf_counter()
    answer = await ranks.step(step)
    if isinstance(answer, Refusal):
        raise CalibrationFailed(f"a step of {list(work)} tokens (new, cached) cannot be measured: {answer.detail}")
    return time.perf_counter() - started_s


def work_step(group: RankGroup, epoch: int, block_tokens: int, work: Sequence[tuple[int, int]]) -> Step:
    """A step over requests of (R, P) each, in slots from 0 on at every rank of the group."""
    requests = []
    next_slot = 0
    for number, (suffix_tokens, prefix_tokens) in enumerate(work):
        num_blocks = -(-(suffix_tokens + prefix_tokens) // block_tokens)
        per_rank = -(-num_blocks // group.degree)
        blocks = [(group.first_rank + block // per_rank, next_slot + block % per_rank) for block in range(num_blocks)]
        next_slot += per_rank
        requests.append(
            StepRequest(
                request_id=number, token_ids=[1] * suffix_tokens, num_prefix_tokens=prefix_tokens, blocks=blocks
            )
        )
    return Step(step_id=0, first_rank=group.first_rank, degree=group.degree, epoch=epoch, requests=requests)
