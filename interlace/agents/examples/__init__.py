"""Two small agents for the recipes `react` and `program`. They do not import the training system."""
