"""Runs steps of a real model on one rank."""

import torch

from vertumnus.engine.collectives import GroupLink
from vertumnus.engine.cp_attention import CpAttention
from vertumnus.engine.decode_attention import DecodeAttention
from vertumnus.engine.forward import Model
from vertumnus.engine.kernels import kernel_for
from vertumnus.engine.kv_store import KvStore
from vertumnus.engine.sampling import log_probabilities, sample
from vertumnus.engine.stages import Stages
from vertumnus.engine.step import MAX_TOP_LOGPROBS, PrefixPath, RequestOutput, Step, StepOutput
from vertumnus.engine.step_plan import AttentionShape, ExchangeCosts, StepPlan, plan_step


class ModelStepper:
    """The model with this rank's KV store. `rank` is its number in the pool."""

    def __init__(self, model: Model, store: KvStore, rank: int, costs: ExchangeCosts | None = None) -> None:
        self._model = model
        self._store = store
        self._rank = rank
        self._costs = costs or ExchangeCosts()
        self._kernel = kernel_for(store.device)
        config = model.config
        self._shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            element_bytes=model.weights.embedding.element_size(),
        )

    def refusal(self, step: Step) -> str | None:
        """Why the step cannot be run, or None. Says the same on every member of the group."""
        config = self._model.config
        for request in step.requests:
            name = f"request {request.request_id}"
            if not request.num_new_tokens:
                return f"{name} has no new token; accepted: at least one"
            if request.num_prefix_tokens < 0:
                return f"{name} has {request.num_prefix_tokens} prefix tokens; accepted: 0 or more"
            if request.num_tokens > config.max_positions:
                return f"{name} has {request.num_tokens} tokens; accepted: the model's {config.max_positions} positions"
            if not all(0 <= token < config.vocab_size for token in request.token_ids):
                return f"{name} has a token id outside the vocabulary; accepted: 0 to {config.vocab_size - 1}"
            if not 0 <= (request.num_top_logprobs or 0) <= MAX_TOP_LOGPROBS:
                return f"{name} asks for {request.num_top_logprobs} top tokens; accepted: 0 to {MAX_TOP_LOGPROBS}"
            num_blocks = -(-request.num_tokens // self._store.block_tokens)
            if len(request.blocks) != num_blocks:
                return (
                    f"{name} names {len(request.blocks)} blocks; accepted: {num_blocks} for {request.num_tokens} tokens"
                )
        return None

    @torch.inference_mode()
    def run(self, step: Step, link: GroupLink) -> StepOutput:
        """One forward pass together with the other members of the group. Raises GroupBroken if one is gone."""
        stages = Stages()
        received_before_bytes = link.received_bytes
        store, model = self._store, self._model
        plan = plan_step(step, self._rank, store.block_tokens, self._shape, self._costs, store.device)
        attention: CpAttention | DecodeAttention
        if plan.is_decode:
            attention = DecodeAttention(plan, store, self._kernel, stages, model.scale)
        else:
            attention = CpAttention(plan, link, store, self._kernel, stages, model.scale)
        x_TE = model.hidden_states(plan.token_ids, plan.positions, attention, stages)
        outputs = self._sample(plan, x_TE)
        logits_of, logits = self._all_logits(plan, x_TE)
        return StepOutput(
            step_id=step.step_id,
            rank=self._rank,
            epoch=step.epoch,
            outputs=outputs,
            timings=stages.timings(),
            received_bytes=link.received_bytes - received_before_bytes,
            num_pass_q=sum(planned.path is PrefixPath.PASS_Q for planned in plan.requests),
            logits_of=logits_of,
            logits=logits,
        )

    def _sample(self, plan: StepPlan, x_TE: torch.Tensor) -> list[RequestOutput]:
        wanted = [(n, row) for n, row in plan.sampled if plan.requests[n].request.sampling is not None]
        if not wanted:
            return []
        logits_NV = self._model.logits(x_TE[[row for _, row in wanted]]).cpu()
        outputs = []
        for (number, _), logits_V in zip(wanted, logits_NV, strict=True):
            request = plan.requests[number].request
            assert request.sampling is not None
            token_id = sample(logits_V, request.sampling, request.num_tokens)
            logprob: float | None = None
            top: list[tuple[int, float]] = []
            if request.num_top_logprobs is not None:
                logprob, top = log_probabilities(logits_V, token_id, request.num_top_logprobs)
            outputs.append(
                RequestOutput(request_id=request.request_id, token_id=token_id, logprob=logprob, top_logprobs=top)
            )
        return outputs

    def _all_logits(self, plan: StepPlan, x_TE: torch.Tensor) -> tuple[list[tuple[int, int]], bytes]:
        chosen = [planned for planned in plan.requests if planned.request.has_all_logits]
        of_rows = {
            row: planned.request.request_id
            for planned in chosen
            for row in range(planned.local_start, planned.local_end)
        }
        if not of_rows:
            return [], b""
        rows = list(of_rows)
        of = list(zip(of_rows.values(), plan.positions[rows].tolist(), strict=True))
        return of, self._model.logits(x_TE[rows]).cpu().numpy().tobytes()
