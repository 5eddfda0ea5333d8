"""16 resume: all that a step changes, and nothing else

target: checkpoint:training_tensors
train: checkpoint.load_path="latest"

Return all tensors that a step of training changes, by the name under which they are saved: the data
of each parameter, also of a frozen one, by its name, buffers by theirs, and what the optimizer
keeps of each parameter as "optimizer.KEY.NAME", such as optimizer.exp_avg.lm_head.weight, but for
its "step": all steps are equal, and are saved as one number. The tensors themselves, no copies: a
checkpoint is loaded into them. AdamW has no state before its first step. So give each parameter of
a group with "betas" that has none a "step" of zero and two moments of zeros, exp_avg and
exp_avg_sq; "step" is on the CPU, but on the parameter's device if the group is fused.
Read: checkpoint.py.

? Fill in AdamW's missing state; then collect parameters, buffers and states in one dict.
? optimizer.param_groups, optimizer.state[parameter], torch.zeros, torch.zeros_like, parameter.data.
? optimizer.state[parameter] is a dict, empty before the first step: put step, exp_avg and
  exp_avg_sq in it, each a tensor of its own. Then take parameter.data by name, the buffers, and of
  each parameter's state all keys but step.
! With AdamW in float32 a checkpoint has 12 bytes a parameter: the weight and 2 moments. In
  production: `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`.
"""

import torch

from exercises.exercise import Case, Dice, draw

SHAPES = {"lm_head.weight": (3, 4), "k_norm.weight": (2,), "norm.weight": (4,)}
FROZEN = "k_norm.weight"
BUFFER = "mlp.gate.e_score_correction_bias"
# What optimizers keep of a parameter. Adagrad, as Muon, has it from the beginning.
KEPT = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adagrad": ("sum",), "SGD": ()}


def cases(dice: Dice) -> list[Case]:
    steps = dice.randint(2, 4)
    return [Case(1, optimizer=name, steps=n) for name in KEPT for n in (0, steps)]


class Training:
    """A few parameters, an optimizer with two groups of them, and a buffer, changed by a step."""

    def __init__(self, case: Case, start: str) -> None:
        tensors = {name: draw(case, start, name, shape=shape) for name, shape in SHAPES.items()}
        self.case = case
        self.parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
        self.buffers = {BUFFER: draw(case, start, BUFFER, shape=(5,))}
        # In another order than the names: the norms first, as with weight decay for matrices alone.
        matrix, frozen, norm = self.parameters.values()
        frozen.requires_grad_(False)
        groups = [{"params": [norm]}, {"params": [matrix]}]
        self.optimizer = getattr(torch.optim, case.optimizer)(groups, lr=0.1)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            for name, parameter in self.parameters.items():
                if parameter.requires_grad:
                    parameter.grad = draw(self.case, "gradient", name, step, shape=SHAPES[name])
            self.optimizer.step()
            self.buffers[BUFFER] += draw(self.case, "bias", step, shape=(5,))

    def values(self, when: str) -> dict:
        tensors = {name: parameter.detach() for name, parameter in self.parameters.items()}
        return {f"{name} after {when}": t.clone() for name, t in (tensors | self.buffers).items()}


def on_rank(rank, case: Case) -> dict:
    checkpoint = rank.course.checkpoint
    run, other = Training(case, "a run"), Training(case, "another")
    run.train(0, case.steps)
    parts = ((one.parameters, one.buffers, one.optimizer) for one in (run, other))
    tensors, targets = (checkpoint.training_tensors(*three) for three in parts)
    saved = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    # As a checkpoint is loaded: into the tensors themselves, so that a copy changes no weight.
    for name in sorted(saved.keys() & targets.keys()):
        targets[name].copy_(saved[name])
    checkpoint.set_optimizer_steps(other.optimizer, case.steps)
    # Two more steps tell whether anything is missing.
    other.train(case.steps, case.steps + 2)
    run.train(case.steps, case.steps + 2)  # saving must not have changed it
    shapes = {name: list(tensor.shape) for name, tensor in saved.items()}
    return {"shapes": shapes} | other.values("resuming") | run.values("saving")


def expected(case: Case) -> list[dict]:
    run = Training(case, "a run")
    run.train(0, case.steps + 2)  # without a break
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    learned = {name: shape for name, shape in shapes.items() if name != FROZEN}
    states = {
        f"optimizer.{key}.{name}": shape
        for key in KEPT[case.optimizer]
        for name, shape in learned.items()
    }
    right = {"shapes": shapes | {BUFFER: [5]} | states}
    return [right | run.values("resuming") | run.values("saving")]


MISTAKES = """
no_state_before_the_first_step: A new AdamW has no moments: nothing can be loaded into it.
    if not state: => if False:
optimizer_forgotten: What the optimizer keeps is not saved: its averages begin again at zero.
    tensors |= {f"optimizer.{key}.{name}": state for key, state in kept.items()} => pass
copies: The result has copies of the parameters: what is loaded into them changes no weight.
    parameter.data for => parameter.data.clone() for
buffers_forgotten: Buffers are missing: a router's bias changes in each step, too.
    } | dict(buffers) => }
paired_by_order: Names and states are paired by their order: the optimizer's groups have another.
    name, parameter in parameters.items(): => name, parameter in zip(parameters, optimizer.state):
frozen_left_out: A frozen parameter is left out: a checkpoint has all weights of the model.
    parameters.items()} | dict => parameters.items() if parameter.requires_grad} | dict
"""
