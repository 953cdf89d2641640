"""A live pool over stub ranks behind the real front end, in a thread, under traffic: something to look at."""

import asyncio
import contextlib
import random
import socket
import threading

from tests.serve.http.servers import http_config
from tests.serve.live_builders import VOCAB_SIZE, asked, prompt, stub_pool
from tokenizers import Tokenizer, models, pre_tokenizers

from vertumnus.core.cost import Coefficients, CostModel
from vertumnus.core.pulls import PullSettings
from vertumnus.core.slo import Slo
from vertumnus.core.threshold_controller import ThresholdController, ThresholdSettings
from vertumnus.serve.dashboard import FOLDER
from vertumnus.serve.http import Tokeniser, create_app, serve_http
from vertumnus.serve.live_backend import LiveBackend, Watch
from vertumnus.serve.stub_ranks import StubSpeed

COMPOSITION = "4x1,2x2"
TOKEN = "control-secret"
WAIT_S = 30
COSTS = CostModel.uniform(Coefficients(d=0.01, a=0.0, b=2e-6, c=1e-4, alpha=2e-8), (1, 2, 4, 8))
KAPPA = {1: 0.8, 2: 0.85, 4: 0.9, 8: 0.9}


def word_tokeniser() -> Tokeniser:
    """One word a token, as these ranks know no model."""
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return Tokeniser(tokenizer)


class ShownPool:
    """8 prefill ranks and 2 decode ranks; from `start` to `stop`."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._listener = listener
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self._problem is not None:
            raise self._problem

    def stop(self) -> None:
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        if self._problem is not None:
            raise self._problem

    def do(self, coroutine):
        """Runs it in the pool's loop; what it returns."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT_S)

    def call(self, function, *arguments):
        async def run():
            return function(*arguments)

        return self.do(run())

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as problem:
            self._problem = problem
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        watch = Watch(Slo(0.3, 0.0001))
        self.pool = stub_pool(
            COMPOSITION,
            num_decode_ranks=2,
            speed=StubSpeed(
                prefill=COSTS,
                decode_ranks=range(8, 10),
                decode_step_s=0.01,
                copy_s_per_block=0.0001,
                switch_s=0.8,
                restart_s=1.5,
            ),
            blocks_per_rank=3000,
            telemetry=watch.telemetry,
            cost_model=COSTS,
            controller=ThresholdController(KAPPA, ThresholdSettings(window_s=5.0)),
            window_s=5.0,
            long_tokens=4000,
            pull=PullSettings(s_per_token=1e-5, latency_s=0.001),
        )
        self.pool.control_plane.is_thorough = False
        self.backend = LiveBackend(self.pool, watch)
        self.backend.start()
        await self.pool.start()
        tokeniser, config = word_tokeniser(), http_config(control_token=TOKEN, dashboard_folder=FOLDER)
        app = create_app(self.backend, tokeniser, config)
        started = asyncio.Event()
        serving = asyncio.ensure_future(serve_http(app, [self._listener], config, self._stop, started=started))
        await started.wait()
        traffic = asyncio.ensure_future(self._send_traffic())
        self._ready.set()
        await serving
        traffic.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await traffic
        self.backend.close()
        await self.pool.close()
        tokeniser.close()

    async def _send_traffic(self) -> None:
        """Some 20 requests a second with shared prefixes, a few of them long."""
        chance = random.Random(7)
        answers = set()
        try:
            for number in range(100_000):
                length = chance.choice((5000, 7000)) if chance.random() < 0.12 else chance.randrange(300, 2500)
                tokens = prompt(chance.randrange(40), length, length // 2)
                answer = asyncio.ensure_future(self.ask(f"chat-{number}", tokens, 12))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
                await asyncio.sleep(chance.expovariate(20.0))
        finally:
            for answer in answers:
                answer.cancel()
            await asyncio.gather(*answers, return_exceptions=True)

    async def ask(self, request_id: str, tokens: list[int], max_tokens: int) -> int:
        """How many tokens came back."""
        request = asked(tokens, max_tokens)
        object.__setattr__(request, "request_id", request_id)
        generation = self.backend.submit(request)
        try:
            return len([token async for token in generation])
        finally:
            generation.cancel()
