"""Context-parallel attention of one step, as one rank of the group runs it.

Suffixes: T local rows, R new rows, S keys, H query heads, K key/value heads, D head dimension, C ranks of the group.

A rank's head [h0, h1) and tail [t0, t1) of a request's new tokens see the whole prefix and the new keys before them:

    keys      prefix     [0, h0)     head      [h1, t0)     tail
    head      all        all         causal
    tail      all        all         all       all          causal

Head and tail of this rank's own tokens need nobody else, so they are attended to while the others' keys are on their
way; the parts are merged by their log-sum-exp. The result is causal attention over the whole sequence, for every
degree, prefix length and placement of the prefix's blocks.
"""

import torch
from torch import Tensor

from vertumnus.engine.collectives import GroupLink, Pending
from vertumnus.engine.kernels import AttentionKernel, Partial, concatenate, merge
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.stages import Stages
from vertumnus.engine.step import PrefixPath
from vertumnus.engine.step_plan import PassQPlan, RequestPlan, StepPlan


class CpAttention:
    """Attends layer by layer, in order: `attend(0, ...)`, `attend(1, ...)`, ... Communicates on `link` only; every
    member calls the same layers."""

    def __init__(
        self, plan: StepPlan, link: GroupLink, store: KvStore, kernel: AttentionKernel, stages: Stages, scale: float
    ) -> None:
        self._plan = plan
        self._link = link
        self._store = store
        self._kernel = kernel
        self._stages = stages
        self._scale = scale
        self._coming_prefix = self._gather_prefix(0)

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """Attention output [T, H, D] of this rank's rows; stores the new keys and values assigned to this rank."""
        plan = self._plan
        with self._stages.measure("gather"):
            kv_T2KD = torch.stack((k_TKD, v_TKD), 1)
            new = self._link.all_gather(_padded(kv_T2KD, plan.num_exchanged))
            queries = None
            if plan.pass_q is not None:
                rows = q_THD.index_select(0, plan.pass_q.local_rows)
                queries = self._link.all_gather(_padded(rows, plan.pass_q.num_rows))
        with self._stages.measure("attention"):
            own = [self._attend_own(planned, q_THD, k_TKD, v_TKD) for planned in plan.requests]
        prefix_NB2KD = self._take_prefix(layer)
        with self._stages.measure("attention"):
            if prefix_NB2KD is not None:
                own = [self._attend_prefix(planned, part, q_THD, prefix_NB2KD) for planned, part in self._with(own)]
        returned = None
        if queries is not None:
            assert plan.pass_q is not None
            returned = self._attend_for_others(layer, plan.pass_q, queries)
        kv_R2KD = self._take_new(layer, kv_T2KD, new)
        with self._stages.measure("attention"):
            if plan.degree > 1:
                own = [self._attend_new(planned, part, q_THD, kv_R2KD) for planned, part in self._with(own)]
        if returned is not None:
            with self._stages.measure("wait"):
                partial_CTHX = returned.wait()
            with self._stages.measure("attention"):
                own = self._merge_returned(own, partial_CTHX)
        with self._stages.measure("attention"):
            out = [part.out for part in own if part is not None]
            return torch.cat(out) if len(out) > 1 else out[0] if out else torch.empty_like(q_THD)

    def _with(self, parts: list[Partial | None]) -> list[tuple[RequestPlan, Partial | None]]:
        return list(zip(self._plan.requests, parts, strict=True))

    def _attend_own(self, planned: RequestPlan, q: Tensor, k: Tensor, v: Tensor) -> Partial | None:
        """This rank's rows over this rank's rows; None if it has none of this request."""
        start, num_head, num_tail = planned.local_start, planned.share.num_head, planned.share.num_tail
        if not num_head:
            return None
        head = slice(start, start + num_head)
        tail = slice(start + num_head, start + num_head + num_tail)
        of_head = self._kernel.attend(q[head], k[head], v[head], is_causal=True, scale=self._scale)
        if not num_tail:
            return of_head
        of_tail = merge(
            self._kernel.attend(q[tail], k[head], v[head], is_causal=False, scale=self._scale),
            self._kernel.attend(q[tail], k[tail], v[tail], is_causal=True, scale=self._scale),
        )
        return concatenate(of_head, of_tail)

    def _attend_new(self, planned: RequestPlan, part: Partial | None, q: Tensor, kv_R2KD: Tensor) -> Partial | None:
        """Adds the new keys of other ranks: those before the head, and those between head and tail."""
        if part is None:
            return None
        taken, first = planned.share, planned.new_start
        q_own = q[planned.local_start : planned.local_end]
        if taken.head_start:
            part = merge(part, self._over(q_own, kv_R2KD[first : first + taken.head_start]))
        if taken.num_tail and taken.tail_start > taken.head_end:
            between = kv_R2KD[first + taken.head_end : first + taken.tail_start]
            of_head = Partial(part.out[: taken.num_head], part.lse[: taken.num_head])
            of_tail = Partial(part.out[taken.num_head :], part.lse[taken.num_head :])
            part = concatenate(of_head, merge(of_tail, self._over(q_own[taken.num_head :], between)))
        return part

    def _attend_prefix(self, planned: RequestPlan, part: Partial | None, q: Tensor, kv_NB2KD: Tensor) -> Partial | None:
        num_tokens = planned.request.num_prefix_tokens
        if part is None or not num_tokens or planned.path is not PrefixPath.PASS_KV:
            return part
        num_blocks = len(planned.request.prefix_blocks(self._store.block_tokens))
        blocks = kv_NB2KD[planned.prefix_start_block : planned.prefix_start_block + num_blocks]
        prefix_S2KD = blocks.flatten(0, 1)[:num_tokens]
        return merge(part, self._over(q[planned.local_start : planned.local_end], prefix_S2KD))

    def _over(self, q_THD: Tensor, kv_S2KD: Tensor) -> Partial:
        return self._kernel.attend(q_THD, kv_S2KD[:, 0], kv_S2KD[:, 1], is_causal=False, scale=self._scale)

    # Pass-KV

    def _gather_prefix(self, layer: int) -> Pending | None:
        """Sends for a layer's prefix; None where all of it is here."""
        plan = self._plan
        if plan.degree == 1 or not plan.num_prefix_slots or layer == self._store.num_layers:
            return None
        with self._stages.measure("gather"):
            return self._link.all_gather(_padded(self._store.read(layer, plan.prefix_slots), plan.num_prefix_slots))

    def _take_prefix(self, layer: int) -> Tensor | None:
        """The layer's prefix in order of position. The next layer's is sent for before this one's is used."""
        plan = self._plan
        if not plan.num_prefix_slots:
            return None
        if self._coming_prefix is None:
            with self._stages.measure("gather"):
                return self._store.read(layer, plan.prefix_slots)
        with self._stages.measure("wait"):
            gathered = self._coming_prefix.wait()
        self._coming_prefix = self._gather_prefix(layer + 1)
        with self._stages.measure("gather"):
            return gathered.flatten(0, 1).index_select(0, plan.prefix_blocks)

    # New keys and values

    def _take_new(self, layer: int, kv_T2KD: Tensor, new: Pending) -> Tensor:
        """All new keys and values of the step in order of request and position; keeps those assigned to this rank."""
        plan = self._plan
        if plan.degree == 1:
            kv_R2KD = kv_T2KD
        else:
            with self._stages.measure("wait"):
                gathered = new.wait()
            with self._stages.measure("gather"):
                kv_R2KD = gathered.flatten(0, 1).index_select(0, plan.new_rows)
        with self._stages.measure("gather"):
            kept = kv_R2KD if plan.degree == 1 else kv_R2KD.index_select(0, plan.written_rows)
            self._store.write(layer, plan.written_slots, plan.written_offsets, kept)
        return kv_R2KD

    # Pass-Q

    def _attend_for_others(self, layer: int, pass_q: PassQPlan, queries: Pending) -> Pending:
        """Every member's queries over the prefix blocks held here; the partial results go back to their owners."""
        with self._stages.measure("wait"):
            q_QHD = queries.wait().flatten(0, 1)
        num_heads, head_dim = q_QHD.shape[1:]
        partial = torch.zeros((q_QHD.shape[0], num_heads, head_dim + 1), dtype=torch.float32, device=q_QHD.device)
        partial[..., head_dim] = float("-inf")
        for rows, slots, num_tokens in pass_q.held:
            if not num_tokens:
                continue
            with self._stages.measure("gather"):
                kv_S2KD = self._store.read(layer, slots).flatten(0, 1)[:num_tokens]
                q_rows = q_QHD.index_select(0, rows)
            with self._stages.measure("attention"):
                out, lse = self._over(q_rows, kv_S2KD)
                partial[rows] = torch.cat((out.float(), lse.unsqueeze(-1)), -1)
        with self._stages.measure("gather"):
            return self._link.all_to_all(partial.view(self._plan.degree, pass_q.num_rows, num_heads, head_dim + 1))

    def _merge_returned(self, own: list[Partial | None], partial_CTHX: Tensor) -> list[Partial | None]:
        start = 0
        merged: list[Partial | None] = []
        for planned, part in self._with(own):
            if planned.path is PrefixPath.PASS_Q:
                end = start + planned.share.num_tokens
                if part is not None:
                    for piece in partial_CTHX[:, start:end]:
                        part = merge(part, Partial(piece[..., :-1].to(part.out.dtype), piece[..., -1]))
                start = end
            merged.append(part)
        return merged


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    """The rows, followed by as many more as make `num_rows`; what those hold is never read."""
    if rows.shape[0] == num_rows:
        return rows
    padded = rows.new_zeros((num_rows, *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    return padded
