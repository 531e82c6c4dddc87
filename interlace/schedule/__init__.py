"""Description of how a flow runs, as data, and the pure rules that follow from it: synchronous, without iteration over
sets.
"""
