"""Describes the skipped updates of a run that failed."""

from typing import Any


def describe_failure(results: dict[str, Any]) -> str | None:
    """Returns a message if at least the last half of a run's updates was skipped as non-finite; otherwise None."""
    updates, at_end = results["updates"], results.get("skipped_at_end", 0)
    if not updates or 2 * at_end < updates or (results.get("best") or {}).get("is_model"):
        return None
    is_none = updates == results["skipped_updates"]
    what = "no update was made" if is_none else f"the last {at_end:,} of {updates:,} updates were skipped"
    return f"{what}: loss or gradient was not finite; lower --learning_rate, or check the data and the model's weights"
