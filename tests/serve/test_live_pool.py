"""The live pool over stub ranks on a virtual clock: what every request gets, whatever happens on the way."""

import asyncio
from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.builders import COST_MODEL
from tests.serve.live_builders import asked, check_idle, expected, prompt, stub_pool

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import Composition
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.engine.errors import WireError
from vertumnus.serve.errors import DeadlineExceeded, Overloaded, PoolFailed, RequestTooLarge, ShuttingDown
from vertumnus.serve.generation import FinishReason, Generation, GenerationRequest
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.stub_ranks import StubSpeed
from vertumnus.serve.virtual_time import run_virtually


async def read(generation: Generation) -> list[int]:
    return [token.token_id async for token in generation]


async def until_idle(pool: LivePool) -> None:
    """All that was cancelled is freed by what runs on, within a bound."""
    for _ in range(1000):
        if not (pool.num_open or pool.caches.num_in_use or pool.decode.num_decoding):
            return
        await asyncio.sleep(0.1)
    raise AssertionError("something is still held")


# Any run


@dataclass(frozen=True)
class Arrival:
    at_s: float
    request: GenerationRequest
    cancelled_after_s: float | None = None


def arrivals() -> st.SearchStrategy[list[Arrival]]:
    arrival = st.builds(
        lambda at_s, number, num_tokens, num_shared, max_tokens, cancelled, priority: Arrival(
            at_s,
            asked(prompt(number, num_tokens, num_shared), max_tokens, priority=priority),
            cancelled,
        ),
        st.integers(0, 40).map(lambda tenths: tenths / 10),
        st.integers(0, 3),
        st.integers(1, 150),
        st.integers(0, 60),
        st.integers(1, 25),
        st.none() | st.integers(0, 30).map(lambda tenths: tenths / 10),
        st.integers(-1, 1),
    )
    return st.lists(arrival, min_size=1, max_size=12)


@dataclass(frozen=True)
class Upset:
    """Something that happens to the pool at an instant."""

    at_s: float
    kind: str
    number: int


def upsets() -> st.SearchStrategy[list[Upset]]:
    return st.lists(
        st.builds(
            Upset,
            st.integers(0, 60).map(lambda tenths: tenths / 10),
            st.sampled_from(["kill", "kill two", "compose", "compose and kill"]),
            st.integers(0, 5),
        ),
        max_size=4,
    )


COMPOSITIONS = ("4x1", "2x2", "1x4", "2x1,1x2")


async def play(pool: LivePool, arrivals: list[Arrival], upsets: list[Upset]) -> list[list[int] | Exception | None]:
    """What every arrival got: its tokens, an error, or None if it was cancelled before it ended."""

    async def ask(arrival: Arrival) -> list[int] | Exception | None:
        await asyncio.sleep(arrival.at_s)
        generation = pool.submit(arrival.request)
        if arrival.cancelled_after_s is None:
            return await read(generation)
        reading = asyncio.ensure_future(read(generation))
        await asyncio.wait([reading], timeout=arrival.cancelled_after_s)
        if reading.done():
            return reading.result()
        generation.cancel()
        reading.cancel()
        return None

    async def upset(what: Upset) -> None:
        await asyncio.sleep(what.at_s)
        if "compose" in what.kind:
            pool.set_composition(Composition.parse(COMPOSITIONS[what.number % len(COMPOSITIONS)]))
        if "kill" in what.kind:
            pool.ranks.kill(what.number % pool.ranks.num_ranks)
        if what.kind == "kill two":
            pool.ranks.kill((what.number + 2) % pool.ranks.num_ranks)

    await pool.start()
    happening = [asyncio.ensure_future(upset(each)) for each in upsets]
    got = await asyncio.gather(*map(ask, arrivals), return_exceptions=True)
    await asyncio.gather(*happening)
    await until_idle(pool)
    check_idle(pool)
    await pool.close()
    return got


