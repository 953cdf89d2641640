"""A pool of ranks in threads of one process, with the bookkeeping of blocks that a pool's owner would do."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tests.engine.models import SavedModel
from tests.engine.thread_group import on_every_rank

from vertumnus.engine.forward import Model
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.model_config import Dtype
from vertumnus.engine.step import Address, RequestOutput, Step, StepOutput, StepRequest
from vertumnus.engine.stepper import ModelStepper
from vertumnus.engine.weights import load_weights, torch_dtype


class ThreadRanks:
    """`num_ranks` steppers of one model, each with its own KV store, empty slots filled with NaN."""

    def __init__(
        self,
        saved: SavedModel,
        num_ranks: int,
        *,
        block_tokens: int = 4,
        num_slots: int = 128,
        dtype: Dtype | None = None,
    ) -> None:
        config, dtype = saved.config, dtype or saved.dtype
        model = Model(config, load_weights(saved.folder, config, dtype))
        size = num_slots * config.num_layers * block_tokens * 2 * config.num_kv_heads * config.head_dim
        self.block_tokens = block_tokens
        self.stores = [
            KvStore(
                torch.full((size,), float("nan"), dtype=torch_dtype(dtype)),
                num_slots=num_slots,
                num_layers=config.num_layers,
                block_tokens=block_tokens,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            )
            for _ in range(num_ranks)
        ]
        self.steppers = [ModelStepper(model, store, rank) for rank, store in enumerate(self.stores)]
        self._free = [list(range(num_slots - 1, -1, -1)) for _ in range(num_ranks)]
        self._num_steps = 0

    def new_blocks(self, ranks: Sequence[int], num_tokens: int, given: Sequence[Address] = ()) -> list[Address]:
        """Block table of a sequence: `given`, then new blocks over the ranks in turn, as many as the tokens need."""
        table = list(given)
        while len(table) * self.block_tokens < num_tokens:
            rank = ranks[len(table) % len(ranks)]
            table.append((rank, self._free[rank].pop()))
        return table

    def step(self, first_rank: int, degree: int, requests: Sequence[StepRequest]) -> list[StepOutput]:
        """Runs one step on every member of the group."""
        self._num_steps += 1
        step = Step(step_id=self._num_steps, first_rank=first_rank, degree=degree, epoch=1, requests=requests)
        members = self.steppers[first_rank : first_rank + degree]
        refusals = {stepper.refusal(step) for stepper in members}
        assert refusals == {None}
        return on_every_rank(degree, lambda index, link: members[index].run(step, link))

    def logits(self, first_rank: int, degree: int, requests: Sequence[StepRequest]) -> dict[int, torch.Tensor]:
        """Logits [R, V] of every new position, by request id."""
        outputs = self.step(first_rank, degree, [replace(request, has_all_logits=True) for request in requests])
        rows: dict[int, dict[int, torch.Tensor]] = {request.request_id: {} for request in requests}
        for output in outputs:
            if output.logits_of:
                found = torch.from_numpy(np.frombuffer(output.logits, dtype=np.float32).copy())
                for (request_id, position), row in zip(
                    output.logits_of, found.view(len(output.logits_of), -1), strict=True
                ):
                    assert position not in rows[request_id]
                    rows[request_id][position] = row
        return {
            request.request_id: torch.stack(
                [rows[request.request_id][p] for p in range(request.num_prefix_tokens, request.num_tokens)]
            )
            for request in requests
        }

    def sampled(self, first_rank: int, degree: int, requests: Sequence[StepRequest]) -> dict[int, RequestOutput]:
        """What each request's owner drew, by request id."""
        found = [out for output in self.step(first_rank, degree, requests) for out in output.outputs]
        by_id = {out.request_id: out for out in found}
        assert len(by_id) == len(found)
        return by_id

    def kv(self, blocks: Sequence[Address], num_tokens: int) -> torch.Tensor:
        """[layers, num_tokens, 2, K, D] of a sequence, wherever its blocks lie."""
        return torch.cat([self.stores[rank].blocks[slot] for rank, slot in blocks], 1)[:, :num_tokens]
