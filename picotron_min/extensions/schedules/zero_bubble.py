"""Zero-bubble schedules: weight gradients wait, and are computed where a rank would be idle.

Backward computes two things. The gradient of a stage's input is what the stage before waits for.
The gradients of its weights only the optimizer needs, at the end of the step. So backward is cut in
two: B computes the first, W the second, and W fills gaps (linear.py has the queue between them):

    rank 0  F0F1····B0══F2B1══F3B2══··B3══      1F1B: B is the whole backward
    rank 1  ··F0B0══F1B1══F2B2══F3B3══····

    rank 0  F0F1··B0W0F2B1W1F3B2W2B3W3          ZB-H1: the last rank sends each B earlier, and
    rank 1  ··F0B0F1B1W0F2B2W1F3B3W2W3            fills the end, where it would be idle, with W

    rank 0  F0F1F2f0b0w0f1b1w1F3B0W0f2b2w2B1W1f3b3w3B2W2B3W3··      ZB-V: stages 0 1 1 0; the
    rank 1  ··F0f0F1f1b0w0F2B0W0f2b1w1F3B1W1f3b2w2B2b3B3W2w3W3        way back is in lower case

README.md has the time that a rank is idle, and what it keeps.
Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", sections 2 and 6. In production:
`torch.distributed.pipelining.ScheduleZBVZeroBubble`, which has the order of ZB-V.
"""

from collections import Counter

from picotron_min.pipeline_schedule import Action, Kind, Plan


def zb_h1(rank: int, ranks: int, num_micro_batches: int, chunks: int = 1) -> Plan:
    """The order of 1F1B; behind B_i comes W_(i - rank), and what is left of W at the end."""
    m, letters = num_micro_batches, "F" * (ranks - rank - 1)
    # Rank r ends its last B about r W earlier than rank 0 does: so it saves r of them for the end.
    # With more it would need more memory than rank 0.
    letters += "FB" * rank + "FBW" * (m - rank) + "W" * rank
    return _plan(letters, m)


def zb_v(rank: int, ranks: int, num_micro_batches: int, chunks: int = 2) -> Plan:
    """Two chunks a rank, in a V: the first rank has both ends of the model."""
    m, behind = num_micro_batches, ranks - rank  # ranks from here to the turn of the V
    letters = "F" * (2 * behind - 1)  # until micro-batch 0 has been at the turn and is back
    letters += "fF" * rank  # until it has been at the end of the model, and its gradient is here
    letters += "fbw" * behind  # until that gradient has been at the turn and is back
    letters += "FBWfbw" * (max(m, 2 * ranks - 1) - ranks)  # the steady state, until no F is left
    letters += "Bb" * rank  # gradients that other ranks wait for; W waits
    letters += "BW" * behind + "w" * rank + "W" * rank
    return _plan(letters, m)


def _plan(letters: str, num_micro_batches: int) -> Plan:
    """Each letter stands for its next micro-batch; lower case is the second chunk."""
    plan, taken = [], Counter()
    for letter in letters:
        plan.append(Action(Kind(letter.upper()), taken[letter], chunk=int(letter.islower())))
        taken[letter] += 1
    # With few micro-batches, and at its end, a pattern has more letters than micro-batches.
    return [action for action in plan if action.micro_batch < num_micro_batches]


def vee(stage: int, ranks: int) -> tuple[int, int]:
    """The rank and chunk of a stage: there and back over the ranks, 0 1 1 0 for two of them."""
    return (stage, 0) if stage < ranks else (2 * ranks - 1 - stage, 1)


def bubble(ranks: int, num_micro_batches: int, chunks: int) -> float:
    """Of both schedules, if F, B and W of a chunk take equally long."""
    # In units of these. With few micro-batches there is not enough W for all gaps: hence the max.
    idle = max(ranks - 1, chunks * (2 * ranks - 1 - num_micro_batches))
    return idle / (3 * num_micro_batches * chunks + idle)
