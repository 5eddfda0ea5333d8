"""36 moments: round what is kept, and nothing else

target: extensions.optimizers.adamw:NarrowAdamW.step
train: training.moments="bfloat16"

Write the step of AdamW. For each parameter of each group: count the step; m <- b1 m + (1 - b1) g,
v <- b2 v + (1 - b2) g^2, computed in the dtype of the gradient; store both moments, which rounds
them to bfloat16. The update uses them before they are rounded, each divided by 1 - b^t: then it is
an average of t steps from the first on. First multiply the parameter by 1 - lr * weight_decay, then
subtract lr m / (sqrt(v) + 1e-8). Nothing is part of a graph. A pipeline's stage may have no
parameters of a group. A loop over the parameters is right; the course takes lists of them,
self.chunks(group["params"]), so that a GPU starts fewer kernels.
Read: extensions/optimizers/adamw.py (self.state[parameter] has "step", "exp_avg" and "exp_avg_sq").

? Count, read both moments wide, change them, store them, decay, update.
? self.param_groups, group["params"], ["lr"], ["betas"], ["weight_decay"]; lerp_, addcmul_, copy_,
  addcdiv_; or torch._foreach_lerp_, ... of lists.
? moment.to(gradient.dtype) is a wide copy, and moment.copy_(wide) rounds it. The mean's correction,
  1 - b1^t, divides the rate; the other one, under its root, divides sqrt(v).
! 4 bytes a parameter for both moments instead of 8; with b2 = 0.999 a stored v would never fall. In
  production: torchao's `AdamW8bit`.
"""

import torch

from exercises.exercise import Case, Dice, draw
from exercises.pictures import bars

STEPS, WEIGHTS, DTYPES = 6, 3, "dtypes of the moments"
GROUPS = (1, 0.0), (2, 0.5)  # lr, in units of the case's, and weight_decay


def cases(dice: Dice) -> list[Case]:
    kinds = ((0.9, 0.95), 1.0), ((0.8, 0.99), 0.1), ((0.9, 0.95), 1e-4)
    sizes = {"rows": dice.randint(2, 3), "lr": dice.randint(2, 9) / 100}
    some = [Case(1, betas=betas, falls=x, **sizes) for betas, x in kinds]
    # Numbers of a chunk, and steps before the run was resumed.
    some.append(Case(1, betas=(0.9, 0.9999), falls=1.0, chunk=4, begun=1000, **sizes))
    return [*some, Case(1, betas=(0.9, 0.99), falls=1.0, empty_group=True, **sizes)]


def weight_of(case: Case, number: int):
    return draw(case, "w", number, shape=shape_of(case, number))


def gradient(case: Case, number: int, step: int):
    return draw(case, "gradient", number, step, shape=shape_of(case, number)) * case.falls**step


def shape_of(case: Case, number: int) -> tuple[int, ...]:
    """A matrix; the last one, which decays as its group says, is a vector."""
    return (case.rows, 2) if number < WEIGHTS - 1 else (case.rows,)


def on_rank(rank, case: Case) -> dict:
    weights = [torch.nn.Parameter(weight_of(case, i)) for i in range(WEIGHTS)]
    parts = zip((weights[:1], weights[1:]), GROUPS, strict=True)
    groups = [{"params": p, "lr": n * case.lr, "weight_decay": decay} for p, (n, decay) in parts]
    if hasattr(case, "empty_group"):
        groups.insert(1, {**groups[1], "params": []})
    rank.course.adamw.CHUNKS["cpu"] = getattr(case, "chunk", 2**18)
    optimizer = rank.course.adamw.NarrowAdamW(groups, 1.0, case.betas)
    for state in optimizer.state.values():
        state["step"] += getattr(case, "begun", 0)
    history, moments = [], []
    for step in range(STEPS):
        for i, weight in enumerate(weights):
            weight.grad = gradient(case, i, step)
        optimizer.step()
        history.append([weight.detach().clone() for weight in weights])
        states = [optimizer.state[weight] for weight in weights]
        moments.append([[s["exp_avg"].double(), s["exp_avg_sq"].double()] for s in states])
    dtypes = [str(s[name].dtype) for s in states for name in ("exp_avg", "exp_avg_sq")]
    result = named(case, history) | {"moments after each step": moments, DTYPES: dtypes}
    result["steps that are counted"] = [float(s["step"]) for s in states]
    return result | {"gradients": [weight.grad for weight in weights]}


