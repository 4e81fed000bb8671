"""The traffic that a workload describes: the lengths of its sequences, and its name read back."""

from __future__ import annotations

import random
import re

from kvgen.spec.model import EQUAL, MAX_BATCH, MAX_KV_LEN, MAX_Q_LEN, Lengths, Workload

NAME = re.compile(r"([0-9]{1,18})x(?:([0-9]{1,18})-)?([0-9]{1,18})(?:q([0-9]{1,18}))?(?::(rested|sustained))?")
FORM = "batch x tokens, e.g. 1x32768; 1x32768q4 for 4 query tokens, 48x300-24576 for lengths from 300 to 24576, 8x32768:sustained"


def parse(text: str) -> Workload:
    """The workload of a name, as `Workload.key` writes it. Raises ValueError where it is none, or where a number is out of range.

    Without pydantic, because a fetched entry may have many.
    """
    match = NAME.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r:.80} is not a workload; write {FORM}")
    batch, kv_len, q_len = int(match[1]), int(match[3]), int(match[4] or 1)
    shortest = None if match[2] is None else int(match[2])
    within = 0 < batch <= MAX_BATCH and 0 < kv_len <= MAX_KV_LEN and 0 < q_len <= MAX_Q_LEN
    if not within or (shortest is not None and not 0 < shortest < kv_len):
        raise ValueError(
            f"workload {text!r} is out of range: 1 to {MAX_BATCH} sequences of up to {MAX_KV_LEN} tokens, 1 to {MAX_Q_LEN} query tokens, "
            "the shortest of unequal lengths below the longest"
        )
    lengths = EQUAL if shortest is None else Lengths.trusted(min=shortest)
    return Workload.trusted(batch=batch, kv_len=kv_len, q_len=q_len, lengths=lengths, load=match[5] or "rested")


def sequence_lengths(workload: Workload, seed: int = 0) -> list[int]:
    """Tokens of each sequence, in an order that follows from the seed; the longest has kv_len tokens.

    Of unequal lengths, sequence i of n is at quantile (i + 1/2) / n of the distribution, so that the total does not depend on the seed.
    """
    low, high, batch = workload.shortest, workload.kv_len, workload.batch
    if low == high:
        return [high] * batch
    lengths = [round(low * (high / low) ** ((number + 0.5) / batch)) for number in range(batch)]
    lengths[-1] = high
    random.Random(seed).shuffle(lengths)
    return lengths
