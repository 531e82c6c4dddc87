"""Weights from trainer ranks to engine ranks: who holds what, who needs what, and how the difference travels."""