def named(case: Case, history: list[list]) -> dict:
    """Weights after each step; the first group has no decay."""
    names = {"first step, divided by lr": (weight_of(case, 0) - history[0][0]) / case.lr}
    names["matrices after each step"] = [weights[:-1] for weights in history]
    return names | {"vector after each step": [weights[-1] for weights in history]}


def expected(case: Case) -> list[dict]:
    (beta1, beta2), begun = case.betas, getattr(case, "begun", 0)
    weights = [weight_of(case, i) for i in range(WEIGHTS)]
    history, moments = [], [[[torch.zeros_like(w), torch.zeros_like(w)] for w in weights]]
    for step in range(STEPS):
        moments.append([])
        for w, weight in enumerate(weights):
            n, decay = GROUPS[w > 0]
            lr, new = n * case.lr, gradient(case, w, step)
            mean, square = moments[step][w]
            mean = beta1 * mean + (1 - beta1) * new
            square = beta2 * square + (1 - beta2) * new**2
            moments[-1].append([x.bfloat16().double() for x in (mean, square)])
            t = begun + step + 1
            mean, square = mean / (1 - beta1**t), square / (1 - beta2**t)
            weight -= lr * decay * weight
            weight -= lr * mean / (square**0.5 + 1e-8)
        history.append([weight.clone() for weight in weights])
    result = {DTYPES: ["torch.bfloat16"] * 2 * WEIGHTS, "moments after each step": moments[1:]}
    result |= named(case, history)
    result["gradients"] = [gradient(case, i, STEPS - 1) for i in range(WEIGHTS)]  # unchanged
    return [result | {"steps that are counted": [float(begun + STEPS)] * WEIGHTS}]


def picture(runs):
    case, records = runs[1]
    moments = records[0].values["moments after each step"]
    squares = [square[0, 0].item() for (_, square), *_ in moments]
    rows = {f"step {step}": v / squares[0] for step, v in enumerate(squares)}
    about = f"v of one weight, b2 = {case.betas[1]}; each gradient is a tenth of the one before"
    return [about, bars(rows, "{:.4f}")]