@settings(max_examples=60, deadline=None)
@given(
    arrivals(),
    upsets(),
    st.sampled_from(COMPOSITIONS),
    st.sampled_from([None, 20, 50]),
    st.sampled_from(Discipline),
    st.sampled_from([20, 24, 60]),
    st.booleans(),
    st.sampled_from([None, WaitSettings()]),
)
def test_everybody_gets_the_right_tokens_once_and_nothing_is_left(
    arrivals, upsets, composition, step_tokens, discipline, blocks_per_rank, has_copies, waits
):
    """Whatever is cancelled, killed, split and merged on the way, and however tight memory is."""

    async def main() -> None:
        pool = stub_pool(
            composition,
            num_decode_ranks=2,
            blocks_per_rank=blocks_per_rank,
            step_tokens=step_tokens,
            discipline=discipline,
            replication=ReplicationSettings() if has_copies else None,
            pull=PullSettings(s_per_token=0.0001, latency_s=0.001, from_any_worker=True) if has_copies else None,
            waits=waits,
        )
        for arrival, got in zip(arrivals, await play(pool, arrivals, upsets), strict=True):
            if got is not None:
                assert got == expected(arrival.request)
            else:
                assert arrival.cancelled_after_s is not None

    run_virtually(main())


# Single requests


def with_pool(body, composition="1x1", **parts):
    """Runs `body(pool)` on a started pool and checks that it leaves nothing behind."""

    async def main():
        pool = stub_pool(composition, **parts)
        await pool.start()
        await body(pool)
        await until_idle(pool)
        check_idle(pool)
        await pool.close()

    run_virtually(main())


def test_the_first_token_comes_when_the_kv_has_arrived_at_the_decode_rank():
    async def body(pool):
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        generation = pool.submit(asked(prompt(1, 100), max_tokens=3))
        times = []
        async for _ in generation:
            times.append(loop.time() - started_s)
        # d = 1 s and 10 ms a token; then 10 blocks at 1 ms each; then 50 ms a step.
        assert times == pytest.approx([2.0 + 0.01, 2.06, 2.11])
        assert generation.finish_reason is FinishReason.LENGTH

    with_pool(body)


def test_an_answer_of_one_token_needs_no_decode_rank():
    async def body(pool):
        pool.ranks.kill(1)
        generation = pool.submit(asked(prompt(1, 100), max_tokens=1))
        assert await read(generation) == expected(generation.request)

    with_pool(body, speed=StubSpeed(prefill=COST_MODEL, restart_s=1e6))


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(place):
    async def body(pool):
        free = asked(prompt(1, 30), max_tokens=8)
        stop = expected(free)[place]
        generation = pool.submit(asked(prompt(1, 30), max_tokens=8, stop_token_ids=frozenset({stop})))
        assert await read(generation) == expected(free)[:place]
        assert generation.finish_reason is FinishReason.STOP

    with_pool(body)


def test_what_is_cached_is_told_and_other_tenants_share_nothing():
    async def body(pool):
        cached = []
        for tenant in (b"a", b"a", b"b"):
            generation = pool.submit(asked(prompt(1, 95), tenant=tenant))
            await read(generation)
            cached.append(generation.cached_tokens)
        assert cached == [0, 90, 0]

    with_pool(body)


@pytest.mark.parametrize("after_s", [0.0, 0.5, 2.005, 2.03, 2.07])
def test_whoever_goes_away_frees_everything_at_any_stage(after_s):
    """Queued, in a step, while the KV is copied, before and while it decodes."""

    async def body(pool):
        others = pool.submit(asked(prompt(2, 10))) if after_s == 0.0 else None
        generation = pool.submit(asked(prompt(1, 100), max_tokens=100))
        await asyncio.sleep(after_s)
        generation.cancel()
        assert pool.num_open == (others is not None)
        if others is not None:
            await read(others)

    with_pool(body)


