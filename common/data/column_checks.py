"""Lists the columns of a corpus that are ignored."""

from common.data.source_types import Corpus
from common.errors import shorten

# Columns that have a meaning in other tools, each with the effect of ignoring it here.
MEANINGS = {
    **dict.fromkeys(("system", "system_prompt"), "its text is not trained on"),
    "history": "earlier turns are left out",
    **dict.fromkeys(("instruction", "input", "question", "query", "context"), "its text is not trained on"),
    **dict.fromkeys(("tools", "functions"), "the list of functions is left out"),
    "documents": "they are left out",
    **dict.fromkeys(("weight", "weights", "sample_weight", "loss_weight"), "all rows have equal weight"),
    **dict.fromkeys(("train", "loss", "mask", "loss_mask", "completion_mask", "assistant_masks"), "no token is masked"),
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), "only text is trained on"),
    **dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "the reasoning is not trained on"),
    **dict.fromkeys("score score_chosen score_rejected margin rating reward".split(), "all rows have equal weight"),
    "label": "good and bad rows are trained on equally",
    "rejected": "rejected answers are not trained on",
    **dict.fromkeys(
        ("chat_template", "chat_template_kwargs"), "the template and its settings are the same for all rows"
    ),
    **dict.fromkeys(("messages", "conversations", "prompt", "completion"), "the row is read from its other columns"),
}


def unused_columns(corpus: Corpus) -> str:
    """Returns a list of the ignored columns as text, columns in MEANINGS first; empty if all columns are used."""
    names = sorted(
        (name for name, number in corpus.unused.items() if number), key=lambda name: (name not in MEANINGS, name)
    )
    descriptions = [f"{name} ({MEANINGS[name]})" if name in MEANINGS else name for name in names]
    return f"columns not used: {shorten(descriptions)}" if names else ""
