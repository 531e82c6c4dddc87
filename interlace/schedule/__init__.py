"""How a flow runs, as data, and the pure rules that follow from it: synchronous, no set iterated."""
