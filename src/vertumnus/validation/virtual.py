"""The live pool without HTTP on a virtual clock: what its decisions and its order of events make, and no machine."""

import asyncio
from array import array

import numpy as np

from vertumnus.core.composition import lay_out
from vertumnus.engine.step import Sampling
from vertumnus.replay.prompts import Prompts
from vertumnus.serve.generation import GenerationRequest
from vertumnus.serve.virtual_time import run_virtually
from vertumnus.validation.recorder import Recorder
from vertumnus.validation.side import Side, timeline
from vertumnus.validation.spec import PoolSpec
from vertumnus.validation.stub_pool import VOCAB_SIZE, stub_pool
from vertumnus.workload.trace import Trace


def virtual_side(trace: Trace, spec: PoolSpec, seed: int) -> tuple[Side, float]:
    """The trace, fully named and with two tokens of output or more, through stub ranks; and for how many seconds the
    pool stood idle before it."""
    return run_virtually(_play(trace, spec, seed))


async def _play(trace: Trace, spec: PoolSpec, seed: int) -> tuple[Side, float]:
    prompts = Prompts(trace, seed=seed, vocab=VOCAB_SIZE)
    loop = asyncio.get_running_loop()
    recorder = Recorder(loop.time)
    pool = stub_pool(spec, recorder)
    await pool.start()
    begin_s = loop.time()
    ttft_s, cached_tokens = np.full((2, trace.num_requests), np.nan)

    async def ask(index: int) -> None:
        tokens = array("I", prompts.tokens(index).astype(np.uint32).tobytes())
        sent_s = loop.time()
        generation = pool.submit(
            GenerationRequest(
                request_id=str(index),
                token_ids=tokens,
                max_tokens=int(trace.output_tokens[index]),
                sampling=Sampling(),
            )
        )
        await generation.next_tokens()
        ttft_s[index] = loop.time() - sent_s
        cached_tokens[index] = generation.cached_tokens
        while generation.finish_reason is None:
            await generation.next_tokens()

    tasks = []
    for index, arrival_s in enumerate(trace.arrival_s.tolist()):
        await asyncio.sleep(max(0.0, begin_s + arrival_s - loop.time()))
        tasks.append(loop.create_task(ask(index)))
    await asyncio.gather(*tasks)
    await pool.close()
    requests = recorder.seen.requests
    side = Side(
        ttft_s=ttft_s,
        cached_tokens=cached_tokens,
        groups=tuple(requests[str(index)].group for index in range(trace.num_requests)),
        compositions=timeline(lay_out(spec.composition, spec.topology), recorder.transitions, start_s=begin_s),
    )
    return side, begin_s - recorder.seen.started_s
