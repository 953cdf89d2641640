"""A live pool over stub ranks, and what its answers ought to be."""

from array import array
from typing import Any

from tests.builders import BLOCK_TOKENS, COST_MODEL, control_plane

from vertumnus.core.composition import Composition
from vertumnus.engine.step import Sampling
from vertumnus.serve.generation import GenerationRequest
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.stub_ranks import StubRanks, StubSpeed

HASH_KEY = bytes(range(32))
VOCAB_SIZE = 997


def stub_pool(
    composition: str = "2x1",
    *,
    num_decode_ranks: int = 1,
    speed: StubSpeed | None = None,
    blocks_per_rank: int = 100,
    settings: dict[str, Any] | None = None,
    telemetry: Any = None,
    **control: Any,
) -> LivePool:
    """With the builders' cost model and 10 tokens to a block; within a running loop. FIFO unless said otherwise."""
    num_ranks = Composition.parse(composition).num_gpus
    ranks = StubRanks(
        num_ranks + num_decode_ranks,
        speed
        or StubSpeed(
            prefill=COST_MODEL,
            decode_ranks=range(num_ranks, num_ranks + num_decode_ranks),
            decode_step_s=0.05,
            copy_s_per_block=0.001,
            switch_s=0.2,
            restart_s=2.0,
        ),
        vocab_size=VOCAB_SIZE,
    )
    return LivePool(
        ranks=ranks,
        control_plane=control_plane(composition, epoch=1, blocks_per_rank=blocks_per_rank, **control),
        settings=LiveSettings(
            num_prefill_ranks=num_ranks,
            num_decode_ranks=num_decode_ranks,
            block_tokens=BLOCK_TOKENS,
            blocks_per_rank=blocks_per_rank,
            max_sequence_tokens=100_000,
            vocab_size=VOCAB_SIZE,
            **(settings or {}),
        ),
        hash_key=HASH_KEY,
        telemetry=telemetry,
    )


def asked(tokens: list[int], max_tokens: int = 4, **changes: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="test", token_ids=array("I", tokens), max_tokens=max_tokens, sampling=Sampling(), **changes
    )


def prompt(number: int, num_tokens: int, num_shared: int = 0) -> list[int]:
    """Tokens of a prompt; equal numbers give equal ones, and all prompts begin with the same `num_shared` tokens."""
    own = [(number * 131 + place * 7) % VOCAB_SIZE for place in range(num_shared, num_tokens)]
    return [place % VOCAB_SIZE for place in range(min(num_shared, num_tokens))] + own


def expected(request: GenerationRequest) -> list[int]:
    """What stub ranks generate, computed without any."""
    stub = StubRanks(1, vocab_size=VOCAB_SIZE)
    tokens = list(request.token_ids)
    answer: list[int] = []
    while len(answer) < request.max_tokens:
        token = stub.next_token(tokens[-1], len(tokens))
        if token in request.stop_token_ids:
            break
        tokens.append(token)
        answer.append(token)
    return answer


def check_idle(pool: LivePool) -> None:
    """Nothing is held by anybody once all requests have ended."""
    pool.check_invariants()
    plane = pool.control_plane
    assert pool.num_open == pool.num_unanswered == 0
    assert pool.decode.num_decoding == pool.decode.num_waiting == 0
    assert pool.caches.num_in_use == 0
    assert plane.num_waiting == 0
    for worker in plane.workers.all():
        assert worker.num_outstanding == worker.queue.service_s == worker.queued_tokens == worker.running_tokens == 0
        store = pool.caches.stores.get(worker.worker_id)
        if store is not None:
            assert not any(store.in_use(block) for block in store.blocks())
    for rank in pool.decode.describe():
        assert rank["free_blocks"] == rank["num_blocks"]
