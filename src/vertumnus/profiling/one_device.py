"""A model on one device in this process: what a single GPU can be profiled with, at degree 1.

No ranks, no copies, no switches: those need more than one device. Steps are the engine's own.
"""

import time
from pathlib import Path

import torch

from vertumnus.core.composition import RankGroup
from vertumnus.engine.collectives import GroupLink
from vertumnus.engine.forward import Model
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.engine.stepper import ModelStepper
from vertumnus.engine.weights import load_weights, torch_dtype
from vertumnus.profiling.grid import BLOCK_TOKENS, StepCell
from vertumnus.serve.calibration import CalibrationFailed, work_step

_KV_RATIO = 0.9
"""Of the memory that the weights leave."""


class OneDevice:
    """Weights and KV blocks on `device`; raises ConfigError for a model that cannot be used."""

    def __init__(self, folder: Path, dtype: str | None, device: torch.device, num_slots: int) -> None:
        config = ModelConfig.from_folder(folder)
        chosen = config.dtype if dtype is None else Dtype(dtype)
        kv_bytes = BLOCK_TOKENS * config.kv_bytes_per_token(chosen)
        memory = torch.zeros(num_slots * kv_bytes, dtype=torch.uint8, device=device).view(torch_dtype(chosen))
        store = KvStore(
            memory,
            num_slots=num_slots,
            num_layers=config.num_layers,
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        self._device = device
        self._store_bytes = num_slots * kv_bytes
        self._stepper = ModelStepper(Model(config, load_weights(folder, config, chosen, device)), store, 0)

    @property
    def kv_bytes(self) -> int:
        """What could hold KV blocks beside the weights; 0 where the device does not say."""
        if self._device.type != "cuda":
            return 0
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        return int(_KV_RATIO * (free_bytes + self._store_bytes))

    async def step(self, cell: StepCell) -> float:
        """Seconds of one step, until the device is done with it. Raises CalibrationFailed where it is refused."""
        work = [(cell.suffix_tokens, cell.prefix_tokens)] * cell.num_requests
        step = work_step(RankGroup(0, 1), 0, BLOCK_TOKENS, work)
        refusal = self._stepper.refusal(step)
        if refusal is not None:
            raise CalibrationFailed(f"a step of {work} tokens (new, cached) cannot be measured: {refusal}")
        self._wait()
        started_s = time.perf_counter()
        try:
            self._stepper.run(step, GroupLink(0, 1))
        except torch.OutOfMemoryError:
            raise CalibrationFailed(f"a step of {work} tokens (new, cached) does not fit the device's memory") from None
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
