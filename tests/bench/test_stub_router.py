"""The router over stub ranks, as benchmarks start it."""

import json
import urllib.request

from vertumnus.bench.router import prompts
from vertumnus.bench.stub_router import StubRouterSpec, stub_router
from vertumnus.replay.run import ReplaySettings, replay


def test_a_router_answers_and_tells_what_it_took():
    with stub_router(StubRouterSpec(composition="2x1,1x2", time_scale=0.001, controller="lookahead")) as router:
        router.figures()
        trace = prompts(20, 200.0, num_tokens=1024, answer_tokens=3, seed=0)
        found = replay(trace, ReplaySettings(url=router.url, timeout_s=30.0)).to_json()
        with urllib.request.urlopen(f"{router.url}/health", timeout=10) as answer:
            assert json.loads(answer.read()) == {"status": "ok"}
        figures = router.figures()
    assert found["num_completed"] == 20
    assert found["num_failed"] == 0
    assert figures["cpu_s"] > 0
    assert figures["num_open"] == 0
    assert figures["composition"] == "2x1,1x2"


def test_half_of_every_prompt_is_shared_with_others():
    trace = prompts(300, 100.0, num_tokens=4096, answer_tokens=2, seed=1)
    blocks = trace.block_ids.reshape(300, 8)
    beginnings = {tuple(row[:4]) for row in blocks}
    assert len(beginnings) <= 64
    assert len({row[4] for row in blocks}) == 300