def test_a_deadline_ends_a_request_wherever_it_is():
    async def body(pool):
        for deadline_s in (0.5, 2.005, 2.2):
            tenant = b"%f" % deadline_s
            generation = pool.submit(asked(prompt(1, 100), 1000, tenant=tenant, deadline_s=deadline_s))
            with pytest.raises(DeadlineExceeded):
                await read(generation)
            await until_idle(pool)

    with_pool(body, blocks_per_rank=200)


def test_what_cannot_be_taken_is_refused_at_once_and_reserves_nothing():
    async def body(pool):
        with pytest.raises(RequestTooLarge, match="more than the 1000"):
            pool.submit(asked(prompt(1, 990), max_tokens=11))
        accepted = [pool.submit(asked(prompt(number, 50))) for number in range(2)]
        with pytest.raises(Overloaded) as refused:
            pool.submit(asked(prompt(3, 50)))
        assert refused.value.retry_after_s == pytest.approx(3.0)  # two steps of 1.5 s are ahead
        for generation in accepted:
            await read(generation)
        draining = asyncio.ensure_future(pool.drain(10.0))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown):
            pool.submit(asked(prompt(3, 50)))
        assert await draining
        pool.resume()
        await read(pool.submit(asked(prompt(3, 50))))

    with_pool(body, settings={"max_queued_requests": 2})


def test_a_wait_that_would_be_too_long_is_refused():
    async def body(pool):
        first = pool.submit(asked(prompt(1, 500)))
        with pytest.raises(Overloaded, match=r"the wait would be 6\.0 s"):
            pool.submit(asked(prompt(2, 10)))
        await read(first)

    with_pool(body, settings={"max_wait_s": 5.0})


def test_a_short_prompt_waits_for_one_chunk_of_a_long_one_at_most():
    async def body(pool):
        loop = asyncio.get_running_loop()
        long = pool.submit(asked(prompt(1, 900), max_tokens=2))
        await asyncio.sleep(0.1)
        started_s = loop.time()
        short = pool.submit(asked(prompt(2, 9), max_tokens=1))
        await read(short)
        assert loop.time() - started_s < 2 * (1.0 + 50 * 0.01), "a chunk takes 1.5 s"
        assert await read(long) == expected(long.request)

    with_pool(body, step_tokens=50, discipline=Discipline.SHORTEST)


@pytest.mark.parametrize("composition", ["1x1", "2x1", "1x2"])
def test_a_request_that_kills_its_ranks_again_and_again_fails_and_the_others_are_answered(composition):
    """Whatever it is: a step that cannot be sent or run, or a prompt that brings its ranks down."""
    deadly = prompt(1, 45)

    async def body(pool):
        run = pool.ranks.step

        async def step(asked_for):
            if any(request.token_ids[:45] == array("I", deadly) for request in asked_for.requests):
                raise WireError("RunStep cannot be sent")
            return await run(asked_for)

        pool.ranks.step = step
        killer = pool.submit(asked(deadly))
        await asyncio.sleep(0.1)
        others = [pool.submit(asked(prompt(number, 60))) for number in range(2, 5)]
        with pytest.raises(PoolFailed, match="lost 5 times"):
            await read(killer)
        assert pool.failure is None
        for other in others:
            assert await read(other) == expected(other.request)

    with_pool(body, composition, settings={"max_attempts": 5}, step_tokens=50)


def test_where_the_ranks_are_gone_for_good_everybody_is_told():
    async def main():
        pool = stub_pool("1x1")
        await pool.start()
        waiting = [pool.submit(asked(prompt(number, 100))) for number in range(3)]
        await asyncio.sleep(2.03)
        pool._fail(RuntimeError("no ranks"))
        for generation in waiting:
            with pytest.raises(PoolFailed):
                await read(generation)
        with pytest.raises(PoolFailed):
            pool.submit(asked(prompt(1, 10)))
        assert not pool.is_ready
        await pool.close()

    run_virtually(main())
