"""Lets one thread at a time build or load a model of transformers."""

import threading

TRANSFORMERS_LOCK = threading.RLock()
"""Held while transformers builds or loads a model.

transformers replaces methods of its classes meanwhile, such as `PreTrainedModel.tie_weights`, and restores them
afterwards. With two threads, a tied head is reported as missing, and a method can stay replaced.
"""
