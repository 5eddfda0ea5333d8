"""Right versions of some exercises, by number, written in another way than the course's own."""

RIGHT = {
    4: """
def __init__(self, tensor, axis, distance=1):
    to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    self.sent, self.arriving = tensor, tensor.new_empty(tensor.shape)
    receive = dist.P2POp(dist.irecv, self.arriving, group=axis.group, group_peer=source)
    send = dist.P2POp(dist.isend, tensor, group=axis.group, group_peer=to)
    self.works = dist.batch_isend_irecv([receive, send])
    axis.ledger.record("shift", tensor)
""",
    7: """
def _start_complete_buckets(self):
    while len(self.works) < len(self.buckets):
        bucket = self.buckets[len(self.works)]
        if sum(self.missing[name] for name in bucket.names) > 0:
            return
        self.works.append(start_all_reduce(bucket.gradients, self.axis))
""",
    12: """
def stripe_loss(x, weight, targets, vocabulary=Vocabulary()):
    logits, ids = wide(x @ weight.T), torch.arange(len(weight)) + vocabulary.first
    logits = logits - vocabulary.maximum(logits.max(1).values).unsqueeze(1)
    onehot = (targets[:, None] == ids).to(logits.dtype)  # IGNORE_INDEX is no id
    both = vocabulary.total(torch.stack([logits.exp().sum(1), (logits * onehot).sum(1)], 1))
    counts = (targets != IGNORE_INDEX).to(logits.dtype)
    losses = counts * (both[:, 0].log() - both[:, 1])
    return losses, (counts[:, None] * logits.exp() / both[:, :1] - onehot).to(x.dtype)
""",
}
