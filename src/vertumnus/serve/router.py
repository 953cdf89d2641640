"""The router's process: HTTP in front, the control plane in the middle, ranks behind.

A supervisor starts it, tells it what to do on standard input and starts it again if it dies; ranks outlive it, and the
next one finds their KV. It ends when the supervisor's end of standard input closes.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import uvloop

from vertumnus.core.awaited import WaitSettings
from vertumnus.core.composition import Composition, Layout, RankGroup, Topology, lay_out
from vertumnus.core.control_plane import ControlPlane
from vertumnus.core.controllers import make_controller
from vertumnus.core.cost import CostModel
from vertumnus.core.drift import RefitSettings
from vertumnus.core.index.replication import ReplicationSettings
from vertumnus.core.moves import MoveSettings
from vertumnus.core.placement import names_preferred_degrees
from vertumnus.core.policies import make_policy
from vertumnus.core.profile import load_profile
from vertumnus.core.pulls import PullSettings
from vertumnus.core.queueing import Discipline
from vertumnus.core.settings import ControlPlaneSettings
from vertumnus.core.slo import Slo
from vertumnus.core.worker_caches import WorkerCaches
from vertumnus.engine.errors import PoolError
from vertumnus.engine.model_config import ModelConfig
from vertumnus.engine.pool import RankPool
from vertumnus.errors import ConfigError, VertumnusError
from vertumnus.serve.calibration import Calibration, calibrate
from vertumnus.serve.dashboard import FOLDER as DASHBOARD
from vertumnus.serve.descriptors import connections_that_fit
from vertumnus.serve.garbage import collect_rarely
from vertumnus.serve.http import HttpConfig, Tokeniser, create_app, serve_http, stop_on_signals
from vertumnus.serve.live_backend import LiveBackend, Watch
from vertumnus.serve.live_pool import LivePool
from vertumnus.serve.live_settings import LiveSettings
from vertumnus.serve.rank_launch import blocks_per_rank, check_fit, pool_config
from vertumnus.serve.router_spec import Orders, RouterReport, RouterSpec
from vertumnus.serve.telemetry import Telemetry, together

LOG = logging.getLogger(__name__)

NO_PARENT = bytes(16)
"""What ranks call the block before the first."""


class Router:
    """Builds a live pool from a specification and serves it."""

    def __init__(self, spec: RouterSpec, telemetry: Telemetry | None = None) -> None:
        """`telemetry`: who else is told what the pool tells of itself."""
        self._spec = spec
        self._config = spec.config
        self._watch = Watch(slo=Slo.parse(self._config.slo))
        self._others = [] if telemetry is None else [telemetry]
        self._kappa: Mapping[int, float] | None = None
        """Where the profile knows it."""
        self._model = ModelConfig.from_folder(self._config.model)
        self._blocks_per_rank = blocks_per_rank(self._config, self._model)
        self._topology = Topology(self._config.ranks)
        self._degrees = tuple(degree for degree in (1, 2, 4, 8) if degree <= self._config.ranks)

    async def run(self) -> None:
        """Until a signal or the supervisor says to stop, and what was accepted is answered."""
        config = self._config
        tokeniser = Tokeniser.from_folder(config.model)
        stop = asyncio.Event()
        started = asyncio.Event()
        watching = asyncio.ensure_future(_end_with_supervisor())
        ranks = await self._ranks()
        try:
            pool = await self._pool(ranks)
        except BaseException:
            await ranks.close()
            raise
        backend = LiveBackend(pool, self._watch, kappa=self._kappa)
        try:
            backend.start()
            http_config = self._http_config(pool)
            tokeniser.max_waiting = http_config.max_waiting_encodes
            app = create_app(backend, tokeniser, http_config)
            sockets = [socket.socket(fileno=self._spec.http_fd)]
            with stop_on_signals(stop):
                serving = asyncio.ensure_future(serve_http(app, sockets, http_config, stop, started=started))
                failing = asyncio.ensure_future(pool.failed.wait())
                await asyncio.wait([asyncio.ensure_future(started.wait()), serving], return_when="FIRST_COMPLETED")
                collect_rarely()
                self._report(RouterReport(kind="ready"))
                await asyncio.wait([serving, failing], return_when=asyncio.FIRST_COMPLETED)
                failing.cancel()
                stop.set()
                await serving
        finally:
            watching.cancel()
            backend.close()
            failure = pool.failure
            await pool.close()
            tokeniser.close()
        if failure is not None:
            raise failure

    def _report(self, what: RouterReport) -> None:
        os.write(self._spec.report_fd, what.to_line())

    async def _ranks(self) -> RankPool:
        spec = self._spec
        wanted = pool_config(self._config, self._model, listen_fd=spec.pool_fd, token=spec.pool_token)
        if not wanted.is_launched:
            ranks = await (RankPool.start(wanted) if spec.is_first else RankPool.attach(wanted))
            try:
                check_fit(ranks, self._config, self._model)
            except ConfigError:
                await ranks.close()
                raise
            return ranks
        if not spec.is_first:
            try:
                return await RankPool.attach(wanted)
            except PoolError as error:
                LOG.warning("the ranks are started anew: %s", error)
        return await RankPool.start(wanted)

    async def _pool(self, ranks: RankPool) -> LivePool:
        config = self._config
        caches = WorkerCaches(
            self._blocks_per_rank, config.block_tokens, is_real=True, spares_last_copies=config.spares_last_copies
        )
        if not self._spec.is_first:
            await self._restore(ranks, caches)
        layout = await self._layout(ranks)
        epoch = ranks.highest_epoch
        if config.profile != "auto":
            profile = load_profile(config.profile)
            cost_model, kappa = profile.cost_model(), profile.kappa
            pulls = PullSettings.of_profile(profile, from_any_worker=config.pulls == "any")
        else:
            calibration = await self._calibration(ranks, epoch)
            epoch = max(epoch, calibration.epoch)
            cost_model, kappa = calibration.cost_model, None
            pulls = PullSettings(
                s_per_token=calibration.copy_s_per_token,
                latency_s=calibration.copy_latency_s,
                from_any_worker=config.pulls == "any",
            )
        self._kappa = kappa
        pool = LivePool(
            ranks=ranks,
            control_plane=self._control_plane(layout, cost_model, kappa, pulls, epoch + 1),
            settings=LiveSettings(
                num_prefill_ranks=config.ranks,
                num_decode_ranks=config.decode_ranks,
                block_tokens=config.block_tokens,
                blocks_per_rank=self._blocks_per_rank,
                max_sequence_tokens=self._model.max_positions,
                vocab_size=self._model.vocab_size,
                max_queued_requests=config.max_queued_requests,
                max_wait_s=config.max_wait_s,
                max_decode_sequences=config.max_decode_sequences,
            ),
            hash_key=self._spec.hash_key,
            telemetry=together([self._watch.telemetry, _Orders(self._spec.orders, self._report), *self._others]),
            caches=caches,
        )
        await pool.start()
        await self._repeat_orders(pool)
        return pool

    async def _repeat_orders(self, pool: LivePool) -> None:
        """What an operator has asked an earlier router for still holds."""
        orders = Orders(**(self._spec.orders or {}))
        if orders.composition is not None:
            pool.set_composition(Composition.parse(orders.composition))
        elif orders.is_paused:
            pool.pause_controller(True)
        if orders.is_draining:
            await pool.drain(0.0)

    async def _restore(self, ranks: RankPool, caches: WorkerCaches) -> None:
        """What the prefill ranks hold, by what they say."""
        for rank in range(self._config.ranks):
            labels = await ranks.labels(rank)
            caches.restore(
                rank, [(each.slot, each.label, None if each.parent == NO_PARENT else each.parent) for each in labels]
            )
        LOG.info("found %d blocks", sum(caches.num_restored(rank) for rank in range(self._config.ranks)))

    async def _layout(self, ranks: RankPool) -> Layout:
        """The groups that the ranks serve as already, if they are all in one; else the configured composition."""
        if not self._spec.is_first:
            keys = {(await ranks.status(rank)).group for rank in range(self._config.ranks)}
            groups = sorted(RankGroup(key.first_rank, key.degree) for key in keys if key is not None)
            if [rank for group in groups for rank in group.ranks] == list(range(self._config.ranks)):
                return tuple(groups)
        return lay_out(self._config.initial_composition, self._topology)

    async def _calibration(self, ranks: RankPool, epoch: int) -> Calibration:
        if self._spec.calibration is not None:
            return Calibration.from_json(self._spec.calibration)
        calibration = await calibrate(
            ranks,
            self._degrees,
            epoch=epoch,
            block_tokens=self._config.block_tokens,
            blocks_per_rank=self._blocks_per_rank,
            step_tokens=self._config.step_tokens,
        )
        self._report(RouterReport(kind="calibrated", calibration=calibration.to_json()))
        return calibration

    def _control_plane(
        self,
        layout: Layout,
        cost_model: CostModel,
        kappa: Mapping[int, float] | None,
        pulls: PullSettings,
        epoch: int,
    ) -> ControlPlane:
        config = self._config
        policy = make_policy(config.policy)
        has_replication = config.replication and names_preferred_degrees(policy)
        return ControlPlane(
            layout=layout,
            topology=self._topology,
            cost_model=cost_model,
            policy=policy,
            settings=ControlPlaneSettings(
                block_tokens=config.block_tokens,
                blocks_per_rank=self._blocks_per_rank,
                discipline=Discipline(config.queue),
                step_tokens=config.step_tokens,
                max_sequence_tokens=self._model.max_positions,
                window_s=config.window_s,
                outlives_controller_faults=True,
                replication=ReplicationSettings(min_relief_s=config.min_relief_s) if has_replication else None,
                pull=None if config.pulls == "none" else pulls,
                refit=RefitSettings() if config.refit else None,
                moves=MoveSettings() if config.moves else None,
                waits=WaitSettings() if config.waits else None,
            ),
            controller=None if config.controller == "none" else make_controller(config.controller, cost_model, kappa),
            epoch=epoch,
        )

    def _http_config(self, pool: LivePool) -> HttpConfig:
        config = self._config
        return HttpConfig(
            model_name=config.model_name,
            max_context_tokens=pool.settings.max_tokens,
            vocab_size=self._model.vocab_size,
            stop_token_ids=frozenset(self._model.stop_token_ids),
            api_keys=config.api_keys,
            control_token=self._spec.control_token,
            dashboard_cookie=self._dashboard_cookie(),
            dashboard_folder=DASHBOARD,
            has_public_metrics=config.public_metrics,
            max_body_bytes=None if config.max_body_mib is None else config.max_body_mib << 20,
            max_connections=connections_that_fit(config.max_connections, config.ranks + config.decode_ranks),
            drain_timeout_s=config.drain_timeout_s,
        )

    def _dashboard_cookie(self) -> str:
        """The same for every router in turn: who watches goes on watching when one dies."""
        token = self._spec.control_token.encode()
        return blake2b(token, key=self._spec.hash_key, digest_size=32, person=b"vertumnus-cookie").hexdigest()


class _Orders(Telemetry):
    """Passes an operator's orders on to the supervisor, for the next router."""

    def __init__(self, given: Mapping[str, Any] | None, report: Callable[[RouterReport], None]) -> None:
        self._orders = Orders(**(given or {}))
        self._report = report

    def composition_requested(self, now_s: float, composition: Composition) -> None:
        self._pass_on(replace(self._orders, composition=str(composition), is_paused=True))

    def controller_paused(self, now_s: float, is_paused: bool) -> None:
        # Without the controller, the composition that was asked for last stays.
        composition = self._orders.composition if is_paused else None
        self._pass_on(replace(self._orders, composition=composition, is_paused=is_paused))

    def pool_drained(self, now_s: float, is_draining: bool) -> None:
        self._pass_on(replace(self._orders, is_draining=is_draining))

    def _pass_on(self, orders: Orders) -> None:
        if orders != self._orders:
            self._orders = orders
            self._report(RouterReport(kind="ordered", orders=orders.to_json()))


async def _end_with_supervisor() -> None:
    """Ends this process at once when standard input closes: whoever started it is gone."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(1024):
        pass
    os._exit(1)  # its sockets are ours alone now, and ranks wait at one of them for somebody who never comes


def main() -> None:
    """`python -m vertumnus.serve.router`, with a `RouterSpec` as the first line of standard input."""
    spec = RouterSpec.from_line(sys.stdin.buffer.readline())
    for fd in (spec.http_fd, spec.pool_fd, spec.report_fd):
        os.set_inheritable(fd, False)  # the ranks have no business with them
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    # It tells of its start and end, and of every client that talks nonsense: as many lines as a client likes.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    try:
        uvloop.run(Router(spec).run())
    except VertumnusError as error:
        failed = RouterReport(kind="failed", message=str(error), is_input=isinstance(error, ConfigError))
        os.write(spec.report_fd, failed.to_line())
        sys.exit(1)


if __name__ == "__main__":
    main()
