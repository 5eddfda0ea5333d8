"""The hunts: of each the place, story, runs, hints, explanation and change.

Each of these statements could be the wrong one: from the symptoms alone none stands out. The last
two are meant for the tool that docs/difference.md explains.
"""

SHEETS = """
picotron_min/placement.py:_placement
A user reports that with context parallelism the loss is another one. Data parallelism is fine.
dp=1,cp=1 dp=2,cp=1 dp=1,cp=2
? Ranks that should have the same weights have different ones. What makes them equal after a step?
? Their gradients are not summed over all ranks that see other tokens. Where is it decided over
  which axis they are?
? The placement table gives each parameter its axes: picotron_min/placement.py.
! Matrices' gradients were summed over dp, and not over dp x cp: context-parallel ranks see other
  tokens, too.
- return Placement(cuts, ("dp_cp",), sums=("dp_cp",), is_hidden_matrix=True)
+ return Placement(cuts, ("dp_cp",), sums=("dp",), is_hidden_matrix=True)

picotron_min/optimizer.py:measure_gradient
With gradient clipping, tensor parallelism trains a little differently. Without, it is exact.
tp=1,grad_clip=0.5 tp=2,grad_clip=0.5 tp=2
? The loss of step 1 is right, and so are the gradients. What else does clipping need?
? Some parameters count twice in the gradient norm. Which ones do all tp ranks hold?
? Only one of the ranks that hold the same part may count it: measure_gradient.
! What all tp ranks hold, the weights of norms, counted once on each of them.
- if all(ranks[axis] == 0 for axis in placements[name].copies)
+ if all(ranks[axis] == 0 for axis in placements[name].copies[:1])

train.py:train_step
With gradient accumulation SGD needs a smaller learning rate. AdamW does not.
micro_batches=1,lr=0.05 micro_batches=4,lr=0.05 micro_batches=1,lr=0.2
  micro_batches=1,optimizer=adamw,lr=0.01 micro_batches=4,optimizer=adamw,lr=0.01
? Compare 4 micro-batches with 1 micro-batch at 4 times the rate. What does AdamW do with a gradient
  that is 4 times too large?
? Gradients are sums over all tokens of the step, and are divided once. Where?
? In the step itself: train_step in train.py.
! The gradient was multiplied by the number of micro-batches. AdamW divides by the gradient's size,
  and hides it.
- gradients.scale(clip / num_targets)
+ gradients.scale(run.batches.num_micro_batches * clip / num_targets)

picotron_min/initialise.py:initialise
With tensor parallelism the loss is another one from the first step on. Pipelines train exactly.
tp=1 pp=2 tp=2
? The loss of step 1 differs already, before anything was trained.
? The ranks begin with weights that do not make up the matrices of one rank.
? Compare the parts that two tp ranks draw: picotron_min/initialise.py.
! All tp ranks began with the same part of every matrix: the model had half of its rank.
- whole = initial_weight(name, shapes[name], seed, std)  # one tensor at a time
-         mine = part(whole.shape, placements[name].owned, axes.ranks, axes.sizes)
-         parameter.data.copy_(whole[mine])
+ parameter.data.copy_(initial_weight(name, tuple(parameter.shape), seed, std))

picotron_min/pipeline_parallel.py:Pipeline._backward
A pipeline is exact with one micro-batch, and with several it is not. Solve it with --difference.
pp=2 micro_batches=4 pp=2,micro_batches=4
? hunt 6 --difference pp=2,micro_batches=4 names the first wrong tensor, and what it is instead.
? A gradient came back for one micro-batch, and went into the graph of another. Who finds the graph?
? Each rank keeps the graphs of its micro-batches until backward: picotron_min/pipeline_parallel.py.
! Backward took the graph that was kept last, not the graph of its micro-batch. With one alive, as
  on the last stage, both are the same.
- x, end = self.live.pop((i, c))
+ _, (x, end) = self.live.popitem()

picotron_min/data.py:Batches._read
With context parallelism the gradient of step 1 is another one. Solve it with --difference.
cp=1 dp=2 cp=2
? hunt 7 --difference cp=2 names the first wrong tensor, and what it is instead.
? All before rotation is right: tokens, weights, projections. What else does rotation need?
? A rank must know where in the sequence its tokens are: picotron_min/data.py.
! The tokens were the rank's, and their positions were counted from 0 on each rank.
- rows[:, self.positions + 1], self.positions)
+ rows[:, self.positions + 1], torch.arange(len(self.positions)))
"""
