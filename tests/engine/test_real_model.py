"""SmolLM2 itself: float32 to the reference's tokens, bfloat16 as near as its rounding allows."""

import os
from functools import cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import transformers
from tests.engine.models import SavedModel, smollm2_folder
from tests.engine.thread_ranks import ThreadRanks

from vertumnus.engine.model_config import Dtype, ModelConfig
from vertumnus.engine.step import Sampling, StepRequest

PROMPTS = [
    "The capital of France is",
    "In the beginning the Universe was created. This has made a lot of people",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
]


@cache
def smollm2(dtype: Dtype) -> SavedModel:
    folder = smollm2_folder()
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype.value)).eval()
    return SavedModel(folder=folder, config=ModelConfig.from_folder(folder), reference=reference)


@cache
def token_ids(prompt: str) -> tuple[int, ...]:
    return tuple(transformers.AutoTokenizer.from_pretrained(smollm2_folder())(prompt)["input_ids"])


@pytest.mark.parametrize("degree", [2, 8])
def test_float32_prefill_at_any_degree_and_greedy_decode_give_the_reference_s_tokens(degree):
    saved = smollm2(Dtype.FLOAT32)
    prompt = list(token_ids(PROMPTS[1]))
    ranks = ThreadRanks(saved, degree, block_tokens=16, num_slots=16)
    blocks = ranks.new_blocks(range(degree), len(prompt) + 16)
    found, num_done = list(prompt), 0
    while len(found) < len(prompt) + 16:
        step = StepRequest(
            request_id=0,
            token_ids=found[num_done:],
            num_prefix_tokens=num_done,
            blocks=blocks[: -(-len(found) // 16)],
            sampling=Sampling(),
        )
        num_done = len(found)
        found.append(ranks.sampled(0, degree, [step])[0].token_id)
    with torch.inference_mode():
        expected = saved.reference.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None
        )
    assert found == expected[0].tolist()


def test_bfloat16_picks_the_reference_s_token_unless_its_two_best_are_within_rounding():
    saved = smollm2(Dtype.BFLOAT16)
    ranks = ThreadRanks(saved, 2, block_tokens=16, num_slots=16, dtype=Dtype.BFLOAT16)
    batch = [
        StepRequest(
            request_id=n,
            token_ids=token_ids(prompt),
            num_prefix_tokens=0,
            blocks=ranks.new_blocks(range(2), len(token_ids(prompt))),
        )
        for n, prompt in enumerate(PROMPTS)
    ]
    num_compared = 0
    for n, logits in ranks.logits(0, 2, batch).items():
        best = saved.logits(list(token_ids(PROMPTS[n]))).topk(2, -1)
        # bfloat16 has 8 significant bits: neighbours near x lie |x| / 128 apart, and both sides round.
        is_clear = best.values[:, 0] - best.values[:, 1] > best.values[:, 0].abs() / 64
        num_compared += int(is_clear.sum())
        assert torch.equal(logits.argmax(-1)[is_clear], best.indices[:, 0][is_clear])
    assert num_compared > 20
