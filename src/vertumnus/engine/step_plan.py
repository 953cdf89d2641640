"""A step, worked out for one rank: which rows to compute, to exchange, to read and to write.

Every member works out the same step from the same data; what they must agree on (shapes of exchanges, the way a prefix
is attended to) follows from the step alone. Rows: a *local* row is one of this rank's new tokens, packed request by
request, head before tail; a *new* row is one of the step's new tokens in order of request and position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vertumnus.engine.step import PrefixPath, Step, StepRequest
from vertumnus.engine.zigzag import Share, owner_of_last, share


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeCosts:
    """What decides between the two prefix paths; only the ratio matters.

    link_bytes_per_s: what one rank receives from the others. pairs_per_s: query-key pairs (of all heads of one layer)
    that one rank attends to.
    """

    link_bytes_per_s: float = 5e8
    pairs_per_s: float = 3e7


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPlan:
    """One request seen from one rank. `local_start`: its first local row; `new_start`: its first new row."""

    request: StepRequest
    share: Share
    local_start: int
    new_start: int
    path: PrefixPath
    prefix_start_block: int
    """Of a pass-KV request: where its prefix starts in the gathered blocks, counted in blocks."""

    @property
    def local_end(self) -> int:
        return self.local_start + self.share.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PassQPlan:
    """The requests whose queries travel. `local_rows`: this rank's rows of them; `num_rows`: the most that a member
    has; `held`: per request, the gathered rows of its queries, and the slots and lengths of its blocks held here."""

    local_rows: Tensor
    num_rows: int
    held: Sequence[tuple[Tensor, Tensor, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    degree: int
    requests: Sequence[RequestPlan]
    token_ids: Tensor
    """[local rows]"""
    positions: Tensor
    """[local rows]"""
    num_exchanged: int
    """Rows that each member sends: the most that one has; the others pad."""
    new_rows: Tensor
    """[new rows], where each lies among the members' exchanged rows laid end to end."""
    written_rows: Tensor
    """The new rows whose block lies on this rank, with `written_slots` and `written_offsets`."""
    written_slots: Tensor
    written_offsets: Tensor
    prefix_slots: Tensor
    """Slots of the pass-KV prefixes that this rank contributes, in order."""
    num_prefix_slots: int
    """How many blocks each member sends: the most that one has."""
    prefix_blocks: Tensor
    """[prefix blocks in order of request and position], where each lies among the members' blocks laid end to end."""
    pass_q: PassQPlan | None
    sampled: Sequence[tuple[int, int]]
    """(request, local row) of the last new positions that this rank computes."""

    @property
    def is_decode(self) -> bool:
        """One new token for each request, all on this rank."""
        return self.degree == 1 and all(planned.request.num_new_tokens == 1 for planned in self.requests)


def choose_path(
    request: StepRequest, degree: int, first_rank: int, block_tokens: int, shape: AttentionShape, costs: ExchangeCosts
) -> PrefixPath:
    """The quicker way to attend to a prefix, per layer and for the slowest member.

    With P prefix and R new tokens, C ranks, n the tokens of the prefix on the member that holds most of it, and row
    bytes h = H*D*e of queries, g = K*D*e of keys or of values:

        pass-KV   receives (C-1) * n * 2g          attends to (R / C) * P pairs
        pass-Q    receives (C-1) * (R / C) * (h + 4*H*(D+1))   attends to R * n pairs

    (the returned partial results are float32, D values and one log-sum-exp per head). Even placement makes the pairs
    equal, and the bytes decide.
    """
    if degree == 1 or not request.num_prefix_tokens:
        return PrefixPath.PASS_KV
    if request.prefix_path is not PrefixPath.AUTO:
        return request.prefix_path
    members = [rank - first_rank for rank, _ in request.prefix_blocks(block_tokens)]
    on_member = np.bincount(members, minlength=degree)
    held_tokens = int(on_member.max()) * block_tokens
    per_rank = max(share(request.num_new_tokens, degree, member).num_tokens for member in range(degree))
    key_bytes = shape.num_kv_heads * shape.head_dim * shape.element_bytes
    query_bytes = shape.num_heads * (shape.head_dim * shape.element_bytes + 4 * (shape.head_dim + 1))
    by_kv_s = (degree - 1) * held_tokens * 2 * key_bytes / costs.link_bytes_per_s
    by_kv_s += per_rank * request.num_prefix_tokens / costs.pairs_per_s
    by_q_s = (degree - 1) * per_rank * query_bytes / costs.link_bytes_per_s
    by_q_s += request.num_new_tokens * held_tokens / costs.pairs_per_s
    return PrefixPath.PASS_Q if by_q_s < by_kv_s else PrefixPath.PASS_KV


