"""How a flow runs, as data, and the pure rules that follow from it: synchronous, time as an argument, no set iterated."""
