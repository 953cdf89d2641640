"""A tokenizer for stub ranks, which know no words."""

from tokenizers import Tokenizer, decoders, models

from vertumnus.serve.http import Tokeniser


def stub_tokeniser(vocab_size: int) -> Tokeniser:
    """A word for every token id, put together as byte-level tokenizers do."""
    tokenizer = Tokenizer(models.WordLevel({f"t{token_id}": token_id for token_id in range(vocab_size)}, "t0"))
    tokenizer.decoder = decoders.ByteLevel()
    return Tokeniser(tokenizer)
