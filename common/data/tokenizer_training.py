"""Trains a byte-level BPE tokenizer."""

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from common.data.row_texts import text_of, utf8_length
from common.data.source_types import Corpus, Row

TOKENIZER_BYTES = 200_000_000  # maximum size of the training text


def _texts_of(row: Row, columns: tuple[str, ...]) -> list[str]:
    """Returns the texts in the columns of a row; for messages, their contents."""
    texts = []
    for column in columns:
        if column == "messages" or isinstance(row.values.get(column), list):
            from common.data.messages import contents_of

            texts += contents_of(row, column)
        else:
            texts.append(text_of(row, column))
    return texts


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

    def texts() -> Iterator[str]:
        for corpus, columns in sources:
            left = TOKENIZER_BYTES / len(sources)
            for row in corpus.rows(columns, True):
                for text in _texts_of(row, columns):
                    left -= utf8_length(text, row.where)
                    # tokenizers collects 256 items before it processes them; small items limit its memory.
                    yield from (text[start : start + 65536] for start in range(0, len(text), 65536))
                if left < 0:
                    break

    bpe.train_from_iterator(texts(), trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{end} $A", special_tokens=[(end, bpe.token_to_id(end))])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, pad_token=end)