VERSIONS = """
mean_not_corrected: The mean is not divided by 1 - b1^t: the first updates are far too small.
    -lr / (1 - beta1**steps) => -lr
square_not_corrected: v is not divided by 1 - b2^t: the first updates are too large.
    math.sqrt(1 - beta2**steps) => 1.0
nothing_corrected: Moments are not divided by 1 - b^t: they begin at 0, and are too small at first.
    math.sqrt(1 - beta2**steps) => 1.0
    -lr / (1 - beta1**steps) => -lr
step_not_stored: state["step"] does not grow: all corrections are the first step's.
    torch._foreach_add_(counts, 1) => counts = torch._foreach_add(counts, 1)
decay_in_gradient: The decay is added to the gradient, as in Adam with L2: AdamW takes it off the
    weight, so that v does not divide it.
- steps = counts[0].item()
+ steps = counts[0].item()
+ gradients = torch._foreach_add(gradients, weights, alpha=group["weight_decay"])
    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"]) => pass
decay_without_rate: The weight loses its weight_decay-th part in each step: it must be times lr.
    lr * group => group
no_decay: Weights do not decay.
    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"]) => pass
decay_last: The decay comes after the update, and takes a part of that, too.
    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"]) => pass
    beta1**steps)) => beta1**steps)); torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
first_group_for_all: All parameters have the lr and weight_decay of the first group, not of theirs.
    group["lr"] => self.param_groups[0]["lr"]
    group["weight_decay"] => self.param_groups[0]["weight_decay"]
rate_of_the_start: The rate is self.defaults["lr"], with which the optimizer was built: group["lr"]
    follows the schedule, and a group may have its own.
    lr, (beta1, beta2) = group["lr"], => lr, (beta1, beta2) = self.defaults["lr"],
no_parameters: A group without parameters is not skipped: torch refuses empty lists.
    if not counts: => if False:
not_in_place: The weights do not change: `p = p - ...` makes a new tensor. Change p in place.
    torch._foreach_mul_(weights, => weights = torch._foreach_mul(weights,
eps_in_root: 1e-8 is added to v, under the root: it counts 10^4 times as much where v is small.
    torch._foreach_sqrt_(square) => pass
    math.sqrt(1 - beta2**steps) => 1 - beta2**steps
    (square, 1e-8) => (square, 1e-8); torch._foreach_sqrt_(square)
stored_corrected: The moments are corrected before they are stored: the next step averages from
    there, and corrects them once more.
- torch._foreach_copy_(means, mean)
+ torch._foreach_div_(mean, 1 - beta1**steps)
+ torch._foreach_div_(square, 1 - beta2**steps)
+ torch._foreach_copy_(means, mean)
    math.sqrt(1 - beta2**steps) => 1.0
    -lr / (1 - beta1**steps) => -lr
rounded_before_use: The update uses the stored moments, of three digits: round only what is kept.
- torch._foreach_sqrt_(square)
+ mean, square = (wide_copies(narrow, gradients) for narrow in (means, squares))
+ torch._foreach_sqrt_(square)
rounded_twice: v is multiplied by b2 in bfloat16, and rounded there, before anything is added.
- torch._foreach_mul_(square, beta2)
+ square = wide_copies(torch._foreach_mul(squares, beta2), gradients)
square_not_stored: v is not stored: each step begins with the first step's, which is 0.
    torch._foreach_copy_(squares, square) => pass
stored_wide: The moments are stored in the gradient's dtype: they need as much memory as ever.
- torch._foreach_copy_(squares, square)
+ for parameter, new_mean, new_square in zip(group["params"], mean, square):
+     state = self.state[parameter]
+     state["exp_avg"], state["exp_avg_sq"] = new_mean.clone(), new_square.clone()
betas_swapped: The betas are swapped: b1 is for the mean, b2 for the square.
    (beta1, beta2) => (beta2, beta1)
not_squared: v is a mean of gradients, not of their squares: its root may be NaN.
    addcmul_(square, gradients, gradients, 1 - beta2) => add_(square, gradients, alpha=1 - beta2)
uphill: The update is added: the loss grows.
    square, -lr / => square, lr /
counted_in_chunks: The step is counted once a chunk: in a group of several, one step counts often.
    torch._foreach_add_(counts, 1) => pass
    steps = counts[0].item() => torch._foreach_add_(counts, 1); steps = counts[0].item()
eps_not_corrected: 1e-8 is added to the root of v before v is corrected, as in the paper's short
    form: it counts 1 / sqrt(1 - b2^t) times as much.
    torch._foreach_div_(square, math.sqrt(1 - beta2**steps)) => pass
    -lr / (1 - beta1**steps) => -lr * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
also_right:
@torch.no_grad()
def step(self):
    for group in self.param_groups:
        b1, b2 = group["betas"]
        for p in group["params"]:
            state = self.state[p]
            state["step"] += 1
            t, g = float(state["step"]), p.grad
            m = b1 * state["exp_avg"].to(g.dtype) + (1 - b1) * g
            v = b2 * state["exp_avg_sq"].to(g.dtype) + (1 - b2) * g**2
            state["exp_avg"], state["exp_avg_sq"] = m.bfloat16(), v.bfloat16()
            update = m / (1 - b1**t) / ((v / (1 - b2**t)) ** 0.5 + 1e-8)
            p -= group["lr"] * (group["weight_decay"] * p + update)
"""
