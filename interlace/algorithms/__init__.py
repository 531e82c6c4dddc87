"""Algorithms, one file each, found by name: an advantage estimator, a policy loss and declared needs."""

from interlace.algorithms.base import Advantages, Algorithm, AlgorithmConfig, Needs, rewards_of
from interlace.algorithms.load import algorithm_names, create_algorithm, objective_names, off_policy_names

__all__ = [
    "Advantages",
    "Algorithm",
    "AlgorithmConfig",
    "Needs",
    "algorithm_names",
    "create_algorithm",
    "objective_names",
    "off_policy_names",
    "rewards_of",
]