def plan_step(
    step: Step, rank: int, block_tokens: int, shape: AttentionShape, costs: ExchangeCosts, device: torch.device
) -> StepPlan:
    """Works the step out for `rank`, a member of its group."""
    degree, first_rank, index = step.degree, step.first_rank, rank - step.first_rank
    shares = [[share(request.num_new_tokens, degree, member) for member in range(degree)] for request in step.requests]
    paths = [choose_path(request, degree, first_rank, block_tokens, shape, costs) for request in step.requests]
    num_exchanged = max(sum(of_request[member].num_tokens for of_request in shares) for member in range(degree))

    planned: list[RequestPlan] = []
    token_ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    new_rows: list[np.ndarray] = []
    sent_rows = [member * num_exchanged for member in range(degree)]
    sampled: list[tuple[int, int]] = []
    local_start = new_start = prefix_start = 0
    for number, (request, of_request, path) in enumerate(zip(step.requests, shares, paths, strict=True)):
        mine = of_request[index]
        ids = np.asarray(request.token_ids, dtype=np.int64)
        local = np.r_[mine.head_start : mine.head_end, mine.tail_start : mine.tail_end]
        rows = np.empty(request.num_new_tokens, dtype=np.int64)
        for member, taken in enumerate(of_request):
            start = sent_rows[member]
            rows[taken.head_start : taken.head_end] = np.arange(start, start + taken.num_head)
            rows[taken.tail_start : taken.tail_end] = np.arange(start + taken.num_head, start + taken.num_tokens)
            sent_rows[member] += taken.num_tokens
        if owner_of_last(request.num_new_tokens, degree) == index:
            # The last position is the end of the tail, or of the head where there is no tail.
            sampled.append((number, local_start + mine.num_tokens - 1))
        token_ids.append(ids[local])
        positions.append(request.num_prefix_tokens + local)
        new_rows.append(rows)
        planned.append(
            RequestPlan(
                request=request,
                share=mine,
                local_start=local_start,
                new_start=new_start,
                path=path,
                prefix_start_block=prefix_start,
            )
        )
        local_start += mine.num_tokens
        new_start += request.num_new_tokens
        if path is PrefixPath.PASS_KV:
            prefix_start += len(request.prefix_blocks(block_tokens))

    prefix_slots, num_prefix_slots, prefix_blocks = _plan_gather(planned, degree, first_rank, index, block_tokens)
    return StepPlan(
        degree=degree,
        requests=planned,
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        num_exchanged=num_exchanged,
        new_rows=_tensor(new_rows, device),
        **_plan_writes(planned, rank, block_tokens, device),
        prefix_slots=_tensor([prefix_slots], device),
        num_prefix_slots=num_prefix_slots,
        prefix_blocks=_tensor([prefix_blocks], device),
        pass_q=_plan_pass_q(planned, shares, rank, block_tokens, device),
        sampled=sampled,
    )


def _plan_gather(
    planned: Sequence[RequestPlan], degree: int, first_rank: int, index: int, block_tokens: int
) -> tuple[np.ndarray, int, np.ndarray]:
    """Who sends which blocks of the pass-KV prefixes, and where each arrives."""
    addresses = [
        address
        for plan in planned
        if plan.path is PrefixPath.PASS_KV
        for address in plan.request.prefix_blocks(block_tokens)
    ]
    if not addresses:
        return np.empty(0, dtype=np.int64), 0, np.empty(0, dtype=np.int64)
    table = np.asarray(addresses, dtype=np.int64)
    members = table[:, 0] - first_rank
    counts = np.bincount(members, minlength=degree)
    most = int(counts.max())
    arrival = np.empty(len(table), dtype=np.int64)
    for member in range(degree):
        arrival[members == member] = member * most + np.arange(counts[member])
    return table[members == index, 1], most, arrival


def _plan_writes(
    planned: Sequence[RequestPlan], rank: int, block_tokens: int, device: torch.device
) -> dict[str, Tensor]:
    rows, slots, offsets = [], [], []
    for plan in planned:
        request = plan.request
        position = np.arange(request.num_prefix_tokens, request.num_tokens)
        first_block = request.num_prefix_tokens // block_tokens
        table = np.asarray(request.blocks[first_block:], dtype=np.int64)
        address = table[position // block_tokens - first_block]
        is_mine = address[:, 0] == rank
        rows.append((plan.new_start + np.arange(request.num_new_tokens))[is_mine])
        slots.append(address[is_mine, 1])
        offsets.append(position[is_mine] % block_tokens)
    return {
        "written_rows": _tensor(rows, device),
        "written_slots": _tensor(slots, device),
        "written_offsets": _tensor(offsets, device),
    }


def _plan_pass_q(
    planned: Sequence[RequestPlan],
    shares: Sequence[Sequence[Share]],
    rank: int,
    block_tokens: int,
    device: torch.device,
) -> PassQPlan | None:
    chosen = [number for number, plan in enumerate(planned) if plan.path is PrefixPath.PASS_Q]
    if not chosen:
        return None
    degree = len(shares[0])
    num_rows = max(sum(shares[number][member].num_tokens for number in chosen) for member in range(degree))
    sent = [member * num_rows for member in range(degree)]
    local_rows: list[np.ndarray] = []
    held: list[tuple[Tensor, Tensor, int]] = []
    for number in chosen:
        plan, request = planned[number], planned[number].request
        local_rows.append(np.arange(plan.local_start, plan.local_end))
        queries = [np.arange(sent[m], sent[m] + shares[number][m].num_tokens) for m in range(degree)]
        for member in range(degree):
            sent[member] += shares[number][member].num_tokens
        prefix = request.prefix_blocks(block_tokens)
        mine = [(block, slot) for block, (holder, slot) in enumerate(prefix) if holder == rank]
        # Only the prefix's last block may be partly filled; it comes last here too.
        num_tokens = sum(min(block_tokens, request.num_prefix_tokens - block * block_tokens) for block, _ in mine)
        slots = np.asarray([slot for _, slot in mine], dtype=np.int64)
        held.append((_tensor(queries, device), _tensor([slots], device), num_tokens))
    return PassQPlan(local_rows=_tensor(local_rows, device), num_rows=num_rows, held=held)


def _tensor(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)).to(device)
