"""Skipped steps: one whose gradient is not finite leaves the weights as they are."""

import math


class SkippedSteps:
    """Counts them, and ends a run that has diverged."""

    def __init__(self) -> None:
        self.total = self.in_a_row = 0  # the total is saved with a checkpoint
        self.has_learned = False  # in this process

    def must_skip(self, step: int, norm: float) -> bool:
        """True if this step must be skipped; FloatingPointError at the third in a row."""
        if math.isfinite(norm):
            self.in_a_row, self.has_learned = 0, True
            return False
        self.total, self.in_a_row = self.total + 1, self.in_a_row + 1
        if self.in_a_row < 3:  # a single batch may overflow
            return True
        raise FloatingPointError(  # a resume from the last checkpoint would end in the same way
            f"the gradient was not finite in 3 steps in a row, up to step {step}: the run has"
            " diverged. Resume from a checkpoint well before, named in checkpoint.load_path, with a"
            " lower learning_rate or grad_clip; or start again with more warmup_steps"
            if self.has_learned
            else "the gradient was not finite in the first 3 steps, before any weight was changed:"
            " the weights at the start are not finite, or much too large. Start from others"
        )
