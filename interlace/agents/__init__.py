"""Two small agents that recipes train: written as users write theirs, they know nothing of training."""
