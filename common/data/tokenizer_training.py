"""Trains a byte-level BPE tokenizer."""

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data.row_texts import text_of, utf8_length
from common.data.source_types import Corpus

TOKENIZER_BYTES = 200_000_000  # maximum size of the training text


def train_bpe(
    sources: list[tuple[Corpus, tuple[str, ...]]], vocab_size: int, special_tokens: list[str]
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose first special token is bos, eos and pad."""
    end, bpe = special_tokens[0], Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes, in a fixed order
        show_progress=False,
    )

    def pieces() -> Iterator[str]:
        for corpus, columns in sources:
            rows, left = corpus.rows(columns, True), TOKENIZER_BYTES / len(sources)
            if corpus.may_be_large:
                from common.data.reading_progress import with_progress

                rows = with_progress(rows, corpus, "training a tokenizer on", left)
            for row in rows:
                if any(column == "messages" or isinstance(row.values.get(column), list) for column in columns):
                    from common.data.messages import texts_of

                    texts = texts_of(row, columns)
                else:
                    texts = [text_of(row, column) for column in columns]
                for text in texts:
                    left -= utf8_length(text, row.where)
                    # tokenizers collects 256 items before it processes them; small items limit its memory.
                    yield from (text[start : start + 65536] for start in range(0, len(text), 65536))
                if left < 0:
                    break

    bpe.train_from_iterator(pieces(), trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, bpe.token_to_id(end))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, pad_token=end)
