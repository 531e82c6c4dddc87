"""The sandbox for code that a model wrote: a warm fork server, an empty root, namespaces, a seccomp filter and limits.

A probe tries to break each guard at the start, because kernels differ; the report lists the guards that hold.
"""
