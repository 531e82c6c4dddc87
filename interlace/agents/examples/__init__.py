"""Two small agents that the recipes `react` and `program` train. They import nothing from the training system."""
