"""Moving weights from the trainer to the engines. In one process a `WeightBundle` is handed over as it is."""
