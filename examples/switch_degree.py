"""One prompt on four ranks, a switch to two, the prefix used again, and the same answer.

    vertumnus model smollm2 -o smollm2
    python examples/switch_degree.py smollm2

Without a folder the model is converted into a temporary one first, which takes half a minute.
"""

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from vertumnus.engine.messages import Refusal
from vertumnus.engine.pool import RankPool
from vertumnus.engine.pool_config import PoolConfig
from vertumnus.engine.step import Address, Sampling, Step, StepRequest

BLOCK_TOKENS = 8
PROMPT = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is"
NUM_ANSWER_TOKENS = 12


class Pool:
    """Keeps what a pool's owner keeps: epoch, step numbers, and which slots are taken."""

    def __init__(self, ranks: RankPool) -> None:
        self.ranks = ranks
        self.epoch = 0
        self.num_steps = 0
        self.num_taken = [0] * ranks.config.num_ranks

    async def activate(self, geometry: dict[int, int]) -> None:
        self.epoch += 1
        activated = await self.ranks.activate(self.epoch, geometry)
        assert not isinstance(activated, Refusal), activated

    def blocks(self, members: range, num_tokens: int, held: list[Address]) -> list[Address]:
        """`held`, followed by new blocks in runs over the members."""
        num_new = -(-num_tokens // BLOCK_TOKENS) - len(held)
        table = list(held)
        for number in range(num_new):
            rank = members[number * len(members) // num_new]
            table.append((rank, self.num_taken[rank]))
            self.num_taken[rank] += 1
        return table

    async def answer(
        self, first_rank: int, degree: int, token_ids: list[int], held: list[Address]
    ) -> tuple[list[int], list[Address]]:
        """Greedy tokens behind the prompt, of which the blocks `held` are cached, and the blocks of the sequence."""
        table = self.blocks(range(first_rank, first_rank + degree), len(token_ids) + NUM_ANSWER_TOKENS, held)
        num_cached, found = len(held) * BLOCK_TOKENS, list(token_ids)
        while len(found) < len(token_ids) + NUM_ANSWER_TOKENS:
            request = StepRequest(
                request_id=1,
                token_ids=found[num_cached:],
                num_prefix_tokens=num_cached,
                blocks=table[: -(-len(found) // BLOCK_TOKENS)],
                sampling=Sampling(),
            )
            self.num_steps += 1
            step = Step(
                step_id=self.num_steps, first_rank=first_rank, degree=degree, epoch=self.epoch, requests=[request]
            )
            outputs = await self.ranks.step(step)
            assert not isinstance(outputs, Refusal), outputs
            num_cached = len(found)
            found += [out.token_id for output in outputs for out in output.outputs]
        return found[len(token_ids) :], table


async def run(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    options = {"folder": str(folder), "block_tokens": BLOCK_TOKENS}
    config = PoolConfig(source="vertumnus.engine.model_source:load", num_ranks=4, num_slots=16, options=options)
    pool = Pool(await RankPool.start(config))
    try:
        await pool.activate({0: 4})
        on_four, blocks = await pool.answer(0, 4, prompt, [])
        print(f"degree 4, {len(prompt)} tokens computed:", repr(tokenizer.decode(on_four)))

        # Blocks lie in runs over the group, so the ranks 0 and 1 hold the start of the sequence. At least the last
        # token of the prompt is computed anew: its logits are wanted.
        await pool.activate({0: 2, 2: 2})
        held = [address for address in blocks[: (len(prompt) - 1) // BLOCK_TOKENS] if address[0] < 2]
        on_two, _ = await pool.answer(0, 2, prompt, held)
        print(f"degree 2, {len(prompt) - len(held) * BLOCK_TOKENS} tokens computed:", repr(tokenizer.decode(on_two)))
        print("identical" if on_two == on_four else "DIFFERENT")
    finally:
        await pool.ranks.close()


def main() -> None:
    if len(sys.argv) > 1:
        asyncio.run(run(Path(sys.argv[1])))
        return
    from vertumnus.engine.smollm2 import convert

    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "smollm2"
        convert(folder)
        asyncio.run(run(folder))


if __name__ == "__main__":
    main()
