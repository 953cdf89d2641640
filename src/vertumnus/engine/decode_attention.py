"""Attention of a step in which every request has one new token and all of its blocks are on this rank.

Suffixes: N requests, S keys, B blocks, H query heads, K key/value heads, D head dimension.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vertumnus.engine.kernels import AttentionKernel
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.stages import Stages
from vertumnus.engine.step_plan import StepPlan

_LEAST_SHARE = 0.8
"""Requests go through the kernel together where the shortest has this share of the longest one's blocks."""


class DecodeAttention:
    """Attends layer by layer, as `CpAttention` does; communicates with nobody."""

    def __init__(self, plan: StepPlan, store: KvStore, kernel: AttentionKernel, stages: Stages, scale: float) -> None:
        self._plan = plan
        self._store = store
        self._kernel = kernel
        self._stages = stages
        self._scale = scale
        tables = [[slot for _, slot in planned.request.blocks] for planned in plan.requests]
        lengths = [planned.request.num_tokens for planned in plan.requests]
        self._batches = [_Batch(rows, tables, lengths, store) for rows in _alike(tables)]

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """As `CpAttention.attend`: the new keys are stored first, then each row reads all of its own."""
        plan = self._plan
        with self._stages.measure("gather"):
            self._store.write(layer, plan.written_slots, plan.written_offsets, torch.stack((k_TKD, v_TKD), 1))
        out_THD = torch.empty_like(q_THD)
        for batch in self._batches:
            with self._stages.measure("gather"):
                kv_NS2KD = batch.read(layer)
            with self._stages.measure("attention"):
                k, v = kv_NS2KD[:, :, 0], kv_NS2KD[:, :, 1]
                out_THD[batch.rows] = self._kernel.attend_each(
                    q_THD[batch.rows], k, v, batch.mask_NS, scale=self._scale
                )
        return out_THD


class _Batch:
    """Requests with about as many keys each, laid side by side; what a request has less than the longest is masked."""

    def __init__(self, rows: Sequence[int], tables: Sequence[Sequence[int]], lengths: Sequence[int], store: KvStore):
        device, num_blocks = store.device, max(len(tables[row]) for row in rows)
        num_keys = num_blocks * store.block_tokens
        # Blocks that a request has not got are its first one once more: nothing that is not its own is touched.
        slots = [[*tables[row], *[tables[row][0]] * (num_blocks - len(tables[row]))] for row in rows]
        self.rows = torch.tensor(rows, device=device)
        self._store = store
        self._slots = torch.tensor(slots, device=device).flatten()
        self._copy_B2KD = store.room_for(len(self._slots))
        num_own = torch.tensor([lengths[row] for row in rows], device=device)
        is_beyond = torch.arange(num_keys, device=device) >= num_own.unsqueeze(1)
        self._beyond = is_beyond.flatten().nonzero().flatten()
        self.mask_NS: Tensor | None = None
        if len(self._beyond):
            mask = torch.zeros(is_beyond.shape, dtype=self._copy_B2KD.dtype, device=device)
            self.mask_NS = mask.masked_fill_(is_beyond, float("-inf"))

    def read(self, layer: int) -> Tensor:
        """[N, S, 2, K, D]"""
        self._store.read_into(self._copy_B2KD, layer, self._slots)
        kv_X2KD = self._copy_B2KD.flatten(0, 1)
        # Even under a mask not a number stays not a number, and others have been in these blocks before.
        kv_X2KD.index_fill_(0, self._beyond, 0)
        return kv_X2KD.view(len(self.rows), -1, *kv_X2KD.shape[1:])


def _alike(tables: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rows of requests that go together, the longest first."""
    found: list[list[int]] = []
    for row in sorted(range(len(tables)), key=lambda row: (-len(tables[row]), row)):
        if found and len(tables[row]) >= _LEAST_SHARE * len(tables[found[-1][0]]):
            found[-1].append(row)
        else:
            found.append([row])
    return found
